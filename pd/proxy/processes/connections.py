"""Connections that the parent accepts and hands to a child."""

from __future__ import annotations

import contextlib
import logging
import socket

from pd.core.seldom import Seldom

log = logging.getLogger(__name__)

_MARK = b"\0"


class HandedConnections:
    """Receiving end, a :class:`pd.core.connections.ConnectionSource`."""

    def __init__(self, handed: socket.socket) -> None:
        self._socket = handed
        self._seldom = Seldom(log)
        self.count = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def listen(self, backlog: int) -> None:
        """Nothing to do: the parent listens."""

    def accept(self) -> tuple[socket.socket, object]:
        """The next connection. Raises OSError as :meth:`socket.socket.accept` does."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, len(_MARK), 1)
        if not data:  # the parent is gone; the child's link tells it, and it ends
            raise BlockingIOError
        self.count += 1
        if not descriptors:
            self._seldom.warn("a connection is lost: the process has no descriptor for it")
            raise ConnectionAbortedError
        return socket.socket(fileno=descriptors[0]), None

    def close(self) -> None:
        self._socket.close()


class HandingSocket:
    """Sending end, for one child."""

    def __init__(self, handed: socket.socket) -> None:
        self._socket = handed
        self._socket.setblocking(False)
        self.count = 0

    def hand(self, connection: socket.socket) -> bool:
        """Give the child a connection, which is closed here. False if the child does not take it:
        it is gone, or has not taken those before."""
        try:
            socket.send_fds(self._socket, [_MARK], [connection.fileno()])
        except OSError:
            return False
        connection.close()
        self.count += 1
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
