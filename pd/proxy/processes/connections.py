"""Connections that the parent accepts and hands to a child.

The parent keeps a copy of each until the child has taken it, which the child notes in the ledger
before it reads anything. So what a child has not taken when it dies can be handed to another one.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
from collections import deque
from typing import TYPE_CHECKING

from pd.core.seldom import Seldom

if TYPE_CHECKING:
    from pd.proxy.ledger import Ledger

logger = logging.getLogger(__name__)

_MARK = b"\0"
# So many connections of one child are kept at most. Linux queues about as many by itself.
_MAX_KEPT = 256


class HandedConnections:
    """Receiving end, a :class:`pd.core.connections.ConnectionSource`.

    Args:
        ledger: gets the number of connections that were taken.
    """

    def __init__(self, handed: socket.socket, ledger: Ledger) -> None:
        self._socket = handed
        self._ledger = ledger
        self._seldom = Seldom(logger)
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
        # From here on the parent gives the connection to nobody else.
        self._ledger.take(self.count)
        if not descriptors:
            self._seldom.warn("a connection is lost: the process has no descriptor for it")
            raise ConnectionAbortedError
        return socket.socket(fileno=descriptors[0]), None

    def close(self) -> None:
        self._socket.close()


class HandingSocket:
    """Sending end, for one child.

    Args:
        limit: of connections that the child has not taken, as far as is known.
    """

    def __init__(self, handed: socket.socket, limit: int = _MAX_KEPT) -> None:
        self._socket = handed
        self._socket.setblocking(False)
        self._limit = limit
        # What was handed over and may not have been taken, the oldest first.
        self._kept: deque[socket.socket] = deque()
        self.count = 0

    @property
    def keeps(self) -> bool:
        """Whether copies of connections are kept."""
        return bool(self._kept)

    def hand(self, connection: socket.socket) -> bool:
        """Give the child a connection, which is kept here until :meth:`release`. False if the child
        does not take it: it is gone, or has not taken those before."""
        if len(self._kept) >= self._limit:
            return False
        try:
            socket.send_fds(self._socket, [_MARK], [connection.fileno()])
        except OSError:
            return False
        self._kept.append(connection)
        self.count += 1
        return True

    def release(self, taken: int) -> None:
        """Close the copies of connections that the child has taken, which are the first so many.
        Until then the end of such a connection does not reach its client."""
        while len(self._kept) > self.count - taken:
            self._kept.popleft().close()

    def take_back(self, taken: int) -> list[socket.socket]:
        """The connections that the child, which has ended, has not taken."""
        self.release(taken)
        found = list(self._kept)
        self._kept.clear()
        return found

    def close(self) -> None:
        """Hand over no more. What is kept can still be taken back."""
        with contextlib.suppress(OSError):
            self._socket.close()


def kept_limit(count: int) -> int:
    """Connections that the parent may keep of each of ``count`` children: no more of all together
    than half of the descriptors that it may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_KEPT
    return max(1, min(_MAX_KEPT, soft // 2 // count))
