"""Wakes a thread that waits for sockets."""

from __future__ import annotations

import contextlib
from socket import socketpair


class Waker:
    """A pair of sockets. The thread that is to be woken polls this object as a file, or has a
    selector watch it.

    Any thread may call :meth:`wake`, also after the end; :meth:`drain` and :meth:`close` belong to
    the thread.
    """

    def __init__(self) -> None:
        # NOTE: sockets, not a pipe: they know that they are closed, while the number of a closed
        # descriptor may belong to another file by the time a late caller writes to it.
        self._reader, self._writer = socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        # NOTE: a full buffer means that the thread will wake anyway, a closed socket that it ended.
        with contextlib.suppress(OSError):
            self._writer.send(b"x")

    def drain(self) -> None:
        """Read the bytes that woke the thread."""
        self._reader.recv(4096)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
