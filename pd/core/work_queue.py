"""Work that a few threads take in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from pd.core.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Items in order, and threads that take them, which start with the first ones and then stay.
    Thread-safe.

    Args:
        name: beginning of the threads' names.
        number: threads, at most.
        work: called with one item by one of the threads; an exception that it raises is logged.
    """

    def __init__(self, name: str, number: int, work: Callable[[T], None]) -> None:
        self._name, self._work = name, work
        self._lock = threading.Lock()
        self._waiting: deque[T] = deque()
        self._executor = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._has_thread = self._closed = False

    def put(self, item: T) -> None:
        """Have a thread take an item, after those that were put before. Never blocks.

        Raises:
            UnavailableError: no thread runs and the system has no room for one, or this is closed.
                The item is not kept; the next call tries again.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("this node is stopping")
            self._waiting.append(item)
            try:
                self._executor.submit(self._take)
            except RuntimeError as error:
                # NOTE: the executor has queued the call all the same. Threads that run take it;
                # without one, the first that starts finds nothing for it.
                if not self._has_thread:
                    self._waiting.pop()
                    message = f"no thread for it can be started at present: {error}; try again"
                    raise UnavailableError(message) from error
                return
            self._has_thread = True

    def close(self) -> None:
        """Begin nothing more. Does not wait for what has begun."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _take(self) -> None:
        try:
            item = self._waiting.popleft()
        except IndexError:
            return
        try:
            self._work(item)
        except Exception:  # the thread has further work, which nobody else would do
            logger.exception("%s: some work failed", self._name)
