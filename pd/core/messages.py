"""Wire messages (msgspec, MessagePack). Nodes speak tokens, never text.

Every message names its receiver in ``to``, and an instance drops messages for another one. Token
ids travel as little-endian int32 bytes. Times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from pd.core.node_info import MAX_PLANES, Role
from pd.core.node_load import NodeLoad
from pd.core.release import RELEASE
from pd.core.sampling_params import SamplingParams

ROOM_BYTES = 16
MAX_MESSAGE_BYTES = 64 << 20
HEARTBEAT_INTERVAL = 0.5
# Long enough for a busy two-core host, short enough that an error reaches the client within 5 s.
LEASE_SECONDS = 3.5
# Longest time in seconds for which a client can ask to keep its prompt in a prefix cache.
MAX_PREFIX_LEASE = 60.0
# Limit on the prefill nodes that a decode node meets ahead of requests. It meets the others
# with their first request.
MAX_MEETINGS = 64

# These stand for the number of a batch of prefix events: none taken so far, and none wanted.
PREFIXES_UNKNOWN, PREFIXES_UNWANTED = -1, -2

RoomId = Annotated[bytes, msgspec.Meta(min_length=ROOM_BYTES, max_length=ROOM_BYTES)]
PageHashes = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
# A hidden state has up to 16,384 numbers of four bytes; the rest is headroom.
DrafterState = Annotated[bytes, msgspec.Meta(max_length=256 << 10)]
# Run delay of a process since its first reading, see :mod:`pd.util.starvation`.
TotalDelay = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
# Number of cached leading tokens for each group of planes. An impossible number ends the request,
# because it would wait in vain if we dropped the message.
CachedLengths = Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]

Release = Annotated[str, msgspec.Meta(max_length=256)]

Fault: TypeAlias = Literal["node", "peer", "pair", "nobody"]


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages.

    Attributes:
        to: instance id of the receiver.
        sender: instance id of the sender.
    """

    to: str
    sender: str


class Report(Message, forbid_unknown_fields=False):
    """Base of messages that only report something.

    We ignore unknown fields, so we can still name a later release in an error.
    Other messages are orders, and we must not ignore any part of an order.
    """


class ErrorInfo(msgspec.Struct):
    """An error on the wire, see :func:`pd.core.errors.error_from_kind`."""

    kind: str
    message: str
    param: str | None = None


# ---- proxy to node


class Generate(Message):
    """Ask a node to do its part of a request.

    Attributes:
        rid: the client's name for the request.
        room: 16 random bytes, drawn by the proxy for each attempt.
        token_ids: the prompt, int32; in a resumed request followed by the output so far.
        produced: number of ``token_ids`` at their end that other nodes have output. The next token
            gets this position. Only with one choice, and without log probabilities of the prompt.
        namespace: separates cached prefixes (``cache_salt`` and ``extra_key``).
        owner: distinguishes clients by their API keys without revealing the keys.
        timeout: seconds until the deadline, or None.
        ttft: objective for the seconds until the first token; 0 without one.
        waited: seconds of ``ttft`` that have passed.
        peer: instance id of the other node of the pair; empty if P needs no D.
        peer_bootstrap: on D, ``http://host:port`` of P's registry.
        prefix_lease: seconds for which the node should prefer to keep the prompt cached.
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
    prefix_lease: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PREFIX_LEASE)] = 0.0


class GenerateTogether(Message):
    """Several requests in one message.

    The scheduler sees all of them before it starts one, so it computes a shared prefix once and the
    rest in one batch.
    """

    requests: list[Generate]


class Abort(Message):
    """End a room, or one choice whose stop string was found. Unknown rooms leave a tombstone.

    Attributes:
        index: the choice; None for all of them.
    """

    room: bytes
    index: int | None = None
    reason: str = "aborted"


class EndPrefixLease(Message):
    """End the lease of a request's cached prompt. Unknown requests are ignored."""

    rid: str
    owner: Annotated[str, msgspec.Meta(max_length=64)] = ""


class TakeBack(Message):
    """Take back a request waiting for prefill, because another node would be faster.

    The node answers with :class:`TakenBack`.
    """

    room: RoomId


