"""HTTP servers that clients cannot exhaust: limits on the number of connections.

We accept connections here, up to a limit, because asyncio's listener retries and logs thousands of
times when no descriptor is left. :class:`GuardedProtocol` ends connections that send no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import time
from collections import defaultdict
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, cast

import uvicorn

from pd.core.errors import QueueFullError, UnavailableError
from pd.net.guarded_protocol import FULL, GuardedProtocol, render_refusal
from pd.net.tls import TlsTransport
from pd.net.turns import Turns
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Iterator

    from pd.net.connection_limits import ConnectionLimits

logger = logging.getLogger(__name__)

# Part of the connections that requests of one owner may use.
OWNER_SHARE = 0.75
GAVE_WAY = "too many connections, and the body of this request did not arrive; send it again"

_TICKS_PER_SWEEP = 5  # a tick is a tenth of a second
_ACCEPTS_PER_TURN = 64
_PAUSE_SECONDS = 0.1
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionSource(Protocol):
    """A listening socket, or an object with the same methods."""

    def fileno(self) -> int: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def listen(self, backlog: int, /) -> None: ...

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next connection. Raises OSError as a socket does."""

    def close(self) -> None: ...


class Listener:
    """Accepts connections on one socket and knows which of them have a request.

    Use it on the event loop's thread only.
    """

    def __init__(
        self,
        sock: ConnectionSource,
        limits: ConnectionLimits,
        make_protocol: Callable[[Listener], asyncio.Protocol],
        *,
        is_encrypted: bool = False,
    ) -> None:
        """``is_encrypted``: refused clients could not read a plain answer, so we send none."""
        self.limits = limits
        self._is_encrypted = is_encrypted
        self._socket = sock
        self._make_protocol = partial(make_protocol, self)
        self._loop = asyncio.get_running_loop()
        self._warnings = WarningLimit(logger)
        # Accepted connections whose protocol has not started.
        self._connecting: set[asyncio.Task[None]] = set()
        self._open: set[GuardedProtocol] = set()
        # Connections without a request and since when, the oldest first. `_new` ones never had a
        # request, `_idle` ones have had an answer.
        self._new: dict[GuardedProtocol, float] = {}
        self._idle: dict[GuardedProtocol, float] = {}
        # Connections with a request, by owner.
        self._asking: dict[str, set[GuardedProtocol]] = defaultdict(set)
        # Of these, connections still sending a body, and since when they have been silent; the
        # longest silent first.
        self._bodies: dict[str, dict[GuardedProtocol, float]] = defaultdict(dict)
        # When no descriptor is left we close this one for a moment, to refuse a client.
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._closed = False
        sock.setblocking(False)
        self._resume_accepting()

    @property
    def connections(self) -> int:
        return len(self._open) + len(self._connecting)

    def add_connection(self, connection: GuardedProtocol) -> None:
        self._open.add(connection)
        self._new[connection] = time.monotonic()

    def on_request(self, connection: GuardedProtocol) -> None:
        if connection not in self._open:
            return
        self._unlist(connection)
        self._asking[connection.owner].add(connection)
        self.on_body_part(connection)

    def on_body_part(self, connection: GuardedProtocol) -> None:
        bodies = self._bodies[connection.owner]
        bodies.pop(connection, None)
        bodies[connection] = time.monotonic()

    def on_request_complete(self, connection: GuardedProtocol) -> None:
        self._bodies[connection.owner].pop(connection, None)

    def assign_owner(self, connection: GuardedProtocol, owner: str) -> None:
        if connection not in self._open:
            return  # it ended before its request began
        silent_since = self._bodies[connection.owner].get(connection)
        self._unlist(connection)
        connection.owner = owner
        self._asking[owner].add(connection)
        if silent_since is not None:
            self._bodies[owner][connection] = silent_since
        share = int(self.limits.connections * OWNER_SHARE)
        exceeds = owner and len(self._asking[owner]) > share
        if exceeds and not self._close_silent(owner):
            raise QueueFullError(
                f"requests of this API key: {len(self._asking[owner])} (limit {share}); wait for "
                "answers to earlier ones"
            )
        asking = len(self._open) - len(self._new) - len(self._idle)
        is_full = asking > self.limits.connections
        if is_full and not (self._close_silent(*self._bodies) or self._close_other(owner)):
            raise UnavailableError(FULL)

    def on_idle(self, connection: GuardedProtocol) -> None:
        self._unlist(connection)
        self._idle[connection] = time.monotonic()

    def remove_connection(self, connection: GuardedProtocol) -> None:
        self._open.discard(connection)
        self._unlist(connection)

    def _unlist(self, connection: GuardedProtocol) -> None:
        """Remove a connection from all lists except `_open`."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        self._asking[connection.owner].discard(connection)
        self._bodies[connection.owner].pop(connection, None)

    def end_late(self) -> None:
        """End late connections."""
        now = time.monotonic()
        for connection in list(self._open):
            connection.end_if_late(now)
        self._bound_unread()

    def _bound_unread(self) -> None:
        """Close the clients that have not read for longest, until unread answers fit the limit."""
        unread = [(c.unread_since, c) for c in self._open if c.unread_since is not None]
        excess = sum(c.unread_bytes for _, c in unread) - self.limits.unread_bytes
        for _, connection in sorted(unread, key=itemgetter(0)):
            if excess <= 0:
                return
            excess -= connection.unread_bytes
            connection.give_way()
            self._warnings.log_warning(
                f"unread answers exceed {self.limits.unread_bytes} bytes: closing the clients that "
                "have not read for longest"
            )

    def close(self) -> None:
        """Accept no more connections."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._close_spare()

    async def wait_closed(self) -> None:
        """Do nothing: uvicorn calls this after :meth:`close`."""

    def _resume_accepting(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept_ready)

    def _accept_ready(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._connecting and self.connections >= self.limits.connections:
                return  # connections being set up may give way in the next turn
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # The network may also have ended a connection before we accepted it.
                self._warnings.log_warning(f"cannot accept connections: {error.strerror}")
                if error.errno not in _NO_DESCRIPTORS or not self._refuse_with_spare():
                    self._loop.remove_reader(self._socket)
                    self._loop.call_later(_PAUSE_SECONDS, self._resume_accepting)
                    return
                continue
            connection.setblocking(False)
            if self._make_room():
                connecting = self._loop.create_task(self._connect(connection))
                self._connecting.add(connecting)
                connecting.add_done_callback(self._connecting.discard)
            else:
                self._turn_away(connection)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:  # the client has closed it
            connection.close()
            logger.debug("a connection ended at once: %s", error)

    def _make_room(self) -> bool:
        """Return whether we may hold another connection. Closes an idle one if necessary."""
        if self.connections < self.limits.connections:
            return True
        late = time.monotonic() - self.limits.silent_seconds
        oldest = next(iter(self._new), None)
        if oldest is not None and self._new[oldest] <= late:
            return self._close_idle(oldest)
        if self._idle:
            return self._close_idle(next(iter(self._idle)))
        if self._close_silent(*self._bodies):
            return True
        if self.connections < self.limits.connections + self.limits.reserved:
            return True
        return oldest is not None and self._close_idle(oldest)

    def _close_idle(self, connection: GuardedProtocol) -> bool:
        """Close a connection without a request, and return True."""
        self._warnings.log_warning(
            f"{self.connections} connections: closing the oldest without a request"
        )
        self.remove_connection(connection)
        connection.give_way()
        return True

    def _close_silent(self, *owners: str) -> bool:
        """Close the owners' connection whose body has been silent for longest, if that is too long.

        Returns:
            Whether there was one.
        """
        firsts = (next(iter(self._bodies[o].items())) for o in owners if self._bodies[o])
        longest, since = min(firsts, key=itemgetter(1), default=(None, math.inf))
        if longest is None or since > time.monotonic() - self.limits.silent_seconds:
            return False
        self._close_body(longest)
        return True

    def _close_other(self, owner: str) -> bool:
        """Close an unfinished request for one of ``owner``.

        The owner with most requests loses it, if these are more than the requests of ``owner``.

        Returns:
            Whether there was one.
        """
        counts = {name: len(self._asking[name]) for name, bodies in self._bodies.items() if bodies}
        largest = max(counts, key=counts.__getitem__, default=owner)
        if largest == owner or counts[largest] <= len(self._asking[owner]):
            return False
        self._close_body(next(iter(self._bodies[largest])))
        return True

    def _close_body(self, connection: GuardedProtocol) -> None:
        self._warnings.log_warning(
            f"{self.connections} connections: closing one with an unfinished request"
        )
        self.remove_connection(connection)
        connection.refuse_request(503, "Service Unavailable", GAVE_WAY)

    def _turn_away(self, connection: socket.socket) -> None:
        self._warnings.log_warning(f"{self.connections} connections have requests: refusing others")
        if not self._is_encrypted:
            with contextlib.suppress(OSError):  # the client is gone or does not read
                connection.send(render_refusal(503, "Service Unavailable", FULL))
        connection.close()

    def _refuse_with_spare(self) -> bool:
        """Accept the next connection with the spare descriptor and refuse it.

        Returns:
            Whether that worked.
        """
        self._close_spare()
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return False
        else:
            self._turn_away(connection)
            return True
        finally:
            with contextlib.suppress(OSError):  # another thread took it: we try again next time
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


class GuardedServer(uvicorn.Server):
    """uvicorn with limits on connections.

    It installs no signal handlers, because the command that runs the process handles signals.

    Attributes:
        listeners: one per socket, after the start.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ConnectionLimits,
        tls: Callable[[], ssl.SSLContext] | None = None,
        *,
        has_owners: bool = False,
    ) -> None:
        """
        Args:
            config: uvicorn's settings, with the application.
            limits: for each of the sockets.
            tls: returns the context for a new connection; None: no encryption.
            has_owners: the application calls :meth:`GuardedProtocol.assign_owner` for each request
                outside the open paths. Otherwise all requests have the same owner.
        """
        super().__init__(config)
        self._has_owners = has_owners
        self._limits = limits
        self._tls = tls
        self._turns = Turns()
        self.listeners: list[Listener] = []
        # Otherwise uvicorn would hand connections to a WebSocket library if one is installed.
        config.ws = "none"
        config.timeout_keep_alive = limits.keep_alive_seconds

    async def serve_from(self, source: ConnectionSource) -> None:
        """Serve connections of one source until ``should_exit``."""
        await self.serve([cast("socket.socket", source)])

    @property
    def connections(self) -> int:
        return sum(listener.connections for listener in self.listeners)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        for sock in sockets or []:
            sock.listen(self.config.backlog)
            self.listeners.append(
                Listener(
                    sock,
                    self._limits,
                    self._make_protocol,
                    is_encrypted=self._tls is not None,
                )
            )
        self.servers = self.listeners  # type: ignore[assignment]  # uvicorn closes them at its end
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SWEEP == 0:
            for listener in self.listeners:
                listener.end_late()
        return await super().on_tick(counter)

    def _make_protocol(self, listener: Listener) -> asyncio.Protocol:
        protocol = GuardedProtocol(
            listener,
            self._turns,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            has_owners=self._has_owners,
        )
        return protocol if self._tls is None else TlsTransport(self._turns, self._tls(), protocol)
