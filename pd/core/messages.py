"""Wire messages (msgspec, MessagePack). Nodes speak tokens, never text.

Every message names the instance it is for in ``to``; an instance drops what is meant for another.
Token ids travel as little-endian int32 bytes. Times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from pd.core.node_info import MAX_PLANES, Role
from pd.core.node_load import NodeLoad
from pd.core.sampling_params import SamplingParams

ROOM_BYTES = 16
MAX_MESSAGE_BYTES = 64 << 20
HEARTBEAT_INTERVAL = 0.5
# Long enough for a busy two-core host, short enough that an error reaches the client within 5 s.
LEASE_SECONDS = 3.5
# Prefill nodes that a decode node is asked to meet before a request comes. The others it meets with
# their first request.
MAX_MEETINGS = 64

# Instead of the number of a batch of prefix events: none was taken yet, and none is wanted.
PREFIXES_UNKNOWN, PREFIXES_UNWANTED = -1, -2

RoomId = Annotated[bytes, msgspec.Meta(min_length=ROOM_BYTES, max_length=ROOM_BYTES)]
PageHashes = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
# A hidden state: 16,384 numbers of four bytes, and some room.
DrafterState = Annotated[bytes, msgspec.Meta(max_length=256 << 10)]
# Run delay of a process since it began to read it, see :mod:`pd.core.starvation`.
TotalDelay = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
# Leading tokens that are cached, for each group of planes. Numbers that cannot be end the request,
# which would wait in vain if the message were dropped.
CachedLengths = Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]

Fault: TypeAlias = Literal["node", "peer", "pair", "nobody"]


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base: ``to`` is the instance id of the receiver, ``sender`` of the sender."""

    to: str
    sender: str


class ErrorInfo(msgspec.Struct, forbid_unknown_fields=True):
    """An error on the wire, see :func:`pd.core.errors.error_from_kind`."""

    kind: str
    message: str
    param: str | None = None


# ---- proxy to node


class Generate(Message):
    """One request's part for one node.

    Attributes:
        rid: the client's name for the request.
        room: 16 random bytes, minted by the proxy for each attempt.
        token_ids: the prompt, int32; in a resumed request followed by the output so far.
        produced: how many of ``token_ids``, at their end, other nodes have output before. The next
            token is output at this position. Only with one choice, and without log probabilities of
            the prompt.
        namespace: separates cached prefixes (``cache_salt`` and ``extra_key``).
        owner: tells the keys apart with which clients came, without telling what they are.
        timeout: seconds until the deadline, or None.
        ttft: seconds within which the first token should come; 0 if nothing is said of that.
        waited: how many of them have passed.
        peer: instance id of the other node of the pair; empty when P needs no D.
        peer_bootstrap: on D, ``http://host:port`` of P's registry.
    """

    rid: str
    room: bytes
    token_ids: bytes
    params: SamplingParams
    produced: Annotated[int, msgspec.Meta(ge=0)] = 0
    namespace: str = ""
    owner: Annotated[str, msgspec.Meta(max_length=64)] = ""
    priority: int = 0
    timeout: float | None = None
    ttft: Duration = 0.0
    waited: Duration = 0.0
    peer: str = ""
    peer_bootstrap: str = ""


class GenerateTogether(Message):
    """Several requests that arrive at a node in one event, so that its scheduler sees all of them
    before it computes one: what they share is computed once, and the rest in one batch."""

    requests: list[Generate]


class Abort(Message):
    """End a room, or a choice of it (its stop string was found); unknown rooms leave a tombstone.

    ``index`` None ends all choices.
    """

    room: bytes
    index: int | None = None
    reason: str = "aborted"


class TakeBack(Message):
    """Give a request back that waits for its prompt to be computed, since its first token is
    expected earlier at another node. The node answers with :class:`TakenBack`."""

    room: RoomId


class ProxyHeartbeat(Message):
    """Sent to every node twice a second; ``to`` is empty until the instance is known.

    A proxy has two senders of them: its event loop, and a thread under
    :func:`heartbeat_identity`, which only keeps the lease and gets no answer.

    Attributes:
        run_delay: run delay of the proxy.
        run_delays: run delays of nodes by instance id, so that a node knows a peer's before the two
            have met.
        meet: on a decode node: prefill nodes whose requests may come, instance id and
            ``http://host:port`` of the registry, so that the link is there when one does.
        number: counts the heartbeats of the proxy to this node.
        itl: seconds between tokens that the proxy wants (``--slo-itl-ms``); 0 if it was not told.
        prefixes: number of the last batch of :class:`PrefixEvents` that the proxy has taken.
        decides: the proxy wants the lease with which it may move the role of an elastic node.
    """

    run_delay: TotalDelay = 0.0
    run_delays: Annotated[dict[str, TotalDelay], msgspec.Meta(max_length=4096)] = {}
    meet: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_MEETINGS)] = {}
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    itl: Duration = 0.0
    prefixes: Annotated[int, msgspec.Meta(ge=-2, le=1 << 62)] = PREFIXES_UNWANTED
    decides: bool = False


