"""Threads that advance rules over outputs and fill masks while steps go on."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import UnavailableError
from pd.engine.quick_masks import MaskRequest, fill_quickly
from pd.engine.ruled_choice import PROOFS
from pd.util.warning_limit import WarningLimit
from pd.util.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.engine.ruled_choice import RuledChoice

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

# How long a step waits for the masks of other threads, and the extra time for each row. Rows
# without a mask by then sit out the step.
WAIT_SECONDS, _ROW_SECONDS = 0.05, 1e-3
# How long we remember the owner of a slow choice. New choices of that owner count as slow until
# proven quick.
_SUSPECT_SECONDS = 60.0
# Threads for the masks of steps. One is enough as long as none is late.
_QUICK_THREADS = 32
# Threads for slow choices in total, and for each owner.
_SLOW_THREADS, _SLOW_THREADS_OF_OWNER = 6, 2


class RuleLanes:
    """Fills the masks of steps.

    The calling thread handles trusted choices itself. Each owner's other choices go to one thread
    per step. Slow choices get their own threads, which take turns between owners and between their
    requests, and steps go on without them. The thread that launches steps calls the methods, unless
    noted.

    Args:
        vocab_size: number of tokens in a mask.
    """

    def __init__(self, vocab_size: int) -> None:
        self._mask_size = -(-vocab_size // 32)
        self._quick: WorkQueue[_MaskJob] = WorkQueue("masks", _QUICK_THREADS, _MaskJob.run)
        self._slow: WorkQueue[RuledChoice] = WorkQueue(
            "slow-masks", _SLOW_THREADS, self._run_slow, _SLOW_THREADS_OF_OWNER
        )
        self._suspects: dict[str, float] = {}
        self._on_ready: Callable[[], None] = lambda: None
        self._no_threads = WarningLimit(logger)

    def set_ready_callback(self, inform: Callable[[], None]) -> None:
        """Set a callback for choices that become ready while no step waits for them. It may run in
        any thread."""
        self._on_ready = inform

    def close(self) -> None:
        """Start no more work."""
        self._quick.close()
        self._slow.close()

    def fill_masks(self, requests: Sequence[MaskRequest], masks: IntArray) -> bool:
        """Fill the masks of a step as far as time allows. The other choices are late.

        Args:
            masks: ``[rows, ...]``. All bits must be set in the rows of choices with several masks.

        Returns:
            Whether everything is done. Otherwise threads still write to ``masks``.
        """
        trusted, others = list[MaskRequest](), list[MaskRequest]()
        for request in requests:
            choice = request.choice
            if not choice.has_followed and self._is_suspect(choice.budget.owner):
                choice.mark_untrusted(PROOFS)
                choice.is_late = True
            else:
                (trusted if choice.is_trusted else others).append(request)
        jobs = self._start_jobs(others, masks)
        left = fill_quickly(trusted, masks, self.remember_slow)
        if not (jobs or left):
            return True
        jobs += self._start_jobs(left, masks)
        rows = sum(request.num_rows for request in (*others, *left))
        until = time.monotonic() + WAIT_SECONDS + _ROW_SECONDS * rows
        return not sum(job.give_up(until) for job in jobs)

    def submit_slow(self, choice: RuledChoice) -> None:
        """Hand a slow choice to its own thread."""
        choice.is_busy = True
        try:
            self._slow.put(choice, choice.budget.owner, id(choice.budget))
        except UnavailableError as error:
            choice.is_busy = False  # the next step requests again
            self._no_threads.log_warning(f"no mask can be filled at present: {error}")

    def _start_jobs(self, requests: Sequence[MaskRequest], masks: IntArray) -> list[_MaskJob]:
        by_owner: defaultdict[str, list[MaskRequest]] = defaultdict(list)
        for request in requests:
            by_owner[request.choice.budget.owner].append(request)
        jobs = list[_MaskJob]()
        for group in by_owner.values():
            job = _MaskJob(self, group, masks)
            try:
                self._quick.put(job)
                jobs.append(job)
            except UnavailableError as error:
                for request in group:
                    request.choice.is_late = True
                self._no_threads.log_warning(f"no masks can be filled at present: {error}")
        return jobs

    def _run_slow(self, choice: RuledChoice) -> None:
        choice.is_slow = False  # it shows whether it still is
        choice.follow_output()
        if choice.error is None and not choice.forced and not choice.has_ended:
            mask = np.full(self._mask_size, -1, np.int32)
            choice.fill_masks(mask[None])
            choice.mask = mask
        self.remember_slow(choice)
        choice.is_busy = False
        self._on_ready()

    def remember_slow(self, choice: RuledChoice) -> None:
        """Remember the owner of a choice if it is slow. Any thread may call this."""
        if choice.is_slow:
            self._suspects[choice.budget.owner] = time.monotonic()

    def _is_suspect(self, owner: str) -> bool:
        since = self._suspects.get(owner)
        if since is None:
            return False
        if time.monotonic() - since < _SUSPECT_SECONDS:
            return True
        self._suspects.pop(owner, None)
        return False

    def notify_ready(self) -> None:
        """Report that a choice is ready. Any thread may call this."""
        self._on_ready()


class _MaskJob:
    """Choices of one owner whose masks a step needs."""

    def __init__(self, lanes: RuleLanes, requests: list[MaskRequest], masks: IntArray) -> None:
        self._lanes, self.requests, self._masks = lanes, requests, masks
        self._lock = threading.Lock()
        self._left = set(range(len(requests)))
        self._over = threading.Event()

    def give_up(self, until: float) -> bool:
        """Wait until the given time. The remaining choices are late; returns whether there are
        any."""
        if self._over.wait(max(0.0, until - time.monotonic())):
            return False
        with self._lock:
            for number in self._left:
                choice = self.requests[number].choice
                choice.is_late = choice.is_busy = True
            return bool(self._left)

    def run(self) -> None:
        """Handle the choices, in one of the lanes' threads."""
        for number, request in enumerate(self.requests):
            choice = request.choice
            choice.follow_output()
            if choice.error is not None or choice.forced:
                choice.is_late = True  # nothing is drawn for it
            else:
                choice.fill_masks(request.select_rows(self._masks), request.tree, request.guesses)
            self._finish_choice(number)
            if choice.is_slow:
                self._lanes.remember_slow(choice)
                self._skip_choices(range(number + 1, len(self.requests)))
                return

    def _skip_choices(self, numbers: range) -> None:
        """Choices after a slow one need not wait for it: they are slow until they are known by
        themselves."""
        for number in numbers:
            choice = self.requests[number].choice
            choice.is_slow = choice.is_late = True
            self._finish_choice(number, has_mask=False)

    def _finish_choice(self, number: int, *, has_mask: bool = True) -> None:
        """Record that a choice is done. If its step has given up on it, the choice keeps the
        mask."""
        request = self.requests[number]
        choice = request.choice
        has_mask = has_mask and request.tree is None and choice.error is None and not choice.forced
        with self._lock:
            self._left.discard(number)
            is_late = choice.is_busy
            if is_late and has_mask:
                choice.mask = self._masks[request.row].copy()
            choice.is_busy = False
            if not self._left:
                self._over.set()
        if is_late:
            self._lanes.notify_ready()
