"""The thread that calls the library of a decode node."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from pd.util.call_thread import CallThread

logger = logging.getLogger(__name__)


class Driven(Protocol):
    """Receiving side of a link, as the pump drives it."""

    def drive(self) -> float | None:
        """Do everything possible without waiting for the peer.

        Returns:
            seconds until the next call, or None if :meth:`Pump.wake` will come first.
        """

    def on_failure(self, error: Exception) -> None:
        """Handle an exception of :meth:`drive`. We do not call it again unless the owner adds the
        link again."""


class Pump:
    """Drives links in turns, and sleeps while there is nothing to do.

    Attributes:
        wake: has the thread drive all links soon.
        close: waits until nothing is driven any more.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._links: list[Driven] = []
        self._thread = CallThread(name, self._drive_links)
        self.wake, self.close = self._thread.wake, self._thread.close

    def add_link(self, link: Driven) -> None:
        with self._lock:
            self._links.append(link)
        self.wake()

    def remove_link(self, link: Driven) -> None:
        """Stop driving the link. A call may be under way."""
        with self._lock:
            if link in self._links:
                self._links.remove(link)

    def _drive_links(self) -> float | None:
        with self._lock:
            links = list(self._links)
        pauses = []
        for link in links:
            try:
                pause = link.drive()
            except Exception as error:
                # A library's error ends the link, not the thread that serves the others.
                logger.exception("a staged link failed")
                self.remove_link(link)
                link.on_failure(error)
                continue
            if pause is not None:
                pauses.append(pause)
        return min(pauses, default=None)
