"""Passes connections from the parent to its children.

The parent keeps a copy of each connection until the child has taken it. The child records this in
the ledger before it reads anything. If it dies, its untaken connections can go to another child.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING

from pd.util.descriptors import file_limit
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from pd.proxy.workers.ledger import Ledger

logger = logging.getLogger(__name__)

_MARK = b"\0"
# Limit of copies per child. Linux queues about as many by itself.
_MAX_KEPT = 256


class HandedConnections:
    """The receiving end, a :class:`pd.net.connections.ConnectionSource`.

    Args:
        ledger: records how many connections we took.
    """

    def __init__(self, handed: socket.socket, ledger: Ledger) -> None:
        self._socket = handed
        self._ledger = ledger
        self._warnings = WarningLimit(logger)
        self.count = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def listen(self, backlog: int) -> None:
        """Do nothing, because the parent listens."""

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next connection. Raises OSError as :meth:`socket.socket.accept` does."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, len(_MARK), 1)
        if not data:  # the parent is gone, which also closed the link, so this child ends
            raise BlockingIOError
        self.count += 1
        # From here on, the parent gives the connection to nobody else.
        self._ledger.note_taken(self.count)
        if not descriptors:
            self._warnings.log_warning("a connection is lost: the process has no descriptor for it")
            raise ConnectionAbortedError
        return socket.socket(fileno=descriptors[0]), None

    def close(self) -> None:
        self._socket.close()


class HandingSocket:
    """The sending end for one child.

    Args:
        limit: maximum number of connections the child may not have taken.
    """

    def __init__(self, handed: socket.socket, limit: int = _MAX_KEPT) -> None:
        self._socket = handed
        self._socket.setblocking(False)
        self._limit = limit
        # Connections possibly not taken by the child, oldest first.
        self._kept: deque[socket.socket] = deque()
        self.count = 0

    @property
    def keeps_copies(self) -> bool:
        """Whether we keep copies of connections."""
        return bool(self._kept)

    def hand_over(self, connection: socket.socket) -> bool:
        """Pass a connection to the child, and keep a copy until :meth:`release_taken`.

        Return False if the child is gone, or has too many untaken connections.
        """
        if len(self._kept) >= self._limit:
            return False
        try:
            socket.send_fds(self._socket, [_MARK], [connection.fileno()])
        except OSError:
            return False
        self._kept.append(connection)
        self.count += 1
        return True

    def release_taken(self, taken: int) -> None:
        """Close our copies of the first ``taken`` connections, because the child has them. Without
        this, a client would not notice the end of its connection."""
        while len(self._kept) > self.count - taken:
            self._kept.popleft().close()

    def take_back(self, taken: int) -> list[socket.socket]:
        """Return the untaken connections of an ended child."""
        self.release_taken(taken)
        untaken = list(self._kept)
        self._kept.clear()
        return untaken

    def close(self) -> None:
        """Stop passing connections. You can still take back connections."""
        with contextlib.suppress(OSError):
            self._socket.close()


def get_kept_limit(count: int) -> int:
    """Return how many connections the parent may keep for each of ``count`` children.

    Together they use at most half of its descriptors.
    """
    return max(1, min(_MAX_KEPT, file_limit() // 2 // count))
