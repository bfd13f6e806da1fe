"""The thread that calls the library of a decode node."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

logger = logging.getLogger(__name__)

_NAP = 300e-6


class Driven(Protocol):
    """Receiving side of a link, as the pump drives it."""

    def drive(self) -> float | None:
        """Do what can be done without waiting for the peer. Returns in how many seconds to call
        again, or None if :meth:`Pump.wake` will be called first."""

    def failed(self, error: Exception) -> None:
        """:meth:`drive` raised; it will not be called before the owner adds the link again."""


class Pump:
    """Drives links in turns; sleeps while there is nothing to do."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._links: list[Driven] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def add(self, link: Driven) -> None:
        with self._lock:
            self._links.append(link)
            if not self._started:
                self._started = True
                self._thread.start()
        self._news.set()

    def remove(self, link: Driven) -> None:
        """Do not drive the link any more; a call may be under way."""
        with self._lock:
            if link in self._links:
                self._links.remove(link)

    def wake(self) -> None:
        self._news.set()

    def close(self) -> None:
        """Returns when nothing is driven any more."""
        self._closing = True
        self._news.set()
        if self._started and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._news.clear()
            with self._lock:
                links = list(self._links)
            pause = self._drive(links)
            if pause is None:
                self._news.wait()
            elif pause > _NAP:
                self._news.wait(pause)
            elif pause > 0.0 and not self._news.is_set():
                # An event costs more than the delay that this causes.
                time.sleep(pause)

    def _drive(self, links: list[Driven]) -> float | None:
        pauses = []
        for link in links:
            try:
                pause = link.drive()
            except Exception as error:
                # A library's error ends the link, not the thread that serves the others.
                logger.exception("a staged link failed")
                self.remove(link)
                link.failed(error)
                continue
            if pause is not None:
                pauses.append(pause)
        return min(pauses, default=None)
