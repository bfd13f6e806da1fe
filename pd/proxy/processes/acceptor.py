"""Accepts connections on the common port and hands each to the child that has fewest."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from pd.core.seldom import Seldom
from pd.proxy.server import BACKLOG

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from pd.proxy.ledger import Ledger
    from pd.proxy.processes.process import ChildProcess

logger = logging.getLogger(__name__)

_ACCEPTS_PER_TURN = 64
_PAUSE_SECONDS = 0.1
# So often it is looked which connections children have taken, while any may not have been.
_RELEASE_SECONDS = 0.005
# A child whose loop did not turn for so long gets connections only where no other takes them.
STUCK_SECONDS = 5.0


class PortAcceptor:
    """Accepts while a child serves, and takes connections; until then they wait in the kernel's
    queue.

    Args:
        serving: the children that connections may go to.
        ledger: counts how many of its connections a child has taken and has seen the end of.
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
        self._seldom = Seldom(logger)
        self._accepts = self._closed = False
        # Accepted, but no child has them.
        self._held: deque[socket.socket] = deque()
        self._releasing: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(BACKLOG)

    def update(self) -> None:
        """Begin to accept, or stop, as there are children."""
        accepts = bool(self._serving()) and not self._closed
        if accepts and not self._accepts:
            self._loop.add_reader(self._listener.fileno(), self._accept)
            if self._held:
                self._loop.call_soon(self._accept)
        elif self._accepts and not accepts:
            self._loop.remove_reader(self._listener.fileno())
        self._accepts = accepts

    def close(self) -> None:
        """Accept no more, and free the port."""
        self._closed = True
        self.update()
        if self._releasing is not None:
            self._releasing.cancel()
        self._listener.close()
        while self._held:
            self._held.popleft().close()

    def take_back(self, child: ChildProcess) -> None:
        """Hand the connections that a child which has ended had not taken to other children. Call
        it before the child's row of the ledger is cleared."""
        found = child.connections.take_back(self._ledger.taken(child.number))
        if found:
            logger.info("%d connections go to other proxy processes", len(found))
            self._held.extend(found)
            self._loop.call_soon(self._accept)

    def load(self, child: ChildProcess) -> int:
        """Connections of a child, as far as it has told."""
        return child.connections.count - self._ledger.closed(child.number)

    def is_stuck(self, child: ChildProcess) -> bool:
        """Whether a child stands still. It may go on, and then has what it was given."""
        return self._ledger.stood_still(child.number) > STUCK_SECONDS

    def _accept(self) -> None:
        self._release()
        for _ in range(_ACCEPTS_PER_TURN):
            if not self._accepts:
                return
            if not self._held:
                try:
                    connection, _ = self._listener.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return
                except OSError as error:
                    self._seldom.warn(f"cannot accept connections: {error.strerror}")
                    self._pause()
                    return
                self._held.append(connection)
            if not self._hand(self._held[0]):
                self._seldom.warn("no proxy process takes connections at present: they wait")
                self._pause()
                return
            self._held.popleft()
            if self._releasing is None:
                self._release_later()
        if self._held:
            self._loop.call_soon(self._accept)

    def _release(self) -> None:
        """Keep no copies of connections that children have taken."""
        for child in self._serving():
            child.connections.release(self._ledger.taken(child.number))

    def _release_later(self) -> None:
        self._releasing = self._loop.call_later(_RELEASE_SECONDS, self._release_and_look_again)

    def _release_and_look_again(self) -> None:
        self._releasing = None
        self._release()
        if any(child.connections.keeps for child in self._serving()):
            self._release_later()

    def _hand(self, connection: socket.socket) -> bool:
        """Hand a connection to the child with the fewest that takes it, if it can to one that does
        not stand still. False if none takes it: each has not taken those before, or ended."""
        children = sorted(self._serving(), key=self.load)
        return any(c.connections.hand(connection) for c in sorted(children, key=self.is_stuck))

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._accepts = False
        self._loop.call_later(_PAUSE_SECONDS, self.update)
