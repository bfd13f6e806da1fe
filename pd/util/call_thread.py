"""One thread that calls functions for others."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from pd.util.exit import STUCK_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class CallThread:
    """Calls posted functions one after the other, in the order of the posts.

    We do not use ``ThreadPoolExecutor(1)``, for three reasons. It makes a future and takes several
    locks for each call, and a transfer posts thousands per second. Its thread knows nothing but
    calls, but a link also has to check its writes from time to time. And the interpreter waits for
    it at the end, which a hanging GPU or disk could delay for ever.

    Args:
        name: name of the thread, which starts with the first post or with :meth:`start`.
        work: called after posted functions. It returns how many seconds the thread may wait for
            posts before it calls this again, or None if only a post is a reason for that.
    """

    def __init__(self, name: str, work: Callable[[], float | None] = lambda: None) -> None:
        self._name, self._work = name, work
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> None:
        """Start the thread, unless it runs. Raises RuntimeError if the system has none."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None
                    raise

    def post(self, call: Callable[[], object]) -> None:
        """Have the thread call a function. We log exceptions that it raises. Any thread may post.

        Calls do not wait for each other's results, so a function must not wait for a later one.
        """
        self._calls.put(call)
        if self._thread is None:
            self.start()

    def wake(self) -> None:
        """Have the thread do its work soon."""
        self.post(lambda: None)

    def close(self, seconds: float | None = None) -> bool:
        """End the thread after the calls posted so far.

        Args:
            seconds: wait at most this long, or without a limit.

        Returns:
            Whether the thread has ended. If not, the exit of the process will not wait for it.
        """
        thread = self._thread
        if thread is None:
            return True

        def end() -> None:
            self._closing = True

        self._calls.put(end)
        if thread is threading.current_thread():
            return False
        thread.join(seconds)
        if thread.is_alive():
            thread.name = STUCK_PREFIX + thread.name
        return not thread.is_alive()

    def _run(self) -> None:
        pause: float | None = None
        while True:
            self._call_posted(pause)
            if self._closing:
                return
            pause = self._work()

    def _call_posted(self, pause: float | None) -> None:
        """Call all posted functions. If there is none, wait for one at most this long."""
        calls = self._calls
        if pause is None or pause > 0.0:
            try:
                self._call(calls.get(timeout=pause))
            except queue.Empty:
                return
        while not self._closing and not calls.empty():
            self._call(calls.get())

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            # The thread serves other callers, too.
            logger.exception("%s: a call failed", self._name)
