"""Events of a node. Every change of its state happens inside one, under one lock."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Events:
    """Owns the lock of a node's state, and settles the node after each event.

    Messages, clock ticks, planning and accounting of steps, administrative actions and transfer
    callbacks are events. When an event settles, the node closes ended requests, and lets waiting
    requests continue if they can.

    Attributes:
        lock: without an event, acquire it only to read.
        work_available: set when the step loop should check for work.
        settle: called at the end of each event with the lock held. The node sets it before it
            starts.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.work_available = threading.Event()
        self.settle: Callable[[], None] = lambda: None
        self._depth = 0  # more than 1 where events are nested
        self._reservations_wanted = False

    @contextmanager
    def event(self) -> Iterator[None]:
        """Hold the lock during an event, and settle before releasing it.

        Any thread may call this. If a thread nests events, only the outermost one settles.
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
    def is_under_way(self) -> bool:
        """Whether the caller, who holds the lock, is inside an event."""
        return self._depth > 0

    def want_reservations(self) -> None:
        """Ask the receiving end to reserve pages for waiting requests when this event settles."""
        self._reservations_wanted = True

    def take_reservation_wish(self) -> bool:
        """Return whether :meth:`want_reservations` was called, and reset it."""
        wanted, self._reservations_wanted = self._reservations_wanted, False
        return wanted