class ProxyHeartbeat(Report):
    """Sent to every node twice a second. ``to`` is empty until the proxy knows the instance.

    A proxy sends heartbeats from its event loop, and from a thread under
    :func:`heartbeat_identity`. The thread only keeps the lease and gets no answer.

    Attributes:
        run_delay: run delay of the proxy.
        run_delays: run delays of nodes by instance id, because a node needs a peer's before the two
            have met.
        meet: prefill nodes for hand-offs to this decode node: instance id, and
            ``http://host:port`` of the registry. The node connects before the first request.
        number: counts the heartbeats of the proxy to this node.
        itl: the proxy's objective for seconds between tokens (``--slo-itl-ms``); 0 without one.
        prefixes: number of the last batch of :class:`PrefixEvents` processed by the proxy.
        decides: the proxy asks for the lease on the role of an elastic node.
        release: of the proxy (:mod:`pd.core.release`), added by :func:`encode_message`; empty
            from a proxy without one.
    """

    run_delay: TotalDelay = 0.0
    run_delays: Annotated[dict[str, TotalDelay], msgspec.Meta(max_length=4096)] = {}
    meet: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_MEETINGS)] = {}
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    itl: Duration = 0.0
    prefixes: Annotated[int, msgspec.Meta(ge=-2, le=1 << 62)] = PREFIXES_UNWANTED
    decides: bool = False
    release: Release = ""


class PreferRole(Message):
    """Make an elastic node prefer a role.

    Attributes:
        role: None leaves the choice to the proxy with the lease. Only administrators may send it.
        fixed: an administrator ordered the role. Otherwise the proxy has the node's lease.
        term: number of the lease.
    """

    role: Role | None
    fixed: bool = False
    term: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


# ---- node to proxy


