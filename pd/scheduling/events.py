"""Events of a node: every change of its state happens in one, under one lock."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Events:
    """The lock of a node's state, and what happens at the end of each event.

    A message, a tick of the clock, a step that is planned or accounted for, an administrative
    action and a transfer's callback are events. When an event is over it settles: requests that
    ended are closed, and waiting requests go on where that is possible now.

    Attributes:
        lock: acquired without an event only to read.
        work_available: set when the step loop should look for work.
        settle: called at the end of each event, with the lock held. The node sets it before it
            starts.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.work_available = threading.Event()
        self.settle: Callable[[], None] = lambda: None
        self._depth = 0  # more than 1 where events are nested
        self._pump_wanted = False

    @contextmanager
    def event(self) -> Iterator[None]:
        """Hold the lock while something happens to the node, and settle before it is released. May
        be called by any thread. An event inside another event of the same thread is a part of it.
        """
        with self.lock:
            self._depth += 1
            try:
                yield
            finally:
                try:
                    if self._depth == 1:
                        self.settle()
                finally:
                    self._depth -= 1

    @property
    def under_way(self) -> bool:
        """Whether there is an event; the caller holds the lock."""
        return self._depth > 0

    def want_pump(self) -> None:
        """Note that something changed that waiting requests may have waited for; they are looked
        at when this event settles."""
        self._pump_wanted = True

    def take_pump(self) -> bool:
        """Whether :meth:`want_pump` was called since this was last asked."""
        wanted, self._pump_wanted = self._pump_wanted, False
        return wanted
