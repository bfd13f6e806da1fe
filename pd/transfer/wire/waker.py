"""Wakes a thread that waits in a selector."""

from __future__ import annotations

import contextlib
import selectors
import socket


class Waker:
    """A pair of sockets of which the selector of one thread watches the reading end, with
    :meth:`drain` as data."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        selector.register(self._reader, selectors.EVENT_READ, self.drain)

    def wake(self) -> None:
        """Have the selector return. Any thread."""
        with contextlib.suppress(OSError):
            # If the buffer is full, the thread wakes anyway; if the socket is closed, it has ended.
            self._writer.send(b"\0")

    def drain(self) -> None:
        """The selector's thread: read what woke it."""
        self._reader.recv(4096)

    def close(self) -> None:
        for sock in (self._reader, self._writer):
            sock.close()
