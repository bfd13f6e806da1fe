"""Wakes a thread that waits in a selector."""

from __future__ import annotations

import contextlib
import selectors
import socket


class Waker:
    """A pipe to the selector of one thread. It is registered with :meth:`drain` as data."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        selector.register(self._reader, selectors.EVENT_READ, self.drain)

    def wake(self) -> None:
        """Have the selector return. Any thread."""
        with contextlib.suppress(OSError):
            # Full: the thread wakes anyway. Closed: there is no thread.
            self._writer.send(b"\0")

    def drain(self) -> None:
        """The selector's thread: read what woke it."""
        self._reader.recv(4096)

    def close(self) -> None:
        for sock in (self._reader, self._writer):
            sock.close()
