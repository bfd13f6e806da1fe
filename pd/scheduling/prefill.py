"""Prefill scheduling: waiting requests become chunks, chunks become first tokens."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from pd.core.request import Request, RequestState
from pd.core.step_cost import chunk_pairs
from pd.engine.sampling_state import SamplingState
from pd.radix import RadixCache
from pd.scheduling.memory import LACKING_SECONDS
from pd.scheduling.step import Work
from pd.scheduling.waiting_queue import WINDOW, reusable_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.request import Sequence
    from pd.engine.engine import Engine
    from pd.scheduling.memory import Memory
    from pd.scheduling.waiting_queue import WaitingQueue

# Log probabilities of a prompt need a row of the vocabulary per token. Their memory is bounded by
# rows of one prompt in a step, and by bytes in float32 of all prompts in a step (but no less than
# that many rows).
MAX_LOGPROB_CHUNK = 512
_MAX_LOGPROB_BYTES = 1 << 30
# Up to so many prompts that wait, their tokens are counted anew for each step.
_MOST_COUNTED = 16
# Seconds after which prompts are forgotten that were computed, since others take their pages, and
# those that will not be computed.
_COMPUTED_SECONDS, _ABANDONED_SECONDS = 10.0, 1.0
# Tokens of waiting prompts that are noted again when others are forgotten, in a few milliseconds.
_MOST_KEPT = 200_000
# A step of so many tokens makes full use of a GPU: with more it takes longer in proportion, and a
# prompt that ends in it would wait for tokens of others.
_FULL_STEP = 2048
# Behind a long queue such a step is this part of the queue: then it ends much earlier than all of
# the queue would, and hardly less is computed per second.
_STEPS_OF_QUEUE = 8
# A prompt does not wait for another of which more than so many times as much is left.
_SHORTER = 2


@dataclass(slots=True)
class _Step:
    """A step that is being planned.

    Attributes:
        budget: its tokens; ``left``: those that are neither given nor kept for ``oldest``.
        enough: tokens beyond which nothing is added to a step in which a prompt ends.
        rows: rows of logits that are left for log probabilities of prompts.
    """

    budget: int
    enough: int
    rows: int
    left: int = field(init=False)
    given: int = 0
    oldest: Request | None = None
    kept: int = 0
    works: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.budget

    def keep(self, request: Request, tokens: int) -> None:
        """Keep tokens for a request, which may get others too."""
        self.oldest, self.kept = request, min(tokens, self.left)
        self.left -= self.kept

    def take(self, request: Request, wanted: int, *, to_end: bool) -> int:
        """Tokens for a request, ``wanted`` at most; what it does not need of its own is free.

        Args:
            to_end: whether the request has no tokens left but these.
        """
        if request is self.oldest:
            self.left, self.kept, self.oldest = self.left + self.kept, 0, None
        taken = min(wanted, self.left)
        self.left -= taken
        self.given += taken
        if to_end and taken == wanted:
            self.kept = min(self.kept, self.enough - self.enough // 2)
            self.left = min(self.left, max(0, self.enough - self.given - self.kept))
        return taken


class PrefillScheduler:
    """Queues "waiting" and "running" of prefill. The caller holds the node's lock.

    Args:
        waiting: queue of requests that wait; empty at first.
        will_leave: whether a request, once computed, waits for no other (its decode node holds
            memory for it already). Such requests run even while others lack memory, since they
            release theirs soon. None if no request is like that.
        reclaim: called with a number of pages that such a request lacks; frees pages of others
            until so many are available, or as many as it can.
        headroom: pages that must stay available after the admission of a request; all pages of the
            pool if it may not be admitted.

    Attributes:
        lacking: requests that lacked memory, or a place among those that run, when the last step
            was planned, of those that need no memory of another node.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        waiting: WaitingQueue,
        *,
        will_leave: Callable[[Request], bool] | None = None,
        reclaim: Callable[[int], None] = lambda pages: None,
        headroom: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        self._model = engine.model_config
        rows = _MAX_LOGPROB_BYTES // (4 * self._model.vocab_size)
        self._logprob_rows = max(MAX_LOGPROB_CHUNK, rows)
        self._memory = memory
        self._will_leave = will_leave
        self._reclaim = reclaim
        self._headroom = headroom
        self.waiting = waiting
        self.running: list[Request] = []
        self.lacking: list[Request] = []
        # Prompts whose load was asked for: what they begin with is computed once for all.
        self._asked = RadixCache(memory.page_size)
        self._asked_at = 0.0
        # Whether one of them will not be computed.
        self._is_abandoned = False

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Take a request that ended out of both queues."""
        ends_here = request in self.waiting or request in self.running
        self._is_abandoned = self._is_abandoned or ends_here
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

    def uncached(self) -> tuple[int, float]:
        """Prompt tokens that are still to be computed, without those that are cached, and their
        pairs of query and key."""
        tokens, pairs = 0, 0.0
        is_idle = not self.running and not self.waiting
        patience = _ABANDONED_SECONDS if self._is_abandoned else _COMPUTED_SECONDS
        if is_idle or time.monotonic() - self._asked_at > patience:
            self._forget_asked()
        for request in self.running:
            if request.progress.cached_on_arrival is None:
                request.progress.cached_on_arrival = request.progress.cached_tokens
                self._remember(request)
            left = self._left(request)
            tokens += left
            pairs += chunk_pairs(len(request.prompt) - left, left)
        for request in self.waiting:
            cached = self._cached_on_arrival(request)
            left = len(request.prompt) - cached
            tokens += left
            pairs += chunk_pairs(cached, left)
        return tokens, pairs

    def _forget_asked(self) -> None:
        """Forget the prompts of requests that are over (what is cached of them is known), and those
        of the last ones if many tokens wait."""
        self._asked, self._asked_at = RadixCache(self._memory.page_size), time.monotonic()
        self._is_abandoned = False
        tokens = 0
        for request in chain(self.running, self.waiting):
            tokens += len(request.prompt)
            if tokens > _MOST_KEPT:
                return
            if request.progress.cached_on_arrival is not None:
                self._remember(request)

    def queued_whole(self) -> int | None:
        """Prompt tokens of the requests that have some left to be computed, those that are computed
        already included, without those that were cached; None if there are more requests than are
        worth counting with each step."""
        if len(self.running) + len(self.waiting) > _MOST_COUNTED:
            return None
        if not self.running and not self.waiting:
            return 0
        begun = [request for request in self.running if self._left(request)]
        tokens = sum(len(request.prompt) - request.progress.cached_tokens for request in begun)
        return tokens + sum(len(r.prompt) - self._cached_on_arrival(r) for r in self.waiting)

    def _cached_on_arrival(self, request: Request) -> int:
        """Leading tokens of a waiting prompt that were cached when it was first asked for, or will
        be by prompts that came before it."""
        progress = request.progress
        if progress.cached_on_arrival is None:
            most = reusable_tokens(request)
            shared = self._asked.peek(request.prompt, request.namespace)
            cached = self._memory.cached(request.sequence, most)
            progress.cached_on_arrival = max(cached, min(shared, most))
            self._remember(request)
        return progress.cached_on_arrival

    def _remember(self, request: Request) -> None:
        asked, memory = self._asked, self._memory
        num_pages = min(len(request.prompt) // memory.page_size, memory.num_pages)
        tokens = request.prompt[: num_pages * memory.page_size]
        asked.insert(tokens, np.zeros(num_pages, dtype=np.int32), request.namespace)
        if asked.evictable_pages > memory.num_pages:
            asked.evict(asked.evictable_pages - memory.num_pages)

    @property
    def next_position(self) -> int:
        """Position of the first token of the prompt that is computed next, as far as that is
        known."""
        oldest = next((request for request in self.running if self._left(request)), None)
        if oldest is not None:
            return len(oldest.prompt) - self._left(oldest)
        first = next(self.waiting.candidates(), None)
        return 0 if first is None else self._cached_on_arrival(first)

    def ending(self) -> Iterator[Request]:
        """Requests whose last chunk is under way."""
        return (request for request in self.running if not self._left(request))

    def plan(self, budget: int, max_running: int) -> list[Work]:
        """Chunks of at most ``budget`` tokens in all.

        Prompts of which no more than ``budget`` tokens are left are *short* here: they go first, in
        order of admission, so that none waits for all of a long one. But the oldest prompt keeps
        half of the budget, so that all get on, and long ones get whatever is left.

        Long prompts run one after the other: two of a length would end no sooner, and hold pages
        meanwhile. But one that has less than half of what is left of each that runs goes beside
        them, and first. So few run at a time, since each halves what the next may have, and the
        oldest gets on meanwhile. A prompt that was overtaken too often waits for none.

        A step in which a prompt ends is no longer than it must be to make full use of a GPU, unless
        many tokens wait: the first token comes when the whole step is done.
        """
        step = _Step(budget, self._enough(budget), self._logprob_rows)
        oldest = next((request for request in self.running if self._left(request)), None)
        if oldest is not None:
            wanted = min(self._limit(oldest), self._left(oldest))
            step.keep(oldest, min(wanted, budget - budget // 2))
        long: list[Request] = []
        for request in self.running:
            if self._is_long(request, self._left(request), budget):
                long.append(request)
            else:
                self._chunk(request, step)
        self._admit_waiting(step, max_running, long)
        for request in sorted(long, key=self._left):
            self._chunk(request, step)
        return step.works

    def _enough(self, budget: int) -> int:
        """Tokens beyond which a step does not grow once a prompt ends in it."""
        if len(self.running) + len(self.waiting) > _MOST_COUNTED:
            return budget
        return min(budget, max(_FULL_STEP, self.queued_tokens // _STEPS_OF_QUEUE))

    def _is_long(self, request: Request, left: int, budget: int) -> bool:
        """Whether a prompt of which so many tokens are left needs all of a step and more."""
        return left > budget <= self._limit(request)

    def _is_far_shorter(self, left: int, long: list[Request]) -> bool:
        """Whether a prompt of which so many tokens are left may run beside long ones."""
        return all(_SHORTER * left < self._left(other) for other in long)

    def _admit_waiting(self, step: _Step, max_running: int, long: list[Request]) -> None:
        """Admit prompts that fit and may run now. Long ones are appended to ``long`` and get their
        chunk when all short ones have theirs."""
        self.lacking = []
        lacking = False
        owed: list[Request] = []
        for number, request in enumerate(self.waiting.candidates()):
            if len(self.running) >= max_running:
                self._note_lack(request)
                return
            if step.left <= 0:
                return
            left = self._left_of_waiting(request, step.budget, look=number < WINDOW)
            is_long = self._is_long(request, left, step.budget)
            waits = is_long and bool(long) and not self._is_far_shorter(left, long)
            if waits and not self.waiting.is_overdue(request):
                owed.append(request)  # its turn comes, since the one that runs gets on
                continue
            leaves = self._leaves(request)
            if (lacking and not leaves) or self.waiting.should_follow(request, self.running):
                continue
            if any(self.waiting.is_overdue(other) for other in owed):
                return  # it is their turn: the next step or memory that comes free is theirs
            if self._admit(request, leaves):
                if is_long:
                    long.append(request)
                    if len(self.running) == 1:
                        step.keep(request, step.budget - step.budget // 2)
                else:
                    self._chunk(request, step)
            elif self._will_leave is None:
                return
            else:
                lacking = True
                if leaves:
                    owed.append(request)
                self._note_lack(request)

    def _note_lack(self, request: Request) -> None:
        progress = request.progress
        if request.outgoing is None or self._leaves(request):
            progress.lacking_since = progress.lacking_since or time.monotonic()
            self.lacking.append(request)

    def _leaves(self, request: Request) -> bool:
        return self._will_leave is not None and self._will_leave(request)

    def owes(self, arrived: float = -math.inf) -> bool:
        """Whether a prompt has lacked memory or a place for so long that it gets what comes free
        before a request that arrived then: one that will leave, whose peer holds memory for it
        meanwhile, or one that came earlier."""
        before = time.monotonic() - LACKING_SECONDS
        for request in self.lacking:
            since = request.progress.lacking_since
            waits = since is not None and since < before
            if waits and (request.times.arrived < arrived or self._leaves(request)):
                return True
        return False

    def _left_of_waiting(self, request: Request, budget: int, *, look: bool) -> int:
        """Tokens of a waiting prompt, with ``look`` those that are not cached if it is long."""
        length = len(request.prompt)
        if look and self._is_long(request, length, budget):
            length -= self._memory.cached(request.sequence, reusable_tokens(request))
        return length

    def _admit(self, request: Request, leaves: bool) -> bool:
        """Lock the cached prefix and secure pages for the whole prompt, or change nothing."""
        memory, sequence = self._memory, request.sequence
        length, reusable = len(request.prompt), reusable_tokens(request)
        headroom = self._headroom(request)
        missing = memory.missing(sequence, length, reusable)
        may_reclaim = leaves and headroom < memory.num_pages
        if missing + headroom > memory.available and not may_reclaim:
            return False
        # NOTE: what is matched was available as well, if nobody else had locked it.
        memory.match(sequence, reusable)
        if missing + headroom > memory.available and may_reclaim:
            self._reclaim(missing + headroom)
        if missing + headroom > memory.available or not memory.grow(sequence, length):
            memory.release(sequence)
            return False
        self.waiting.admit(request)
        request.progress.lacking_since = None
        self.running.append(request)
        request.state = RequestState.RUNNING
        if request.times.admitted is None:
            request.times.admitted = time.monotonic()
            request.progress.cached_tokens = sequence.num_computed
        if not request.progress.choices and request.times.first_token is None:
            self._make_choices(request)
        return True

    def _make_choices(self, request: Request) -> None:
        if request.resumed is not None:
            request.progress.choices = [request.resumed]
            return
        first = SamplingState(
            request.params,
            request.prompt,
            self._model.eos_token_ids,
            self._model.vocab_size,
            make_rules=request.make_rules,
        )
        others = [first.fork(index) for index in range(1, request.params.n)]
        request.progress.choices = [first, *others]

    def _left(self, request: Request) -> int:
        """Tokens of a running prompt that no launched step computes."""
        launched = request.sequence.launched
        done = request.sequence.num_computed if launched is None else launched.stop
        return len(request.prompt) - done

    @staticmethod
    def _logprobs_from(request: Request) -> int | None:
        """First token whose log probability is wanted; None if that is over, too."""
        if request.times.first_token is not None:
            return None
        return request.params.prompt_logprobs_start

    def _limit(self, request: Request, rows: int = MAX_LOGPROB_CHUNK) -> int:
        """Tokens of a prompt that one step may compute, with so many rows of logits. Those before
        the first whose logits are needed need no rows, so they are not counted."""
        length, start = len(request.prompt), self._logprobs_from(request)
        if start is None:
            return length
        computed = length - self._left(request)
        return min(length, max(0, start - 1 - computed) + min(rows, MAX_LOGPROB_CHUNK))

    def _chunk(self, request: Request, step: _Step) -> None:
        """Give a prompt what the step has for it."""
        sequence = request.sequence
        length, left = len(request.prompt), self._left(request)
        wanted = min(left, self._limit(request, step.rows))
        # Behind the launched chunk that ends a prompt nothing is left of it.
        taken = step.take(request, wanted, to_end=0 < wanted == left)
        if not taken:
            return
        start = length - left
        stop = start + taken
        logprobs_from = self._logprobs_from(request)
        if logprobs_from is not None:
            logprobs_from = min(logprobs_from, length)
        # A parked request computes its prompt again but has its token 1.
        ends = stop == length and not request.times.first_token
        samples = list(request.progress.choices) if ends else []
        sequence.launched = work = Work(sequence, start, stop, samples, logprobs_from)
        if logprobs_from is not None:
            step.rows -= work.num_logits
        step.works.append(work)

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
            request.progress.logprobs += work.prompt_logprobs
            if work.stop == len(request.prompt):
                self.running.remove(request)
                completed.append(work)
        return completed
