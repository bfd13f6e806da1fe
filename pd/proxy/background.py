"""Work that takes too long for the event loop, on few threads.

Everybody waits for the event loop, so one client must not hold it up. What costs more than half a
millisecond (parsing a large body, rendering a chat template, tokenizing, writing down thousands of
log probabilities) runs here. Python code on these threads gives way to the loop after the
interpreter's switch interval; a single call into C does not, so callers bound what one such call
gets.

A thread takes what waits in batches, and the loop is woken once for all results that it has not
fetched yet. A thread that waits for work or wakes the loop may give the interpreter away, which a
busy loop gives back only after the switch interval.
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

# Work on up to so many bytes of JSON or text is done at once, if they are not tokenized.
INLINE_BYTES = 8 << 10
# Text that is tokenized is so only up to this number: a byte of prose takes 0.15 us, one of digits
# or punctuation marks 0.6.
INLINE_TEXT_BYTES = 1 << 10
# Bytes of the work of each pool of threads at most, but for the last one: a client with an ordinary
# request does not wait for one with a long text, nor that one seconds for one with a huge one.
SHORT_BYTES, LONG_BYTES = 64 << 10, 1 << 20
_THREADS = (2, 2, 1)
# Jobs that a thread takes at a time, and their bytes unless the first has more. The last job of a
# batch waits no longer than behind one job of the short ones' greatest size; longer ones are taken
# one by one.
BATCH_JOBS = 16
BATCH_BYTES = SHORT_BYTES


class Background:
    """Runs functions, small ones at once. For the thread of one event loop."""

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
        """Call ``function(*args)`` on another thread, however small ``size`` is.

        If the caller is cancelled before that begins, the function is not called. Raises what it
        raises, and UnavailableError after :meth:`close`.
        """
        pool = self._huge
        if size <= LONG_BYTES:
            pool = self._short if size <= SHORT_BYTES else self._long
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        pool.put(_Job(size, partial(function, *args), future))
        try:
            return await future
        finally:
            # An exception that the future has refers to this frame: together, only a garbage
            # collection would free them.
            del future

    def close(self) -> None:
        """Begin nothing more, and cancel what waits; what runs ends by itself."""
        for pool in (self._short, self._long, self._huge):
            pool.close()


class _Job(NamedTuple):
    """A function to be called.

    Attributes:
        size: bytes of JSON or text that it works on, about.
        future: gets the result, on the event loop's thread.
    """

    size: int
    function: Callable[[], object]
    future: asyncio.Future[Any]


class _Outcome(NamedTuple):
    """The end of a job: a value, or an error."""

    value: object = None
    error: BaseException | None = None


class _Results:
    """Outcomes on their way to the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[tuple[asyncio.Future[Any], _Outcome]] = []

    def put(self, future: asyncio.Future[Any], outcome: _Outcome) -> None:
        """Give a job's future its outcome soon. From any thread."""
        with self._lock:
            self._arrived.append((future, outcome))
            is_first = len(self._arrived) == 1
        if is_first:
            # The others come with the same wake-up. Nobody waits where the loop is closed.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
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
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def put(self, job: _Job) -> None:
        """Have a thread run a job, after those that were put before."""
        with self._changed:
            if self._closed:
                raise UnavailableError("this proxy is stopping")
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Cancel what has not begun, and end the threads. For the event loop's thread."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for job in waiting:
            job.future.cancel()

    def _work(self) -> None:
        while batch := self._take():
            self._run(batch)

    def _take(self) -> deque[_Job]:
        """The next jobs; none when the pool is closed."""
        batch: deque[_Job] = deque()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            # Other threads have their share of what waits.
            most = min(BATCH_JOBS, -(-len(self._waiting) // self._count))
            left = BATCH_BYTES
            while len(batch) < most and (not batch or self._waiting[0].size <= left):
                batch.append(self._waiting.popleft())
                left -= batch[-1].size
        return batch

    def _run(self, batch: deque[_Job]) -> None:
        while batch:
            job = batch.popleft()
            if self._closed:
                self._results.put(job.future, _Outcome(error=asyncio.CancelledError()))
            elif not job.future.cancelled():
                self._results.put(job.future, _call(job.function))
            # An error refers to this frame, too.
            del job


def _call(function: Callable[[], object]) -> _Outcome:
    try:
        return _Outcome(function())
    except StopIteration as error:
        # No future takes it.
        return _Outcome(error=RuntimeError(f"{error!r} was raised"))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
        return _Outcome(error=error)
