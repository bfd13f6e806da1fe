"""A request on a node: the proxy's wishes, its state, and the pages of its sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    # NOTE: for types only; no other module of pd.core imports from another package.
    from pd.core.errors import PDError
    from pd.core.messages import FirstToken, Generate, TokenLogprobs
    from pd.core.sampling_params import SamplingParams
    from pd.decode_node.incoming import IncomingRoom
    from pd.engine.eagle import CarriedState
    from pd.engine.sampling_state import SamplingState
    from pd.engine.token_rules import TokenRules
    from pd.prefill_node.outgoing import OutgoingRoom
    from pd.radix import TreeNode
    from pd.scheduling.decode import HostKV
    from pd.scheduling.step import Work
    from pd.speculative.draft import Draft

    IntArray = npt.NDArray[np.int32]
    BoolArray = npt.NDArray[np.bool_]


class RequestState(Enum):
    """States of a request, on either side of a hand-off. A request only moves forward, except that
    memory may send it back: P returns a reservation (P: WAITING to BOOTSTRAPPING, D: RECEIVING to
    PREALLOCATING), or computes a prompt again whose pages it gave up (SENDING to WAITING).

    P is a node that computes the prompt, D one that receives its KV.
    """

    COMPILING = auto()  # waits for its grammar, before anything else
    BOOTSTRAPPING = auto()  # P: waits to run, D has not reserved yet
    WAITING = auto()  # P: waits to run; D: committed, waits for a place in the batch
    PREALLOCATING = auto()  # D: waits for the peer or for memory
    RECEIVING = auto()  # D: pages reserved, KV on its way
    RUNNING = auto()  # in the batch, or retracted from it
    SENDING = auto()  # P: computed, KV on its way (the queue called "in flight")
    DONE = auto()
    FAILED = auto()
    ABORTED = auto()

    @property
    def terminal(self) -> bool:
        """Whether the request has ended."""
        return self in (RequestState.DONE, RequestState.FAILED, RequestState.ABORTED)


_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)
_NO_FLAGS: BoolArray = np.empty(0, dtype=np.bool_)


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens and the pages that hold its KV.

    Attributes:
        tokens: int32, prompt and output; grows by doubling, see :meth:`append`.
        num_tokens: valid entries of ``tokens``.
        sampling: sampling state of the choice; None while the prompt is computed or received.
        num_computed: leading tokens whose KV is in the pool.
        pages: page table, int32.
        owned: for each page, whether this sequence alone holds it (else the radix tree does, and
            ``handle`` keeps it there).
        handle: locked end of the cached prefix in the radix tree, or None.
        launched: the last work of this sequence that was launched, or None once its step is
            accounted for. Until then its pages must not change owner.
        host_kv: KV of a retracted sequence (tokens ``[0, num_computed)``), or None.
        ahead: guesses of the tokens after those known, which were drafted behind the last step.
        carried: what an EAGLE head needs of the last computed token.
        num_noted: leading tokens that the n-gram cache was given, or that the prefix cache had.
    """

    request: Request
    index: int
    tokens: IntArray
    num_tokens: int
    sampling: SamplingState | None = None
    num_computed: int = 0
    pages: IntArray = field(default_factory=lambda: _NO_PAGES)
    owned: BoolArray = field(default_factory=lambda: _NO_FLAGS)
    handle: TreeNode | None = None
    launched: Work | None = None
    finished: bool = False
    host_kv: HostKV | None = None
    ahead: Draft | None = None
    carried: CarriedState | None = None
    num_noted: int = 0

    def append(self, token: int) -> None:
        """Add one output token."""
        if self.num_tokens == len(self.tokens):
            grown = np.empty(max(16, 2 * len(self.tokens)), dtype=np.int32)
            grown[: self.num_tokens] = self.tokens
            self.tokens = grown
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output so far, with those of other nodes."""
        return self.num_tokens - len(self.request.client_prompt)

    @property
    def decodes(self) -> bool:
        """Whether the sequence is beyond its prompt: token 1 is known."""
        return self.sampling is not None

    @property
    def choice(self) -> SamplingState:
        """Sampling state of a sequence that decodes."""
        assert self.sampling is not None, "the prompt is not complete"
        return self.sampling

    @property
    def in_step(self) -> bool:
        """Whether a launched step, or the drafting behind it, still uses its pages."""
        if self.launched is not None:
            return True
        return self.ahead is not None and not self.ahead.batch.is_complete

    @property
    def ids(self) -> IntArray:
        """The valid tokens, int32 (a view)."""
        return self.tokens[: self.num_tokens]


@dataclass(eq=False, slots=True)
class Timings:
    """Monotonic times at which stages of the request began or ended on this node."""

    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    reserved: float | None = None
    committed: float | None = None


@dataclass(eq=False, slots=True)
class PromptProgress:
    """State of a prompt on the node that computes it.

    Attributes:
        choices: sampling state of each choice of ``n``, which draws token 1.
        first_tokens: token 1 of each choice once sampled.
        logprobs: log probabilities of the prompt's tokens, as far as they are wanted and computed.
        drafter_state: what the drafter of the node that decodes needs of the last prompt token.
        cached_tokens: leading tokens that were cached when the prompt was first admitted.
        cached_on_arrival: leading tokens that were cached when the load of the node was first
            asked for, or that prompts before this one will have cached.
        overtaken: younger requests that were admitted before this one.
        lacking_since: when the prompt was first refused memory or a place; None if it was not.
    """

    choices: list[SamplingState] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafter_state: bytes = b""
    cached_tokens: int = 0
    cached_on_arrival: int | None = None
    overtaken: int = 0
    lacking_since: float | None = None


@dataclass(eq=False, slots=True)
class Request:
    """Everything that a node knows about one request: the proxy's wishes, its state, its sequences.

    ``sequences[0]`` holds the prompt while it is computed or received; the other choices of ``n``
    are forked from it when token 1 is known.

    Attributes:
        prompt: int32; of a resumed request with the output so far, which is computed like a prompt.
        num_produced: how many tokens at the end of ``prompt`` are output of other nodes.
        resumed: sampling state of a resumed request, which has observed these tokens; else None.
        owner: tells the keys of clients apart; grammars are compiled for them in turn.
        ttft: seconds within which the first token should come; 0 if nothing is said of that.
        due: when they are over, on the monotonic clock.
        peer: instance id of the other node of the hand-off, or empty.
        peer_bootstrap: on a node that receives the KV, URL of the peer's registry, or empty.
        ended_choices: choices that the proxy ended (their stop string was found).
        outgoing: the hand-off on the node that sends the KV, else None.
        incoming: the hand-off on the node that receives the KV, else None.
        make_rules: makes the rules of a choice, given the tokens that end it; None without rules.
    """

    rid: str
    room: bytes
    proxy: bytes
    prompt: IntArray
    params: SamplingParams
    num_produced: int = 0
    resumed: SamplingState | None = None
    namespace: str = ""
    owner: str = ""
    priority: int = 0
    deadline: float | None = None
    ttft: float = 0.0
    due: float = 0.0
    peer: str = ""
    peer_bootstrap: str = ""
    state: RequestState = RequestState.WAITING
    error: PDError | None = None
    sequences: list[Sequence] = field(default_factory=list)
    times: Timings = field(default_factory=Timings)
    progress: PromptProgress = field(default_factory=PromptProgress)
    ended_choices: set[int] = field(default_factory=set)
    outgoing: OutgoingRoom | None = None
    incoming: IncomingRoom | None = None
    make_rules: Callable[[Collection[int]], TokenRules] | None = None

    @classmethod
    def from_message(cls, message: Generate, proxy: bytes) -> Request:
        """Build from the wire; the caller validated room and token ids."""
        prompt = np.frombuffer(message.token_ids, dtype="<i4").astype(np.int32)
        now = time.monotonic()
        deadline = None if message.timeout is None else now + message.timeout
        request = cls(
            rid=message.rid,
            room=message.room,
            proxy=proxy,
            prompt=prompt,
            params=message.params,
            num_produced=message.produced,
            namespace=message.namespace,
            owner=message.owner,
            priority=message.priority,
            deadline=deadline,
            ttft=message.ttft,
            due=now - message.waited + message.ttft,
            peer=message.peer,
            peer_bootstrap=message.peer_bootstrap,
        )
        request.sequences.append(Sequence(request, 0, prompt, len(prompt)))
        return request

    @property
    def client_prompt(self) -> IntArray:
        """The prompt without output of other nodes."""
        return self.prompt[: len(self.prompt) - self.num_produced]

    @property
    def max_new_tokens(self) -> int:
        """Tokens that may be output from here on."""
        return self.params.max_tokens - self.num_produced

    @property
    def sequence(self) -> Sequence:
        """The sequence that holds the prompt."""
        return self.sequences[0]

    @property
    def in_step(self) -> bool:
        """Whether a launched step still uses pages of this request."""
        return any(sequence.in_step for sequence in self.sequences)
