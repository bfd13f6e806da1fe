"""Runs work of several owners on a few threads, fairly."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from pd.core.errors import UnavailableError
from pd.util.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Gives items to a few threads and serves owners in turn. Thread-safe.

    A ``ThreadPoolExecutor`` alone would serve items in order of arrival, so the items of one owner
    could block all others. We use it for its threads only: each submitted call takes the item whose
    turn it is from a :class:`FairQueue`.

    Args:
        name: prefix of the threads' names.
        number: largest number of threads. They start with the first items.
        work: called with one item on one of the threads. We log its exceptions.
        most_of_owner: largest number of threads for one owner; all by default.
        prepare: called by each thread before its first item. All threads then start with the first
            item, because a later item should not wait for it. Must not raise.
    """

    def __init__(
        self,
        name: str,
        number: int,
        work: Callable[[T], None],
        most_of_owner: int | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._work = name, work
        self._most_of_owner = most_of_owner or number
        self._first_threads = 1 if prepare is None else number
        # Number of threads working for each owner.
        self._working: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: FairQueue[tuple[str, T]] = FairQueue()
        self._executor = ThreadPoolExecutor(number, thread_name_prefix=name, initializer=prepare)
        self._has_thread = self._closed = False

    def put(self, item: T, owner: str = "", group: Hashable = None) -> None:
        """Queue an item for the threads. Never blocks.

        Args:
            owner: the item waits for earlier items of this owner, and for the owner's turn.
            group: groups of one owner take turns, too.

        Raises:
            UnavailableError: the queue is closed, or there is no thread and we cannot start one.
                The item is dropped; the next call tries again.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("this node is stopping")
            try:
                for _ in range(1 if self._has_thread else self._first_threads):
                    self._executor.submit(self._work_until_idle)
                    self._has_thread = True
            except RuntimeError as error:
                # NOTE: the executor queued the call although it started no thread. A running thread
                # takes it; otherwise the first new thread finds no item for it.
                if not self._has_thread:
                    message = f"no thread for it can be started at present: {error}; try again"
                    raise UnavailableError(message) from error
            # NOTE: A running thread waits for the lock.
            self._waiting.put_item(owner, (owner, item), group)

    def count_waiting(self, owner: str | None = None) -> int:
        """Count the items that no thread has taken, of one owner or of all."""
        with self._lock:
            return len(self._waiting) if owner is None else self._waiting.count_items(owner)

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until all items are done. Return whether it took at most ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._working, seconds)

    def close(self) -> None:
        """Start no more items. This does not wait for running ones."""
        with self._lock:
            self._closed = True
            self._waiting = FairQueue()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _work_until_idle(self) -> None:
        """Work until no item is left for this thread."""
        while (next_one := self._take_item()) is not None:
            owner, item = next_one
            try:
                self._work(item)
            except Exception:  # the thread has to go on with the items of others
                logger.exception("%s: some work failed", self._name)
            finally:
                with self._lock:
                    self._working[owner] -= 1
                    if not self._working[owner]:
                        del self._working[owner]
                    self._changed.notify_all()

    def _take_item(self) -> tuple[str, T] | None:
        with self._lock:
            busy = [owner for owner, count in self._working.items() if count >= self._most_of_owner]
            try:
                owner, item = self._waiting.take_item(busy)
            except KeyError:
                return None
            self._working[owner] += 1
            return owner, item
