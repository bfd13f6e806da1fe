"""A request on a node: what was asked, where it stands, and the pages of its sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from pd.core.errors import PDError
    from pd.core.messages import Generate, TokenLogprobs
    from pd.core.sampling_params import SamplingParams

    IntArray = npt.NDArray[np.int32]
    BoolArray = npt.NDArray[np.bool_]


class RequestState(Enum):
    """States of both sides. A request only moves forward, except that memory may send it back:
    a parked prefill waits again for its reservation."""

    BOOTSTRAPPING = auto()  # P: waits to run, D has not reserved yet
    WAITING = auto()  # P: waits to run; D: committed, waits for a place in the batch
    PREALLOCATING = auto()  # D: waits for the peer or for memory
    RECEIVING = auto()  # D: slots reserved, KV on its way
    RUNNING = auto()
    SENDING = auto()  # P: computed, KV on its way (the queue called "in flight")
    DONE = auto()
    FAILED = auto()
    ABORTED = auto()

    @property
    def terminal(self) -> bool:
        """Nothing will happen to the request any more."""
        return self in (RequestState.DONE, RequestState.FAILED, RequestState.ABORTED)


_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)
_NO_FLAGS: BoolArray = np.empty(0, dtype=np.bool_)


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens and the pages that hold its KV.

    Attributes:
        tokens: int32, prompt and output; grows by doubling, see :meth:`append`.
        num_tokens: valid entries of ``tokens``.
        num_computed: leading tokens whose KV is in the pool.
        pages: page table, int32.
        owned: for each page, whether this sequence alone holds it (else the radix tree does, and
            ``handle`` keeps it there).
        handle: locked end of the cached prefix in the radix tree, or None.
        sampling: ``pd.engine.sampler.SamplingState`` of the choice.
        launched: the last ``pd.scheduling.step.Work`` of this sequence that was launched, or None
            once its step is accounted for. Until then its pages must not change owner.
        host_kv: KV of a retracted sequence (tokens ``[0, num_computed)``), or None.
    """

    request: Request
    index: int
    tokens: IntArray
    num_tokens: int
    sampling: Any = None
    num_computed: int = 0
    pages: IntArray = field(default_factory=lambda: _NO_PAGES)
    owned: BoolArray = field(default_factory=lambda: _NO_FLAGS)
    handle: Any = None
    launched: Any = None
    finished: bool = False
    host_kv: Any = None

    def append(self, token: int) -> None:
        """Add one output token."""
        if self.num_tokens == len(self.tokens):
            grown = np.empty(max(16, 2 * len(self.tokens)), dtype=np.int32)
            grown[: self.num_tokens] = self.tokens
            self.tokens = grown
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    @property
    def in_step(self) -> bool:
        """Whether a launched step still uses its pages."""
        return self.launched is not None

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
class Request:
    """What a proxy asked of this node, its state and its sequences.

    ``sequences[0]`` holds the prompt while it is computed or received; the other choices of ``n``
    are forked from it when token 1 is known.

    Attributes:
        choices: sampling state of each choice of ``n``, on the node that samples token 1.
        ended_choices: choices that the proxy ended (their stop string was found).
        overtaken: younger requests that were admitted before this one.
        hand_off: this side's part of the transfer (``Outgoing`` on P, ``Incoming`` on D).
    """

    rid: str
    room: bytes
    proxy: bytes
    prompt: IntArray
    params: SamplingParams
    namespace: str = ""
    priority: int = 0
    deadline: float | None = None
    peer: str = ""
    peer_bootstrap: str = ""
    state: RequestState = RequestState.WAITING
    error: PDError | None = None
    sequences: list[Sequence] = field(default_factory=list)
    times: Timings = field(default_factory=Timings)
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    choices: list[Any] = field(default_factory=list)
    ended_choices: set[int] = field(default_factory=set)
    overtaken: int = 0
    hand_off: Any = None

    @classmethod
    def from_message(cls, message: Generate, proxy: bytes) -> Request:
        """Build from the wire; the caller validated room and token ids."""
        prompt = np.frombuffer(message.token_ids, dtype="<i4").astype(np.int32)
        deadline = None if message.timeout is None else time.monotonic() + message.timeout
        request = cls(
            rid=message.rid,
            room=message.room,
            proxy=proxy,
            prompt=prompt,
            params=message.params,
            namespace=message.namespace,
            priority=message.priority,
            deadline=deadline,
            peer=message.peer,
            peer_bootstrap=message.peer_bootstrap,
        )
        request.sequences.append(Sequence(request, 0, prompt, len(prompt)))
        return request

    @property
    def sequence(self) -> Sequence:
        """The sequence that holds the prompt."""
        return self.sequences[0]

    @property
    def in_step(self) -> bool:
        """Whether a launched step still uses pages of this request."""
        return any(sequence.in_step for sequence in self.sequences)
