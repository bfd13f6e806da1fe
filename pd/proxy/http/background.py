"""Runs work that takes too long for the event loop on a few threads.

All clients wait for the event loop, so no client may hold it up. Work of more than half a
millisecond runs here: parsing a large body, rendering a chat template, tokenizing, or writing
thousands of log probabilities. Python code on these threads yields to the loop after the
interpreter's switch interval. A single call into C does not, so callers limit the work of each such
call.

A thread takes waiting jobs in batches and wakes the loop once for all results, because each wait
and each wake-up may cost the thread the interpreter, and a busy loop gives it back only after the
switch interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pd.core.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Work on up to this many bytes of JSON or text runs at once, unless it tokenizes.
INLINE_BYTES = 8 << 10
# Limit for tokenizing work: a byte of prose takes 0.15 us, a digit or punctuation mark 0.6.
INLINE_TEXT_BYTES = 1 << 10
# Limits on a job's bytes in the first two pools of threads. Each class of sizes has its own
# threads, because an ordinary request must not wait for a long text, nor a long text for a huge
# one.
SHORT_BYTES, LONG_BYTES = 64 << 10, 1 << 20
_THREADS = (2, 2, 1)
# Limits on a thread's batch. The last job of a batch waits at most as long as for one job of the
# largest short size. Longer jobs are taken one by one.
BATCH_JOBS = 16
BATCH_BYTES = SHORT_BYTES


class Background:
    """Runs functions for the thread of one event loop. Small ones run at once."""

    def __init__(self) -> None:
        results = _Results()
        self._short, self._long, self._huge = (
            _Pool(f"background-{name}", count, results)
            for count, name in zip(_THREADS, ("short", "long", "huge"), strict=True)
        )

    async def run(self, size: int, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)``, which works on about ``size`` bytes of JSON or text."""
        if size <= INLINE_BYTES:
            return function(*args)
        return await self.run_on_thread(size, function, *args)

    async def run_on_thread(self, size: int, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)`` on another thread, even if ``size`` is small.

        If the caller is cancelled before the call, the function is not called. Raises the
        function's exceptions, and UnavailableError after :meth:`close`.
        """
        pool = self._huge
        if size <= LONG_BYTES:
            pool = self._short if size <= SHORT_BYTES else self._long
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        pool.add_job(_Job(size, partial(function, *args), future))
        try:
            return await future
        finally:
            # The future's exception refers to this frame. We break the cycle, because otherwise
            # only a garbage collection would free both.
            del future

    def close(self) -> None:
        """Cancel waiting jobs, and start no others. Running jobs end by themselves."""
        for pool in (self._short, self._long, self._huge):
            pool.close()


class _Job(NamedTuple):
    """A function to call.

    Attributes:
        size: estimated bytes of JSON or text for the function to work on.
        future: receives the result on the event loop's thread.
    """

    size: int
    function: Callable[[], object]
    future: asyncio.Future[Any]


class _Outcome(NamedTuple):
    """The result of a job: a value or an error."""

    value: object = None
    error: BaseException | None = None


class _Results:
    """Outcomes on their way to the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[tuple[asyncio.Future[Any], _Outcome]] = []

    def add_outcome(self, future: asyncio.Future[Any], outcome: _Outcome) -> None:
        """Schedule a job's outcome for its future. May be called from any thread."""
        with self._lock:
            self._arrived.append((future, outcome))
            is_first = len(self._arrived) == 1
        if is_first:
            # One wake-up delivers all outcomes so far. If the loop is closed, nobody waits for
            # them.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(self._deliver_outcomes)

    def _deliver_outcomes(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for future, outcome in arrived:
            if future.cancelled():
                continue
            if outcome.error is None:
                future.set_result(outcome.value)
            else:
                future.set_exception(outcome.error)


class _Pool:
    """Threads that run jobs in order. They do not keep the process alive."""

    def __init__(self, name: str, count: int, results: _Results) -> None:
        self._count = count
        self._results = results
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[_Job] = deque()
        self._closed = False
        for number in range(count):
            threading.Thread(target=self._run_jobs, name=f"{name}-{number}", daemon=True).start()

    def add_job(self, job: _Job) -> None:
        """Queue a job."""
        with self._changed:
            if self._closed:
                raise UnavailableError("this proxy is stopping")
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Cancel waiting jobs, and end the threads. Call it on the event loop's thread."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for job in waiting:
            job.future.cancel()

    def _take_batch(self) -> deque[_Job]:
        """Wait for the next jobs; empty when the pool is closed."""
        batch: deque[_Job] = deque()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            # We leave the other threads their share of the waiting jobs.
            limit = min(BATCH_JOBS, -(-len(self._waiting) // self._count))
            left = BATCH_BYTES
            while len(batch) < limit and (not batch or self._waiting[0].size <= left):
                batch.append(self._waiting.popleft())
                left -= batch[-1].size
        return batch

    def _run_jobs(self) -> None:
        while batch := self._take_batch():
            while batch:
                job = batch.popleft()
                if self._closed:
                    self._results.add_outcome(job.future, _Outcome(error=asyncio.CancelledError()))
                elif not job.future.cancelled():
                    self._results.add_outcome(job.future, _call_function(job.function))
                # An error refers to this frame, too.
                del job


def _call_function(function: Callable[[], object]) -> _Outcome:
    try:
        return _Outcome(function())
    except StopIteration as error:
        # A future cannot hold a StopIteration.
        return _Outcome(error=RuntimeError(f"{error!r} was raised"))
    except BaseException as error:  # noqa: BLE001 - the caller gets any error
        return _Outcome(error=error)
