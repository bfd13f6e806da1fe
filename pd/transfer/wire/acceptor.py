"""The listening socket of a backend, and connections whose greeting is incomplete."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

from pd.transfer.wire.greeting import GreetingError, IncomingGreeting
from pd.util.descriptors import limit_strangers
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.util.starvation import Patience

logger = logging.getLogger(__name__)

GREETING_SECONDS = 5.0
MAX_PENDING = 256
# These connections may use one part in so many of the process's descriptors.
_PARTS = 16


class PendingConnection:
    """An accepted connection with an incomplete greeting.

    Attributes:
        since: when we accepted it, by ``time.monotonic``.
        head: bytes of the greeting's current message.
    """

    def __init__(self, sock: socket.socket, origin: str, greeting: IncomingGreeting) -> None:
        self.sock, self.origin, self.greeting = sock, origin, greeting
        self.since = time.monotonic()
        self.head = bytearray()


class Acceptor:
    """Accepts and greets connections on the thread that owns ``selector``.

    It registers its sockets with functions as data, and the thread calls them when the sockets can
    be read. Only that thread may use anything but the constructor.

    Args:
        service: name of the backend, as connections must ask for it.
        host: address to listen on. The kernel chooses the port.
        what: name of a connection in log lines.
        accepted: called for each authenticated connection with the socket, the peer's instance id,
            and the peer's address for log lines. The socket is non-blocking and in no selector.

    Attributes:
        refused: number of connections closed for a bad or missing greeting.
    """

    def __init__(
        self,
        service: str,
        instance_id: str,
        host: str,
        key: bytes | None,
        patience: Patience,
        selector: selectors.BaseSelector,
        what: str,
        accepted: Callable[[socket.socket, str, str], None],
    ) -> None:
        self._make_greeting = partial(IncomingGreeting, service, instance_id, key)
        self._patience, self._selector = patience, selector
        self._what, self._accepted = what, accepted
        self._pending: set[PendingConnection] = set()
        self._most = limit_strangers(MAX_PENDING, _PARTS)
        self._warnings = WarningLimit(logger)
        self.refused = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self._accept_connection)

    @property
    def has_pending(self) -> bool:
        """Whether :meth:`close_overdue` has a limit to watch."""
        return bool(self._pending)

    def close_overdue(self) -> None:
        """Close connections whose greeting took too long."""
        is_over, seconds = self._patience.is_over, GREETING_SECONDS
        for pending in [p for p in self._pending if is_over(p.since, seconds)]:
            self._refuse_connection(pending, f"it did not introduce itself in {seconds:g} s")

    def close(self) -> None:
        """Stop listening and close the pending connections. Call this before you close the
        selector."""
        for pending in list(self._pending):
            self._refuse_connection(pending, "this node stopped")
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept_connection(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            self._warnings.log_warning(f"cannot accept a {self._what}: {error}")
            # Without free descriptors the socket stays readable, so do not spin on it.
            time.sleep(0.01)
            return
        sock.setblocking(False)
        pending = PendingConnection(sock, f"{address[0]}:{address[1]}", self._make_greeting())
        try:
            self._selector.register(
                sock, selectors.EVENT_READ, partial(self._read_greeting, pending)
            )
        except OSError as error:  # for example, the user may watch no more descriptors
            self._warnings.log_warning(
                f"cannot watch the {self._what} of {pending.origin}: {error}"
            )
            sock.close()
            return
        self._pending.add(pending)
        if len(self._pending) > self._most:
            oldest = min(self._pending, key=lambda p: p.since)
            self._refuse_connection(oldest, "too many connections wait for their greeting")

    def _read_greeting(self, pending: PendingConnection) -> None:
        if pending not in self._pending:
            return  # closed after the selector returned
        try:
            greeted = self._feed_greeting(pending)
        except BlockingIOError:
            return
        except (GreetingError, OSError) as error:
            self._refuse_connection(pending, str(error))
            return
        if greeted:
            self._forget_connection(pending)
            self._accepted(pending.sock, pending.greeting.peer, pending.origin)

    def _feed_greeting(self, pending: PendingConnection) -> bool:
        """Read the next part of the greeting. Return whether the greeting is complete.

        Raises:
            GreetingError: close the connection.
            OSError: it broke.
        """
        greeting, head = pending.greeting, pending.head
        data = pending.sock.recv(greeting.needs - len(head))
        if not data:
            raise GreetingError("closed by the peer")
        head += data
        if len(head) < greeting.needs:
            return False
        answer, refusal = greeting.feed_bytes(bytes(head))
        head.clear()
        # The send buffer of a new connection is empty, so it takes the whole answer.
        pending.sock.send(answer)
        if refusal:
            raise GreetingError(refusal)
        return not greeting.needs

    def _refuse_connection(self, pending: PendingConnection, reason: str) -> None:
        self.refused += 1
        self._warnings.log_warning(f"closed the {self._what} of {pending.origin}: {reason}")
        self._forget_connection(pending)
        pending.sock.close()

    def _forget_connection(self, pending: PendingConnection) -> None:
        self._pending.discard(pending)
        self._selector.unregister(pending.sock)
