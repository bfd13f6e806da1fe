"""Accepts connections on the common port, and passes each to the child with the fewest."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from pd.proxy.server import BACKLOG
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from pd.proxy.workers.ledger import Ledger
    from pd.proxy.workers.process import ChildProcess

logger = logging.getLogger(__name__)

_ACCEPTS_PER_TURN = 64
_PAUSE_SECONDS = 0.1
# How often we check which connections children have taken, while some are untaken.
_RELEASE_SECONDS = 0.005
# A child whose loop has not turned for this long gets connections only if no other takes them.
STUCK_SECONDS = 5.0


class PortAcceptor:
    """Accepts connections while a child serves. Until then they wait in the kernel's queue.

    Args:
        serving: returns the children ready for connections.
        ledger: shows how many connections each child has taken and closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        serving: Callable[[], Sequence[ChildProcess]],
        ledger: Ledger,
    ) -> None:
        self._listener = listener
        self._serving = serving
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._warnings = WarningLimit(logger)
        self._accepts = self._closed = False
        # Connections not yet passed to a child.
        self._held: deque[socket.socket] = deque()
        self._releasing: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(BACKLOG)

    def update_accepting(self) -> None:
        """Start or stop accepting, depending on whether there are children."""
        accepts = bool(self._serving()) and not self._closed
        if accepts and not self._accepts:
            self._loop.add_reader(self._listener.fileno(), self._accept_some)
            if self._held:
                self._loop.call_soon(self._accept_some)
        elif self._accepts and not accepts:
            self._loop.remove_reader(self._listener.fileno())
        self._accepts = accepts

    def close(self) -> None:
        """Stop accepting, and free the port."""
        self._closed = True
        self.update_accepting()
        if self._releasing is not None:
            self._releasing.cancel()
        self._listener.close()
        while self._held:
            self._held.popleft().close()

    def take_back(self, child: ChildProcess) -> None:
        """Pass the untaken connections of an ended child to other children.

        Call this before you clear the child's row of the ledger.
        """
        untaken = child.connections.take_back(self._ledger.get_taken(child.number))
        if untaken:
            logger.info("%d connections go to other proxy processes", len(untaken))
            self._held.extend(untaken)
            self._loop.call_soon(self._accept_some)

    def count_open(self, child: ChildProcess) -> int:
        """Return the number of connections of a child, as far as it has reported them."""
        return child.connections.count - self._ledger.get_closed(child.number)

    def is_stuck(self, child: ChildProcess) -> bool:
        """Whether a child stalls. If it recovers, it keeps its connections."""
        return self._ledger.get_stall_seconds(child.number) > STUCK_SECONDS

    def _accept_some(self) -> None:
        self._release_taken()
        for _ in range(_ACCEPTS_PER_TURN):
            if not self._accepts:
                return
            if not self._held:
                try:
                    connection, _ = self._listener.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return
                except OSError as error:
                    self._warnings.log_warning(f"cannot accept connections: {error.strerror}")
                    self._pause_accepting()
                    return
                self._held.append(connection)
            if not self._hand_over(self._held[0]):
                self._warnings.log_warning("no proxy process takes connections now: they wait")
                self._pause_accepting()
                return
            self._held.popleft()
            if self._releasing is None:
                self._release_later()
        if self._held:
            self._loop.call_soon(self._accept_some)

    def _release_taken(self) -> None:
        """Close our copies of connections taken by children."""
        for child in self._serving():
            child.connections.release_taken(self._ledger.get_taken(child.number))

    def _release_later(self) -> None:
        self._releasing = self._loop.call_later(_RELEASE_SECONDS, self._release_repeatedly)

    def _release_repeatedly(self) -> None:
        self._releasing = None
        self._release_taken()
        if any(child.connections.keeps_copies for child in self._serving()):
            self._release_later()

    def _hand_over(self, connection: socket.socket) -> bool:
        """Pass a connection to the child with the fewest, preferably to one that does not stall.

        Return False if no child takes it.
        """
        children = sorted(self._serving(), key=self.count_open)
        return any(c.connections.hand_over(connection) for c in sorted(children, key=self.is_stuck))

    def _pause_accepting(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._accepts = False
        self._loop.call_later(_PAUSE_SECONDS, self.update_accepting)
