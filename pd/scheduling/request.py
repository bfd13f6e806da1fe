"""A request on a node: its parameters, its state, and the pages of its sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from pd.core.errors import PDError
    from pd.core.messages import FirstToken, Generate, TokenLogprobs
    from pd.core.sampling_params import SamplingParams
    from pd.engine.eagle import CarriedState
    from pd.engine.sampling_state import SamplingState
    from pd.engine.saved_pages import SavedPages
    from pd.engine.token_rules import TokenRules
    from pd.radix import TreeNode
    from pd.speculative.draft import Draft

    IntArray = npt.NDArray[np.int32]
    BoolArray = npt.NDArray[np.bool_]


class RequestState(Enum):
    """States of a request on either side of a hand-off.

    P is the prefilling node, D the node receiving its KV. A request moves forward, with two
    exceptions for lack of memory. P may return a reservation (P: WAITING to BOOTSTRAPPING, D:
    RECEIVING to PREALLOCATING). P may also compute a prompt again if it gave up the pages (SENDING
    to WAITING).
    """

    COMPILING = auto()  # waits for its grammar, before anything else
    BOOTSTRAPPING = auto()  # P: waits to run, D has not reserved yet (queue "bootstrap")
    WAITING = auto()  # P: waits to run; D: committed, waits for a place in the batch
    PREALLOCATING = auto()  # D: waits for the peer or for memory (queue "preallocation")
    RECEIVING = auto()  # D: pages reserved, KV on its way (queue "transfer")
    RUNNING = auto()  # in the batch, or retracted from it
    SENDING = auto()  # P: computed, KV on its way (queue "in_flight")
    DONE = auto()
    FAILED = auto()
    ABORTED = auto()

    @property
    def is_terminal(self) -> bool:
        """Whether the request has ended."""
        return self in (RequestState.DONE, RequestState.FAILED, RequestState.ABORTED)


_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)
_NO_TABLES: IntArray = np.empty((0, 0), dtype=np.int32)
_NO_TABLE_FLAGS: BoolArray = np.empty((0, 0), dtype=np.bool_)
_NO_FLAGS: BoolArray = np.empty(0, dtype=np.bool_)


class HostKV(NamedTuple):
    """KV of a retracted sequence in host memory, in whole pages.

    Attributes:
        num_tokens: number of leading tokens whose KV is complete.
        num_pages: number of pages in ``pages``.
        num_bytes: size of the copies of all ranks.
        pages: the copy, see :meth:`pd.engine.engine.Engine.save_pages`.
    """

    num_tokens: int
    num_pages: int
    num_bytes: int
    pages: SavedPages


class LaunchedWork(Protocol):
    """The last work of a sequence, as seen by its next work.

    :class:`pd.scheduling.step.Work` describes the attributes.
    """

    start: int
    stop: int
    num_unread: int
    reread: bool
    row: int
    place: int
    is_late: bool

    @property
    def max_accepted(self) -> int: ...

    def settle_unread(self, accepted: int) -> None: ...


class OutgoingHandOff(Protocol):
    """The hand-off of a request whose KV this node sends.

    :class:`pd.prefill_node.outgoing.OutgoingRoom` implements it. Schedulers only need to know
    whether there is one.
    """

    @property
    def request(self) -> Request: ...


class IncomingHandOff(Protocol):
    """The hand-off of a request whose KV this node receives.

    :class:`pd.decode_node.incoming.IncomingRoom` implements it.

    Attributes:
        num_bytes: number of KV bytes sent by the peer.
    """

    num_bytes: int

    @property
    def request(self) -> Request: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens and the pages with its KV.

    Attributes:
        tokens: int32, prompt and output; grows by doubling, see :meth:`append_token`.
        num_tokens: number of valid entries of ``tokens``.
        sampling: sampling state of the choice; None while the prompt is computed or received.
        num_computed: number of leading tokens whose KV is in the pool.
        pages: page table, int32.
        owned: for each page, whether this sequence alone holds it. The radix tree holds the other
            pages, and ``handle`` keeps them there.
        window_pages, window_owned: the same for each sliding window with pages of its own,
            ``[windows, n]``, or ``[0, 0]`` without windows. A page given up is
            :data:`pd.engine.page_allocator.NO_PAGE`.
        window_begins: for each window, a number of leading pages that are known to be given up.
        first_whole_page: pages before this one may lack tokens in windows.
        handle: locked end of the cached prefix in the radix tree, or None.
        launched_work: the last launched work of this sequence, or None once its step is accounted
            for. Until then the pages must not change owner.
        host_kv: KV of a retracted sequence (tokens ``[0, num_computed)``), or None.
        next_draft: guesses of the next tokens, drafted right after the last step was launched.
        carried_state: state of the last computed token for an EAGLE head.
        num_noted: number of leading tokens known to the n-gram cache or found in the prefix cache.
    """

    request: Request
    index: int
    tokens: IntArray
    num_tokens: int
    sampling: SamplingState | None = None
    num_computed: int = 0
    pages: IntArray = field(default_factory=lambda: _NO_PAGES)
    owned: BoolArray = field(default_factory=lambda: _NO_FLAGS)
    window_pages: IntArray = field(default_factory=lambda: _NO_TABLES)
    window_owned: BoolArray = field(default_factory=lambda: _NO_TABLE_FLAGS)
    window_begins: tuple[int, ...] = ()
    first_whole_page: int = 0
    handle: TreeNode | None = None
    launched_work: LaunchedWork | None = None
    is_finished: bool = False
    host_kv: HostKV | None = None
    next_draft: Draft | None = None
    carried_state: CarriedState | None = None
    num_noted: int = 0

    def append_token(self, token: int) -> None:
        """Append one output token."""
        if self.num_tokens == len(self.tokens):
            grown = np.empty(max(16, 2 * len(self.tokens)), dtype=np.int32)
            grown[: self.num_tokens] = self.tokens
            self.tokens = grown
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    @property
    def tables(self) -> IntArray:
        """All page tables: int32 ``[n]``, or ``[tables, n]`` with windows."""
        if not len(self.window_pages):
            return self.pages
        return np.concatenate((self.pages[None], self.window_pages))

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far, including tokens from other nodes."""
        return self.num_tokens - len(self.request.client_prompt)

    @property
    def is_decoding(self) -> bool:
        """Whether token 1 is known, so the sequence has left its prompt."""
        return self.sampling is not None

    @property
    def choice(self) -> SamplingState:
        """Sampling state of a decoding sequence."""
        assert self.sampling is not None, "the prompt is not complete"
        return self.sampling

    @property
    def is_in_step(self) -> bool:
        """Whether a launched step, or drafting after it, still uses the pages."""
        if self.launched_work is not None:
            return True
        return self.next_draft is not None and not self.next_draft.batch.is_complete

    @property
    def ids(self) -> IntArray:
        """The valid tokens, int32 (a view)."""
        return self.tokens[: self.num_tokens]


@dataclass(eq=False, slots=True)
class Timings:
    """Monotonic times of the stages of a request on this node."""

    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    reserved: float | None = None
    committed: float | None = None


@dataclass(eq=False, slots=True)
class PromptProgress:
    """State of a prompt on the prefilling node.

    Attributes:
        choices: for each choice, the sampling state for token 1.
        first_tokens: token 1 of each choice, once sampled.
        logprobs: log probabilities of the prompt's tokens computed so far, if requested.
        drafter_state: state of the last prompt token for the drafter of the decoding node.
        cached_tokens: leading tokens found in the cache when the prompt was first admitted.
        cached_on_arrival: leading tokens in the cache when the node's load was first computed,
            counting tokens to be cached by earlier prompts.
        num_overtakes: number of younger requests admitted before this one.
        lacking_since: when the prompt was first refused memory or a place; None if it never was.
    """

    choices: list[SamplingState] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafter_state: bytes = b""
    cached_tokens: int = 0
    cached_on_arrival: int | None = None
    num_overtakes: int = 0
    lacking_since: float | None = None


@dataclass(eq=False, slots=True)
class Request:
    """Everything a node knows about one request.

    ``sequences[0]`` holds the prompt while it is computed or received. When token 1 is known, we
    fork the other choices from it.

    Attributes:
        prompt: int32. The prompt of a resumed request includes the output so far, because we
            compute it like a prompt.
        num_produced: number of tokens at the end of ``prompt`` produced by other nodes.
        resumed_state: sampling state of a resumed request after these tokens; None for others.
        owner: stands for the client's key; owners take turns in compiling grammars.
        prefix_lease: seconds for which the client wants the prompt to stay cached.
        ttft: objective for the first token in seconds; 0 if there is none.
        due_at: monotonic time at which the first token is due.
        peer: instance id of the other node of the hand-off, or empty.
        peer_bootstrap: URL of the peer's registry on a node receiving the KV, or empty.
        ended_choices: choices ended by the proxy, because it found their stop string.
        outgoing: the hand-off on the node sending the KV, else None.
        incoming: the hand-off on the node receiving the KV, else None.
        make_rules: makes the rules of a choice from its ending tokens; None without rules.
        prepare_rules: slow preparation for ``make_rules``; None if there is none.
    """

    rid: str
    room: bytes
    proxy: bytes
    prompt: IntArray
    params: SamplingParams
    num_produced: int = 0
    resumed_state: SamplingState | None = None
    namespace: str = ""
    owner: str = ""
    prefix_lease: float = 0.0
    priority: int = 0
    deadline: float | None = None
    ttft: float = 0.0
    due_at: float = 0.0
    peer: str = ""
    peer_bootstrap: str = ""
    state: RequestState = RequestState.WAITING
    error: PDError | None = None
    sequences: list[Sequence] = field(default_factory=list)
    times: Timings = field(default_factory=Timings)
    progress: PromptProgress = field(default_factory=PromptProgress)
    ended_choices: set[int] = field(default_factory=set)
    outgoing: OutgoingHandOff | None = None
    incoming: IncomingHandOff | None = None
    make_rules: Callable[[Collection[int]], TokenRules] | None = None
    prepare_rules: Callable[[], None] | None = None

    @classmethod
    def from_message(cls, message: Generate, proxy: bytes) -> Request:
        """Build a request from its message. The caller has validated room and token ids."""
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
            prefix_lease=message.prefix_lease,
            priority=message.priority,
            deadline=deadline,
            ttft=message.ttft,
            due_at=now - message.waited + message.ttft,
            peer=message.peer,
            peer_bootstrap=message.peer_bootstrap,
        )
        request.sequences.append(Sequence(request, 0, prompt, len(prompt)))
        return request

    @property
    def client_prompt(self) -> IntArray:
        """The prompt without output from other nodes."""
        return self.prompt[: len(self.prompt) - self.num_produced]

    @property
    def max_new_tokens(self) -> int:
        """Number of output tokens this node may still add."""
        return self.params.max_tokens - self.num_produced

    @property
    def sequence(self) -> Sequence:
        """The sequence with the prompt."""
        return self.sequences[0]

    @property
    def is_in_step(self) -> bool:
        """Whether a launched step still uses the pages of this request."""
        return any(sequence.is_in_step for sequence in self.sequences)