class TokenLogprobs(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """Log probabilities of one token and of the likeliest tokens, best first.

    After the likeliest tokens come those that the request names (``logprob_token_ids``).
    """

    token_id: int
    logprob: float | None
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Finish(msgspec.Struct):
    """Reason for the end of a choice.

    Attributes:
        matched: final token id, for ``stop``.
    """

    type: Literal["stop", "length"]
    matched: int | None = None


class Stages(msgspec.Struct, omit_defaults=True):
    """Seconds of a request in each stage, as far as the sender knows."""

    queue: float | None = None
    bootstrap: float | None = None
    prefill: float | None = None
    transfer: float | None = None
    decode: float | None = None


class Output(msgspec.Struct, omit_defaults=True):
    """New tokens of one choice.

    Attributes:
        position: index of the first of ``token_ids`` in the choice's output.
        logprobs: one entry per token, if requested.
        cached_tokens, prompt_logprobs: sent with token 1 by the prefilling node. For a long
            prompt they come earlier, in parts without token ids.
        transferred_bytes: KV bytes received for this room; in D's first message.
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


class StepOutputs(Report):
    """The outputs of one step for one proxy."""

    outputs: list[Output]


class Failed(Report):
    """The room failed on this node.

    Attributes:
        fault: the node at fault, as far as the sender knows: itself, its peer, or either of the
            pair; ``nobody`` if the node did not start because it takes no requests now.
    """

    room: bytes
    error: ErrorInfo
    fault: Fault = "node"


class StepFailed(Report):
    """A step failed, and these rooms of one proxy with it."""

    rooms: list[bytes]
    error: ErrorInfo


class TakenBack(Report):
    """Answer to :class:`TakeBack`.

    Attributes:
        taken: the node had not started the prefill, and has dropped the request without a further
            message. If false, the request continues there or has ended.
    """

    room: RoomId
    taken: bool


class RoleState(msgspec.Struct, omit_defaults=True):
    """The preferred role of an elastic node (:mod:`pd.node.role_lease`).

    Attributes:
        role: None before anybody set it.
        fixed: an administrator set it.
        decider: proxy with the lease on the role; empty without one.
        term: number of the last lease.
        administered: number of administrators' orders since the node started.
    """

    role: Role | None = None
    fixed: bool = False
    decider: str = ""
    term: int = 0
    administered: int = 0


class NodeHeartbeat(Report):
    """Answer to ProxyHeartbeat: the node's instance and its load.

    Attributes:
        ready: accepts new requests.
        queued_tokens: prompt tokens not yet computed (prefill) or not yet reserved (decode).
        running: unfinished requests on the node.
        losses: how often the node dropped all requests of this proxy, because messages were lost or
            the proxy was silent. When the number grows, the proxy drops its side, too.
        run_delay: run delay of the node in seconds (:mod:`pd.util.starvation`).
        linked: prefill nodes linked to a decode node; None if the node has no links.
        load: load of an elastic node; None for others.
        answers: ``number`` of the answered heartbeat. The load includes all messages that
            the proxy sent before that heartbeat.
        leaving: the node asks to move its requests to other nodes.
        stuck: a step takes far longer than usual.
        roles: role of an elastic node; None for others.
        release: release of the node. We omit it for a proxy without one, because such a proxy
            would reject the field.
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
    release: Release | msgspec.UnsetType = msgspec.UNSET


class PrefixEvents(Report):
    """A batch of changes of an elastic node's prefix cache.

    Attributes:
        number: number of the batch. A snapshot has that of the last batch.
        stored, removed: hashes of pages (:mod:`pd.radix.prefix_hashes`), joined.
        snapshot: ``stored`` is the whole cache.
    """

    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    stored: PageHashes = b""
    removed: PageHashes = b""
    snapshot: bool = False

    def __post_init__(self) -> None:
        if len(self.stored) % 8 or len(self.removed) % 8:
            raise ValueError("hashes of pages have 8 bytes")


# ---- decode node to prefill node and back (over P's message socket)


class PeerHeartbeat(Report):
    """Sent both ways between peers after their handshake, twice a second."""

    run_delay: TotalDelay = 0.0


class GrammarReady(Message):
    """Either way: the sender has compiled the grammar of a room.

    D sends it first, and repeats it until P answers. P answers once it has compiled the grammar,
    too. D reserves nothing before that.
    """

    room: RoomId


class Reservation(Message):
    """D to P: D has reserved pages for the prompt.

    Attributes:
        epoch: number of the reservation, unique in D's lifetime. Every write names it.
        cached: number of leading tokens cached by D, so P need not send them, for each group of
            planes (:class:`pd.core.node_info.Plane`).
        destination: data for the backend (slots for one-sided writes); empty if it needs none.
    """

    room: bytes
    epoch: int
    cached: CachedLengths
    destination: bytes = b""


class FirstToken(msgspec.Struct, forbid_unknown_fields=True):
    """Token 1 of one choice, sampled on P. ``finish`` is set if it ended the choice."""

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish: Finish | None = None


class Commit(Message):
    """P to D, resent until acknowledged: all data of the epoch has left P.

    Attributes:
        num_bytes: bytes written by P. D compares them with its own count, if its backend counts.
        first_tokens: token 1 of each choice, with which D continues.
        digest: digest of the KV; empty without ``--kv-digest``.
        drafter_state: hidden state of the last prompt token for D's drafter; empty if it needs
            none or none exists.
        wire_seconds, exposed_seconds: duration of the transfer, and the part of it after the
            prefill, for D's metrics.
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
    """P to D: when the prefill will finish.

    P sends it with each planned chunk, and after D's reservation if a chunk is planned
    already.

    Attributes:
        seconds: time from now on, predicted by P's cost model.
    """

    room: bytes
    epoch: int
    seconds: Duration


class CommitAck(Message):
    """D to P: committed; P may release its side."""

    room: bytes
    epoch: int


# An ``AbortRoom`` of this kind is no failure: token 1 ended the request.
FINISHED = "finished"


class AbortRoom(Message):
    """Either way: the sender gave up the room. If D sends it, P answers with :class:`Drained`.

    Attributes:
        epoch: 0 if the sender knows of no reservation.
    """

    room: bytes
    epoch: int
    error: ErrorInfo


class Drained(Message):
    """P to D: P no longer reads pages for this epoch, and no write of it can reach D's pages."""

    room: bytes
    epoch: int


class Returned(Message):
    """P to D: P has sent nothing of this epoch and never will, so D may reuse the pages."""

    room: bytes
    epoch: int


AnyMessage: TypeAlias = (
    Generate
    | GenerateTogether
    | Abort
    | EndPrefixLease
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

# The loss of these messages has no consequence: heartbeats come twice a second, prefix events have
# their own numbers, heartbeats repeat the preferred role, and decode nodes repeat GrammarReady.
_UNCOUNTED = (
    ProxyHeartbeat,
    NodeHeartbeat,
    PeerHeartbeat,
    PrefixEvents,
    PreferRole,
    GrammarReady,
)


def is_counted(message: Message) -> bool:
    """Whether we number a message (:mod:`pd.util.numbering`) because its loss has consequences."""
    return not isinstance(message, _UNCOUNTED)


_HEARTBEAT_SUFFIX = "/heartbeat"


def heartbeat_identity(proxy: str) -> str:
    """Return the sender name of the thread that keeps a proxy's lease while its loop is busy."""
    return proxy + _HEARTBEAT_SUFFIX


def heartbeat_owner(identity: bytes) -> bytes:
    """Return the proxy whose lease a heartbeat of this sender renews."""
    return identity.removesuffix(_HEARTBEAT_SUFFIX.encode())


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: Message) -> bytes:
    """Serialize one message. A proxy's heartbeats get the release of this process."""
    if type(message) is ProxyHeartbeat and not message.release:
        message.release = RELEASE
    return _encoder.encode(message)


def decode_message(frame: bytes | memoryview) -> AnyMessage:
    """Parse one frame. Raises msgspec.DecodeError or ValidationError if it is malformed."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise msgspec.DecodeError(f"frame of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
    message: AnyMessage = _decoder.decode(frame)
    return message
