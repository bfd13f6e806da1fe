"""An event loop on a thread of its own, which programs without one call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pd.core.errors import UsageError
from pd.proxy.workers.loop import new_loop

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

T = TypeVar("T")

# Aborting requests takes milliseconds, and Ctrl-C must end a batch within a second.
CANCEL_SECONDS = 0.8
# They load tokenizers.
_EXECUTOR_THREADS = 2
CLOSED = "the model is closed; make a new one"


class LoopThread:
    """Runs coroutines for other threads. Any thread may call its methods, except its own."""

    def __init__(self, name: str) -> None:
        self._loop = new_loop()
        # Reentrant, because garbage collection may close this thread anywhere.
        self._lock = threading.RLock()
        self._is_closed = False
        # Our own, because closing the loop's needs a new thread, and a program that ends has none.
        self._executor = ThreadPoolExecutor(_EXECUTOR_THREADS, thread_name_prefix=name)
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result.

        If an exception such as KeyboardInterrupt ends the wait, we cancel the coroutine and give it
        a moment to clean up. Raises UsageError if the thread is closed before the result is there.
        """
        call = _LoopCall(self._loop, work)
        try:
            self._call_soon(call.start)
        except UsageError:
            work.close()
            raise
        try:
            call.ended.wait()
        except BaseException:
            with contextlib.suppress(UsageError):  # closing cancels it, too
                self._call_soon(call.cancel)
            call.ended.wait(CANCEL_SECONDS)
            raise
        if self._is_closed and call.is_cancelled:
            raise UsageError(CLOSED)
        return call.get_result()

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of a generator that runs on the thread. Closing the iterator closes it,
        too."""
        try:
            while (item := self.run(_take_next(items))) is not None:
                yield item
        finally:
            with contextlib.suppress(UsageError):  # closing the thread closes it, too
                self.run(items.aclose())

    async def run_for_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the same as :meth:`run` for a task of another event loop."""
        with self._lock:
            if self._is_closed:
                work.close()
                raise UsageError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise UsageError(CLOSED) from None
            raise

    def close(self) -> None:
        """Cancel everything that runs on the thread, and end it. Closing again does nothing."""
        with self._lock:
            if not self._is_closed:
                # Set first, because the calls that the loop cancels ask for it.
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call_soon(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if self._is_closed:
                raise UsageError(CLOSED)
            self._loop.call_soon_threadsafe(callback)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        # Threads may wait for these.
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_SECONDS))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._executor.shutdown()
        self._loop.close()


async def _take_next(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


class _LoopCall(Generic[T]):
    """A coroutine that runs as a task of another thread's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self.ended = threading.Event()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T]

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled. Call this after the end."""
        return self._task.cancelled()

    def get_result(self) -> T:
        """Return the result after the end, or raise the error."""
        return self._task.result()

    # On the loop's thread.

    def start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(lambda _: self.ended.set())

    def cancel(self) -> None:
        self._task.cancel()
