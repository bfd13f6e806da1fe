"""The listening socket of a backend, and connections whose greeting is not complete."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

from pd.core.seldom import Seldom
from pd.transfer.wire.greeting import GreetingError, IncomingGreeting

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.starvation import Patience

logger = logging.getLogger(__name__)

GREETING_SECONDS = 5.0
MAX_PENDING = 256


class PendingConnection:
    """An accepted connection whose greeting is not complete.

    Attributes:
        since: when it was accepted, by ``time.monotonic``.
        head: bytes of the current message of the greeting.
    """

    def __init__(self, sock: socket.socket, origin: str, greeting: IncomingGreeting) -> None:
        self.sock, self.origin, self.greeting = sock, origin, greeting
        self.since = time.monotonic()
        self.head = bytearray()


class Acceptor:
    """Accepts and greets connections on the thread that owns ``selector``.

    Its sockets are registered in the selector with functions as data, which the thread calls when
    they can be read. Everything but the constructor is for that thread.

    Args:
        service: name of the backend, which connections must ask for.
        host: address to listen on; the kernel chooses the port.
        what: a connection's name in log lines.
        accepted: called with each connection that proved itself, which is not blocking and in no
            selector, the peer's instance id, and the peer's address for log lines.

    Attributes:
        refused: connections closed for their greeting, or for want of one.
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
        self._seldom = Seldom(logger)
        self.refused = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def pending(self) -> bool:
        """Whether :meth:`sweep` has a limit to watch."""
        return bool(self._pending)

    def sweep(self) -> None:
        """Close connections that have taken too long over their greeting."""
        is_over, seconds = self._patience.is_over, GREETING_SECONDS
        for pending in [p for p in self._pending if is_over(p.since, seconds)]:
            self._refuse(pending, f"it did not introduce itself in {seconds:g} s")

    def close(self) -> None:
        """Stop listening and close the pending connections; before the selector is closed."""
        for pending in list(self._pending):
            self._refuse(pending, "this node stopped")
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            self._seldom.warn(f"cannot accept a {self._what}: {error}")
            # Out of file descriptors: the socket stays readable, so do not spin on it.
            time.sleep(0.01)
            return
        sock.setblocking(False)
        pending = PendingConnection(sock, f"{address[0]}:{address[1]}", self._make_greeting())
        try:
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read, pending))
        except OSError as error:  # for example, the user may watch no more descriptors
            self._seldom.warn(f"cannot watch the {self._what} of {pending.origin}: {error}")
            sock.close()
            return
        self._pending.add(pending)
        if len(self._pending) > MAX_PENDING:
            oldest = min(self._pending, key=lambda p: p.since)
            self._refuse(oldest, "too many connections wait for their greeting")

    def _read(self, pending: PendingConnection) -> None:
        if pending not in self._pending:
            return  # closed since the selector returned
        try:
            greeted = self._greet(pending)
        except BlockingIOError:
            return
        except (GreetingError, OSError) as error:
            self._refuse(pending, str(error))
            return
        if greeted:
            self._forget(pending)
            self._accepted(pending.sock, pending.greeting.peer, pending.origin)

    def _greet(self, pending: PendingConnection) -> bool:
        """Read what has arrived of the greeting; whether it is complete.

        Raises:
            GreetingError: the connection is to be closed.
            OSError: it broke.
        """
        greeting, head = pending.greeting, pending.head
        data = pending.sock.recv(greeting.needs - len(head))
        if not data:
            raise GreetingError("closed by the peer")
        head += data
        if len(head) < greeting.needs:
            return False
        answer, refusal = greeting.feed(bytes(head))
        head.clear()
        # A fresh connection's send buffer is empty, so this cannot come up short.
        pending.sock.send(answer)
        if refusal:
            raise GreetingError(refusal)
        return not greeting.needs

    def _refuse(self, pending: PendingConnection, reason: str) -> None:
        self.refused += 1
        self._seldom.warn(f"closed the {self._what} of {pending.origin}: {reason}")
        self._forget(pending)
        pending.sock.close()

    def _forget(self, pending: PendingConnection) -> None:
        self._pending.discard(pending)
        self._selector.unregister(pending.sock)
