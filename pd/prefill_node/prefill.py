"""The prefill side of a scheduler: waiting requests become chunks, chunks become first tokens."""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING

from pd.core.request import Request, RequestState
from pd.engine.sampler import SamplingState
from pd.node.step import Work
from pd.prefill_node.waiting_queue import WaitingQueue, reusable_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.config import NodeConfig
    from pd.core.request import Sequence
    from pd.engine.engine import Engine
    from pd.node.memory import Memory

# Log probabilities of a prompt need a row of the vocabulary per token; this bounds their memory.
MAX_LOGPROB_CHUNK = 512


class PrefillManager:
    """Queues "waiting" and "running" of prefill. The caller holds the node's lock.

    Args:
        will_leave: whether a request, once computed, waits for nobody (its decode node holds memory
            for it already). Such requests run even while others lack memory, since they give
            theirs back. None if no request is like that.
        reclaim: called when one of these lacks this many pages; frees what it can.
        headroom: pages that must stay available after the admission of a request.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        memory: Memory,
        *,
        will_leave: Callable[[Request], bool] | None = None,
        reclaim: Callable[[int], None] = lambda pages: None,
        headroom: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        self._config = config
        self._model = engine.model_config
        self._memory = memory
        self._will_leave = will_leave
        self._reclaim = reclaim
        self._headroom = headroom
        self.waiting = WaitingQueue(config.schedule_policy, memory.radix, config.max_overtakes)
        self.running: list[Request] = []

    def remove(self, request: Request) -> None:
        """Forget a request that ended or moved on."""
        self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)

    def queued(self) -> Iterator[Sequence]:
        """The sequences of both queues."""
        yield from (request.sequence for request in chain(self.waiting, self.running))

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        partial = sum(len(r.prompt) - r.sequence.num_computed for r in self.running)
        return partial + sum(len(request.prompt) for request in self.waiting)

    def plan(self, budget: int, max_running: int) -> list[Work]:
        """Chunks of at most ``budget`` tokens in all: who started goes on, then new ones."""
        works: list[Work] = []
        for request in self.running:
            budget -= self._chunk(request, budget, works)
        if budget > 0 and len(self.running) < max_running:
            self._admit_waiting(budget, max_running, works)
        return works

    def _admit_waiting(self, budget: int, max_running: int, works: list[Work]) -> None:
        short = False
        owed: list[Request] = []
        for request in self.waiting.candidates():
            leaves = self._will_leave is not None and self._will_leave(request)
            if (short and not leaves) or self.waiting.should_follow(request, self.running):
                continue
            if any(self.waiting.is_overdue(other) for other in owed):
                return  # the memory that comes free is theirs
            if self._admit(request, leaves):
                budget -= self._chunk(request, budget, works)
                if budget <= 0 or len(self.running) >= max_running:
                    return
            elif self._will_leave is None:
                return
            else:
                short = True
                if leaves:
                    owed.append(request)

    def _admit(self, request: Request, leaves: bool) -> bool:
        """Lock the cached prefix and secure pages for the whole prompt, or change nothing."""
        memory, sequence = self._memory, request.sequence
        length, reusable = len(request.prompt), reusable_tokens(request)
        headroom = self._headroom(request)
        missing = memory.missing(sequence, length, reusable)
        if missing + headroom > memory.available and not leaves:
            return False
        memory.match(sequence, reusable)
        if missing > memory.available and leaves:
            self._reclaim(missing)
        if missing + headroom > memory.available or not memory.grow(sequence, length):
            memory.release(sequence)
            return False
        self.waiting.admit(request)
        self.running.append(request)
        request.state = RequestState.RUNNING
        if request.times.admitted is None:
            request.times.admitted = time.monotonic()
            request.cached_tokens = sequence.num_computed
        if not request.choices:
            self._make_choices(request)
        return True

    def _make_choices(self, request: Request) -> None:
        first = SamplingState(
            request.params, request.prompt, self._model.eos_token_ids, self._model.vocab_size
        )
        request.choices = [first, *(first.fork(index) for index in range(1, request.params.n))]

    def _chunk(self, request: Request, budget: int, works: list[Work]) -> int:
        sequence = request.sequence
        length = len(request.prompt)
        launched: Work | None = sequence.launched
        start = sequence.num_computed if launched is None else launched.stop
        logprobs_from = request.params.prompt_logprobs_start
        if request.times.first_token is not None:
            logprobs_from = None
        if logprobs_from is not None:
            budget = min(budget, MAX_LOGPROB_CHUNK)
            logprobs_from = min(logprobs_from, length)
        stop = min(length, start + budget)
        if stop <= start:
            return 0
        # A parked request computes its prompt again but has its token 1.
        samples = request.choices if stop == length and not request.times.first_token else []
        sequence.launched = Work(sequence, start, stop, list(samples), logprobs_from)
        works.append(sequence.launched)
        return stop - start

    def process(self, works: list[Work]) -> list[Work]:
        """Account for a completed step; returns the works that completed a prompt."""
        completed = []
        for work in works:
            sequence, request = work.sequence, work.sequence.request
            if sequence.launched is work:
                sequence.launched = None
            if request.state.terminal:
                continue
            sequence.num_computed = work.stop
            self._memory.cache(sequence)
            request.prompt_logprobs += work.prompt_logprobs
            if work.stop == len(request.prompt):
                self.running.remove(request)
                completed.append(work)
        return completed