class PreferRole(Message):
    """Have an elastic node prefer a role.

    Attributes:
        role: None, which only administrators order, leaves it to the proxy that has the lease.
        fixed: an administrator wants it. Otherwise the proxy has the node's lease.
        term: of the lease.
    """

    role: Role | None
    fixed: bool = False
    term: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


# ---- node to proxy


class TokenLogprobs(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """Log probability of one token and of the likeliest ones, best first."""

    token_id: int
    logprob: float | None
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Finish(msgspec.Struct, forbid_unknown_fields=True):
    """Reason why a choice ended. ``matched``: the token id that ended it, for ``stop``."""

    type: Literal["stop", "length"]
    matched: int | None = None


class Stages(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds a request spent in each stage, as far as the sender knows."""

    queue: float | None = None
    bootstrap: float | None = None
    prefill: float | None = None
    transfer: float | None = None
    decode: float | None = None


class Output(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """New tokens of one choice.

    Attributes:
        position: index among the choice's output tokens of the first of ``token_ids``.
        logprobs: one entry per token when asked for.
        cached_tokens, prompt_logprobs: with token 1 from the node that computed the prompt; of a
            long prompt they come before it in parts, without token ids.
        transferred_bytes: on D's first message: KV bytes received for this room.
    """

    room: bytes
    index: int
    position: int
    token_ids: list[int]
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    transferred_bytes: int | None = None
    stages: Stages | None = None


class StepOutputs(Message):
    """Outputs of one step for one proxy."""

    outputs: list[Output]


class Failed(Message):
    """The room ended without success on this node.

    ``fault``: the node at fault as this one sees it: itself, its peer, or one of the pair, of which
    neither knows which; ``nobody`` if it takes no requests at present and so has not begun.
    """

    room: bytes
    error: ErrorInfo
    fault: Fault = "node"


class StepFailed(Message):
    """A step failed, and with it these rooms of one proxy."""

    rooms: list[bytes]
    error: ErrorInfo


class TakenBack(Message):
    """Answer to :class:`TakeBack`.

    Attributes:
        taken: no token of the prompt was computed, and the node has ended the request without
            another word. Otherwise it goes on there, or has ended.
    """

    room: RoomId
    taken: bool


class RoleState(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The role that an elastic node prefers (:mod:`pd.node.role_lease`).

    Attributes:
        role: None before anybody set it.
        fixed: an administrator set it.
        decider: proxy that has the lease with which it may move the role; empty if none has.
        term: of the last lease.
        administered: orders of administrators that the node has got since its start.
    """

    role: Role | None = None
    fixed: bool = False
    decider: str = ""
    term: int = 0
    administered: int = 0


class NodeHeartbeat(Message):
    """Answer to ProxyHeartbeat: the node's instance and its load.

    Attributes:
        ready: accepts new requests.
        queued_tokens: prompt tokens not yet computed (prefill) or reserved (decode).
        running: requests on the node that have not ended.
        losses: how often the node gave up the requests of this proxy, because messages were lost or
            the proxy was silent. When the number grows, the proxy gives up what it has at the node.
        run_delay: run delay of the node in seconds (:mod:`pd.core.starvation`).
        linked: a decode node's prefill nodes whose link is made; None if the node has no links.
        load: of an elastic node; None of others.
        answers: ``number`` of the heartbeat that this answers: what was sent to the node before it
            is in the load.
        leaving: asks to have its requests moved to other nodes.
        stuck: a step is under way for far longer than steps take.
        roles: of an elastic node; None of others.
    """

    ready: bool
    queued_tokens: int
    running: int
    losses: int = 0
    run_delay: TotalDelay = 0.0
    linked: list[str] | None = None
    load: NodeLoad | None = None
    answers: int = 0
    leaving: bool = False
    stuck: bool = False
    roles: RoleState | None = None


class PrefixEvents(Message):
    """A batch of changes of an elastic node's prefix cache, by the hashes of pages
    (:mod:`pd.radix.prefix_hashes`), joined.

    Attributes:
        number: of the batch; a snapshot has that of the last one.
        snapshot: ``stored`` is all that is cached.
    """

    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    stored: PageHashes = b""
    removed: PageHashes = b""
    snapshot: bool = False

    def __post_init__(self) -> None:
        if len(self.stored) % 8 or len(self.removed) % 8:
            raise ValueError("hashes of pages have 8 bytes")


# ---- decode node to prefill node and back (over P's message socket)


class PeerHeartbeat(Message):
    """Sent both ways between handshaken peers, twice a second, with the sender's ``run_delay``."""

    run_delay: TotalDelay = 0.0


class GrammarReady(Message):
    """Either way, for a room whose request has a grammar: the sender has compiled it. D begins, and
    repeats it until P answers, which does so once it has the grammar, too. D reserves nothing
    before."""

    room: RoomId


class Reservation(Message):
    """D to P: D has reserved pages for the prompt.

    Attributes:
        epoch: minted by D, unique in its life; names this reservation in every write.
        cached: leading tokens of the prompt that D holds already and P need not send, for each
            group of planes (:class:`pd.core.node_info.Plane`).
        destination: for the backend (slots for one-sided writes); empty if it needs none.
    """

    room: bytes
    epoch: int
    cached: CachedLengths
    destination: bytes = b""


class FirstToken(msgspec.Struct, forbid_unknown_fields=True):
    """Token 1 of one choice, sampled on P; ``finish`` when it ended the choice there."""

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish: Finish | None = None


class Commit(Message):
    """P to D, resent until acknowledged: all data of the epoch left P.

    Attributes:
        num_bytes: what P wrote; D compares it with its own count where its backend has one.
        first_tokens: token 1 of each choice, from which D goes on.
        digest: of the KV that was sent; empty without ``--kv-digest``.
        drafter_state: what D's drafter needs of the last prompt token; empty if it needs nothing,
            or if there is nothing.
        wire_seconds, exposed_seconds: how long that took and what of it came after the prompt was
            computed, for D's metrics.
    """

    room: bytes
    epoch: int
    num_bytes: int
    first_tokens: list[FirstToken]
    digest: bytes = b""
    drafter_state: DrafterState = b""
    wire_seconds: Duration = 0.0
    exposed_seconds: Duration = 0.0


class PromptExpected(Message):
    """P to D: when the prompt will be computed. Sent with each chunk that is planned, and when D
    reserves if one was planned before.

    Attributes:
        seconds: from now on, as the cost model of P predicts.
    """

    room: bytes
    epoch: int
    seconds: Duration


class CommitAck(Message):
    """D to P: committed; P may release its side."""

    room: bytes
    epoch: int


# ``AbortRoom`` with this kind is no failure: token 1 ended the request.
FINISHED = "finished"


class AbortRoom(Message):
    """Either way: the sender gave the room up. From D to P it asks for :class:`Drained`.

    ``epoch`` is 0 when the sender knows no reservation.
    """

    room: bytes
    epoch: int
    error: ErrorInfo


class Drained(Message):
    """P to D: P reads no page for this epoch any more, and no write of it can reach D's pages."""

    room: bytes
    epoch: int


class Returned(Message):
    """P to D: P has sent nothing of this epoch and will not. D may use the pages again."""

    room: bytes
    epoch: int


AnyMessage: TypeAlias = (
    Generate
    | GenerateTogether
    | Abort
    | TakeBack
    | ProxyHeartbeat
    | PreferRole
    | StepOutputs
    | Failed
    | TakenBack
    | StepFailed
    | NodeHeartbeat
    | PrefixEvents
    | PeerHeartbeat
    | GrammarReady
    | Reservation
    | Commit
    | PromptExpected
    | CommitAck
    | AbortRoom
    | Drained
    | Returned
)

# Messages whose loss has no consequence: heartbeats come twice a second, prefix events have numbers
# of their own, which role a node prefers is in its heartbeats, and a decode node repeats what it
# says of a grammar until that is answered.
_UNCOUNTED = (
    ProxyHeartbeat,
    NodeHeartbeat,
    PeerHeartbeat,
    PrefixEvents,
    PreferRole,
    GrammarReady,
)


def counts(message: Message) -> bool:
    """Whether the loss of a message has consequences, so that it is numbered
    (:mod:`pd.core.numbering`)."""
    return not isinstance(message, _UNCOUNTED)


_HEARTBEAT_SUFFIX = "/heartbeat"


def heartbeat_identity(proxy: str) -> str:
    """Sender under which a proxy's thread keeps its lease while its event loop is busy."""
    return proxy + _HEARTBEAT_SUFFIX


def heartbeat_owner(identity: bytes) -> bytes:
    """The proxy whose lease a heartbeat of this sender renews."""
    return identity.removesuffix(_HEARTBEAT_SUFFIX.encode())


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Serialize one message."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """Parse one frame; raises msgspec.DecodeError or ValidationError on anything else."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise msgspec.DecodeError(f"frame of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
    message: AnyMessage = _decoder.decode(frame)
    return message
