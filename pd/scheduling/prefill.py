"""Prefill scheduling: turns waiting requests into chunks, and chunks into first tokens."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from pd.core.step_cost import chunk_pairs
from pd.engine.sampling_state import SamplingState
from pd.radix import RadixCache
from pd.scheduling.memory import LACKING_SECONDS
from pd.scheduling.request import Request, RequestState
from pd.scheduling.step import Work
from pd.scheduling.waiting_queue import WINDOW, count_reusable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.engine.engine import Engine
    from pd.scheduling.admission_policy import AdmissionPolicy
    from pd.scheduling.memory import Memory
    from pd.scheduling.request import Sequence
    from pd.scheduling.waiting_queue import WaitingQueue

# Log probabilities of a prompt need one row of the vocabulary per token. We limit the rows of one
# prompt in a step, and the float32 bytes of all prompts in a step, but allow at least one prompt.
MAX_LOGPROB_CHUNK = 512
_MAX_LOGPROB_BYTES = 1 << 30
# With more waiting prompts than this we do not count their tokens anew for each step.
_MOST_COUNTED = 16
# We forget counted prompts after this many seconds: computed ones, because others take their pages,
# and abandoned ones, because nobody will compute them.
_COMPUTED_SECONDS, _ABANDONED_SECONDS = 10.0, 1.0
# When we forget counted prompts, we note up to this many tokens of waiting prompts again. This
# takes a few milliseconds.
_MOST_KEPT = 200_000
# A step of this many tokens makes full use of a GPU. A longer one only makes its ending prompts
# wait for tokens of others.
_FULL_STEP = 2048
# With a long queue, a step that ends a prompt takes this part of the queue, because it then ends
# much earlier than the queue and hardly costs throughput.
_STEPS_OF_QUEUE = 8
# A prompt does not wait for another one with more than this many times as many tokens left.
_SHORTER = 2
# The oldest running prompt keeps this part of a step, and a smaller one if it will be late anyway.
_PART, _LATE_PART = 2, 8


@dataclass(slots=True)
class _Step:
    """A step during planning.

    Attributes:
        budget: tokens of the step.
        limit: maximum tokens of a step in which a prompt ends.
        rows: rows of logits left for log probabilities of prompts.
        left: tokens of the budget neither given out nor kept.
        given: tokens given out.
        oldest: the request for which ``kept`` tokens are reserved.
    """

    budget: int
    limit: int
    rows: int
    left: int = field(init=False)
    given: int = 0
    oldest: Request | None = None
    kept: int = 0
    works: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.budget

    def keep_tokens(self, request: Request, tokens: int) -> None:
        """Reserve tokens for a request, which may get more in addition."""
        self.oldest, self.kept = request, min(tokens, self.left)
        self.left -= self.kept

    def take_tokens(self, request: Request, wanted: int, *, to_end: bool) -> int:
        """Give a request up to ``wanted`` tokens, and free the rest of its reservation.

        Args:
            to_end: whether these are the last tokens of the prompt.

        Returns:
            The number of tokens given.
        """
        if request is self.oldest:
            self.left, self.kept, self.oldest = self.left + self.kept, 0, None
        taken = min(wanted, self.left)
        self.left -= taken
        self.given += taken
        if to_end and taken == wanted:
            self.kept = min(self.kept, self.limit - self.limit // 2)
            self.left = min(self.left, max(0, self.limit - self.given - self.kept))
        return taken


class PrefillScheduler:
    """Schedules prompts with the queues "waiting" and "running".

    The caller holds the node's lock.

    Args:
        waiting: the queue of waiting requests, empty at first.
        admission: decides how much memory a prompt may take.

    Attributes:
        lacking: requests that lacked memory or a place in the last planned step, except those
            waiting for memory of another node.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        waiting: WaitingQueue,
        admission: AdmissionPolicy,
    ) -> None:
        self._model = engine.model_config
        rows = _MAX_LOGPROB_BYTES // (4 * self._model.vocab_size)
        self._logprob_rows = max(MAX_LOGPROB_CHUNK, rows)
        self._memory = memory
        self._admission = admission
        self.waiting = waiting
        self.running: list[Request] = []
        self.lacking: list[Request] = []
        # Prompts whose tokens we counted, because prompts with a common beginning share its cost.
        self._counted_prompts = RadixCache(memory.page_size)
        self._counted_since = 0.0
        # Whether one of these prompts was abandoned.
        self._is_abandoned = False

    def add_request(self, request: Request) -> None:
        """Add a new request to the waiting queue."""
        self.waiting.add_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove an ended request from both queues."""
        ends_here = request in self.waiting or request in self.running
        self._is_abandoned = self._is_abandoned or ends_here
        self.waiting.remove_request(request)
        if request in self.running:
            self.running.remove(request)

    def iter_queued(self) -> Iterator[Sequence]:
        """Iterate over the sequences of both queues."""
        yield from (request.sequence for request in chain(self.waiting, self.running))

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens left to compute."""
        partial = sum(len(r.prompt) - r.sequence.num_computed for r in self.running)
        return partial + sum(len(request.prompt) for request in self.waiting)

    def count_uncached(self) -> tuple[int, float]:
        """Count the uncached prompt tokens left to compute, and their pairs of query and key."""
        tokens, pairs = 0, 0.0
        is_idle = not self.running and not self.waiting
        patience = _ABANDONED_SECONDS if self._is_abandoned else _COMPUTED_SECONDS
        if is_idle or time.monotonic() - self._counted_since > patience:
            self._reset_counted()
        for request in self.running:
            if request.progress.cached_on_arrival is None:
                request.progress.cached_on_arrival = request.progress.cached_tokens
                self._note_prompt(request)
            left = self._count_left(request)
            tokens += left
            pairs += chunk_pairs(len(request.prompt) - left, left)
        for request in self.waiting:
            cached = self._cached_on_arrival(request)
            left = len(request.prompt) - cached
            tokens += left
            pairs += chunk_pairs(cached, left)
        return tokens, pairs

    def _reset_counted(self) -> None:
        """Forget prompts of ended requests, whose cached tokens the radix tree knows by now.

        If many tokens wait, forget the youngest prompts, too.
        """
        self._counted_prompts, self._counted_since = (
            RadixCache(self._memory.page_size),
            time.monotonic(),
        )
        self._is_abandoned = False
        tokens = 0
        for request in chain(self.running, self.waiting):
            tokens += len(request.prompt)
            if tokens > _MOST_KEPT:
                return
            if request.progress.cached_on_arrival is not None:
                self._note_prompt(request)

    def count_queued(self) -> int | None:
        """Count all uncached tokens of prompts with tokens left, including computed tokens.

        Returns:
            None if there are too many requests to count them for each step.
        """
        if len(self.running) + len(self.waiting) > _MOST_COUNTED:
            return None
        if not self.running and not self.waiting:
            return 0
        begun = [request for request in self.running if self._count_left(request)]
        tokens = sum(len(request.prompt) - request.progress.cached_tokens for request in begun)
        return tokens + sum(len(r.prompt) - self._cached_on_arrival(r) for r in self.waiting)

    def _cached_on_arrival(self, request: Request) -> int:
        """Return the leading tokens that were cached when we first counted a waiting prompt.

        This includes tokens that earlier prompts will have cached.
        """
        progress = request.progress
        if progress.cached_on_arrival is None:
            most = count_reusable(request)
            shared = self._counted_prompts.count_cached(request.prompt, request.namespace)
            cached = self._memory.count_cached(request.sequence, most)
            progress.cached_on_arrival = max(cached, min(shared, most))
            self._note_prompt(request)
        return progress.cached_on_arrival

    def _note_prompt(self, request: Request) -> None:
        asked, memory = self._counted_prompts, self._memory
        if not memory.caches_prefixes:
            return
        num_pages = min(len(request.prompt) // memory.page_size, memory.num_pages)
        tokens = request.prompt[: num_pages * memory.page_size]
        asked.insert_prefix(tokens, np.zeros(num_pages, dtype=np.int32), request.namespace)
        if asked.evictable_pages > memory.num_pages:
            asked.evict_pages(asked.evictable_pages - memory.num_pages)

    @property
    def next_position(self) -> int:
        """Estimated position at which the next prompt chunk starts."""
        oldest = next((request for request in self.running if self._count_left(request)), None)
        if oldest is not None:
            return len(oldest.prompt) - self._count_left(oldest)
        first = next(self.waiting.iter_candidates(), None)
        return 0 if first is None else self._cached_on_arrival(first)

    def iter_ending(self) -> Iterator[Request]:
        """Iterate over the requests whose last chunk is launched."""
        return (request for request in self.running if not self._count_left(request))

    def plan_step(self, budget: int, max_running: int) -> list[Work]:
        """Plan chunks of at most ``budget`` tokens in all.

        A prompt is *short* if at most ``budget`` tokens are left. Short prompts go first, in order
        of admission, so none of them waits for all of a long one. The oldest prompt keeps half of
        the budget, so every prompt makes progress. Long prompts get the rest.

        Long prompts run one after the other, because two together would end no sooner and hold more
        pages. A prompt may join them and goes first if it has less than half as many tokens left as
        each of them. So only a few run at a time. An overdue prompt waits for none. If a prompt can
        meet its objective, it does not wait for longer ones that cannot. If the oldest prompt
        cannot meet its objective, it keeps only an eighth of the budget.

        The first token comes when the whole step is done. A step with an ending prompt is therefore
        only as long as the GPU needs for full use, unless many tokens wait.
        """
        step = _Step(budget, self._choose_step_limit(budget), self._logprob_rows)
        oldest = next((request for request in self.running if self._count_left(request)), None)
        if oldest is not None:
            wanted = min(self._chunk_limit(oldest), self._count_left(oldest))
            part = _LATE_PART if self._is_late(oldest) else _PART
            step.keep_tokens(oldest, min(wanted, -(-budget // part)))
        long: list[Request] = []
        for request in self.running:
            if self._is_long(request, self._count_left(request), budget):
                long.append(request)
            else:
                self._add_chunk(request, step)
        self._admit_waiting(step, max_running, long)
        for request in sorted(long, key=lambda each: (self._is_late(each), self._count_left(each))):
            self._add_chunk(request, step)
        return step.works

    def _choose_step_limit(self, budget: int) -> int:
        """Choose the maximum tokens of a step in which a prompt ends."""
        if len(self.running) + len(self.waiting) > _MOST_COUNTED:
            return budget
        return min(budget, max(_FULL_STEP, self.queued_tokens // _STEPS_OF_QUEUE))

    def _is_long(self, request: Request, left: int, budget: int) -> bool:
        """Return whether a prompt with ``left`` tokens needs more than a whole step."""
        return left > budget <= self._chunk_limit(request)

    def _may_run_beside(self, request: Request, left: int, long: list[Request]) -> bool:
        """Return whether a long prompt with ``left`` tokens may join the running ones."""
        for other in long:
            longer = self._count_left(other)
            if _SHORTER * left < longer:
                continue
            is_late = self.waiting.will_be_late(request, left)
            if is_late or left >= longer or not self._is_late(other):
                return False
        return True

    def _is_late(self, request: Request) -> bool:
        """Return whether a running prompt will be late anyway, so it must not delay others."""
        return self.waiting.will_be_late(request, self._count_left(request))

    def _admit_waiting(self, step: _Step, max_running: int, long: list[Request]) -> None:
        """Admit all prompts that fit and may run now.

        Long prompts go to ``long``. They get their chunks after all short ones.
        """
        self.lacking = []
        lacking = False
        owed: list[Request] = []
        for number, request in enumerate(self.waiting.iter_candidates()):
            if len(self.running) >= max_running:
                self._note_lack(request)
                return
            if step.left <= 0:
                return
            left = len(request.prompt)
            if number < WINDOW and self._is_long(request, left, step.budget):
                left -= self._memory.count_cached(request.sequence, count_reusable(request))
            is_long = self._is_long(request, left, step.budget)
            waits = is_long and bool(long) and not self._may_run_beside(request, left, long)
            if waits and not self.waiting.is_overdue(request):
                owed.append(request)  # its turn comes, because the running one makes progress
                continue
            leaves = self._admission.will_leave(request)
            if (lacking and not leaves) or self.waiting.should_follow(request, self.running):
                continue
            if any(self.waiting.is_overdue(other) for other in owed):
                return  # they get the next step, or the next free memory
            if self._admit_prompt(request, leaves):
                if is_long:
                    long.append(request)
                    if len(self.running) == 1:
                        step.keep_tokens(request, step.budget - step.budget // 2)
                else:
                    self._add_chunk(request, step)
            elif not self._admission.hands_off:
                return
            else:
                lacking = True
                if leaves:
                    owed.append(request)
                self._note_lack(request)

    def _note_lack(self, request: Request) -> None:
        progress = request.progress
        if request.outgoing is None or self._admission.will_leave(request):
            progress.lacking_since = progress.lacking_since or time.monotonic()
            self.lacking.append(request)

    def owes_memory(self, arrived: float = -math.inf) -> bool:
        """Return whether a prompt lacking memory for long goes before a new request.

        It does if it arrived before ``arrived``, or if it will leave, because then its peer holds
        memory for it.
        """
        before = time.monotonic() - LACKING_SECONDS
        for request in self.lacking:
            since = request.progress.lacking_since
            if since is None or since >= before:
                continue
            if request.times.arrived < arrived or self._admission.will_leave(request):
                return True
        return False

    def _admit_prompt(self, request: Request, leaves: bool) -> bool:
        """Lock the cached prefix and get pages for the whole prompt, or change nothing.

        Returns:
            Whether the prompt runs now.
        """
        memory, sequence = self._memory, request.sequence
        length, reusable = len(request.prompt), count_reusable(request)
        headroom = self._admission.count_headroom(request, self.running)
        missing = memory.count_missing(sequence, length, reusable)
        may_reclaim = leaves and headroom < memory.num_pages
        if missing + headroom > memory.num_available and not may_reclaim:
            return False
        # Matching locks pages counted as available before, so we compare again.
        memory.match_prefix(sequence, reusable)
        if missing + headroom > memory.num_available and may_reclaim:
            self._admission.reclaim_pages(missing + headroom)
        if missing + headroom > memory.num_available or not memory.grow_pages(sequence, length):
            memory.release_pages(sequence)
            return False
        self.waiting.admit_request(request)
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
        if request.resumed_state is not None:
            request.progress.choices = [request.resumed_state]
            return
        first = SamplingState(
            request.params,
            request.prompt,
            self._model.eos_token_ids,
            self._model.vocab_size,
            make_rules=request.make_rules,
        )
        others = [first.fork_state(index) for index in range(1, request.params.n)]
        request.progress.choices = [first, *others]

    def _count_left(self, request: Request) -> int:
        """Count the tokens of a running prompt not yet in a launched step."""
        launched = request.sequence.launched_work
        done = request.sequence.num_computed if launched is None else launched.stop
        return len(request.prompt) - done

    @staticmethod
    def _logprobs_from(request: Request) -> int | None:
        """Return the first token whose log probability we need; None if we need none any more."""
        if request.times.first_token is not None:
            return None
        return request.params.prompt_logprobs_start

    def _chunk_limit(self, request: Request, rows: int = MAX_LOGPROB_CHUNK) -> int:
        """Return the number of prompt tokens for one step with ``rows`` of logits.

        Tokens before the first needed log probability take no rows, so they do not count.
        """
        length, start = len(request.prompt), self._logprobs_from(request)
        if start is None:
            return length
        computed = length - self._count_left(request)
        return min(length, max(0, start - 1 - computed) + min(rows, MAX_LOGPROB_CHUNK))

    def _add_chunk(self, request: Request, step: _Step) -> None:
        """Add a chunk of a prompt to the step, as long as its tokens allow."""
        sequence = request.sequence
        length, left = len(request.prompt), self._count_left(request)
        wanted = min(left, self._chunk_limit(request, step.rows))
        # Nothing is left once the launched chunk ends the prompt.
        taken = step.take_tokens(request, wanted, to_end=0 < wanted == left)
        if not taken:
            return
        start = length - left
        stop = start + taken
        logprobs_from = self._logprobs_from(request)
        if logprobs_from is not None:
            logprobs_from = min(logprobs_from, length)
        # A parked request computes its prompt again, but already has token 1.
        ends = stop == length and not request.times.first_token
        samples = list(request.progress.choices) if ends else []
        sequence.launched_work = work = Work(sequence, start, stop, samples, logprobs_from)
        if logprobs_from is not None:
            step.rows -= work.num_logits
        step.works.append(work)

    def process_step(self, works: list[Work]) -> list[Work]:
        """Account for a completed step and return all works that ended a prompt."""
        completed = []
        for work in works:
            sequence, request = work.sequence, work.sequence.request
            if sequence.launched_work is work:
                sequence.launched_work = None
            if request.state.is_terminal:
                continue
            sequence.num_computed = work.stop
            self._memory.cache_tokens(sequence)
            self._memory.drop_passed(sequence)
            request.progress.logprobs += work.prompt_logprobs
            if work.stop == len(request.prompt):
                self._memory.lease_prompt(request)
                self.running.remove(request)
                completed.append(work)
        return completed
