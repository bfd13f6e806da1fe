"""Wakes a thread polling sockets."""

from __future__ import annotations

import contextlib
from socket import socketpair


class Waker:
    """Wakes a thread polling this object, directly or with a selector.

    Any thread may call :meth:`wake_poll`, even after :meth:`close`. Only the woken thread may call
    :meth:`drain` and :meth:`close`.
    """

    def __init__(self) -> None:
        # NOTE: we use sockets instead of a pipe because a closed socket object refuses to write. A
        # late caller could write to another file if its descriptor number was reused.
        self._reader, self._writer = socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake_poll(self) -> None:
        # NOTE: if the buffer is full, the thread wakes anyway; if the socket is closed, it ended.
        with contextlib.suppress(OSError):
            self._writer.send(b"x")

    def drain(self) -> None:
        """Read the waking bytes, so the next poll can wait again."""
        self._reader.recv(4096)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
