"""HTTP servers that clients cannot exhaust: limits on the number of connections.

asyncio's listener, when no descriptor is left, tries thousands of times at once and logs each.
Connections are therefore accepted here, up to a cap, and :class:`GuardedProtocol` ends those that
ask nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import time
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, cast

import uvicorn

from pd.core.guarded_protocol import FULL, GuardedProtocol, refusal
from pd.core.seldom import Seldom
from pd.core.tls import Handshakes, TlsTransport

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

# Paths of a proxy that load balancers and Prometheus ask for, which have no key.
OPEN_PATHS = frozenset({"/health", "/readiness", "/ping", "/metrics"})

_TICKS_PER_SWEEP = 5  # of a tenth of a second
_ACCEPTS_PER_TURN = 64
_PAUSE_SECONDS = 0.1
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on connections to one listening socket.

    Attributes:
        connections: at a time. When there are so many, the oldest without a request is closed for
            a new one.
        reserved: further ones, when all have a request; these are answered 503 unless they ask
            for one of ``open_paths``.
        head_seconds: until the request line and headers are complete, from the connection's
            beginning or the head's first byte. A TLS handshake is part of that time.
        head_bytes: of request line and headers.
        body_seconds, body_rate: a body has this many seconds, and one more for each ``body_rate``
            bytes that came.
        body_bytes: the connection of a longer body is closed. What surrounds a body in chunks
            (their sizes, extensions, trailers) may be ``head_bytes`` more than the body.
        read_seconds, read_rate: a client has this many seconds for what it was sent and has not
            read, and one more for each ``read_rate`` bytes that it takes.
        unread_bytes: of answers, to all clients together; beyond it connections of those that have
            not read for longest are closed.
        keep_alive_seconds: how long a connection may wait for its next request.
    """

    connections: int = 8192
    reserved: int = 64
    open_paths: frozenset[str] = OPEN_PATHS
    head_seconds: float = 10.0
    head_bytes: int = 64 << 10
    body_seconds: float = 20.0
    body_rate: int = 32 << 10
    body_bytes: int = 64 << 20
    read_seconds: float = 60.0
    read_rate: int = 32 << 10
    unread_bytes: int = 256 << 20
    keep_alive_seconds: int = 75

    def share(self, count: int) -> ConnectionLimits:
        """The limits of one of ``count`` processes that have these together."""
        return replace(
            self,
            connections=max(1, self.connections // count),
            unread_bytes=self.unread_bytes // count,
        )

    def fitting(self) -> ConnectionLimits:
        """A copy with no more connections than half of the descriptors that the process may
        have."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self
        return replace(self, connections=max(1, min(self.connections, soft // 2)))


def raise_file_limit() -> None:
    """Let the process open as many files as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a container may say no
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ConnectionSource(Protocol):
    """Source of connections: a listening socket, or an object with these methods of one."""

    def fileno(self) -> int: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def listen(self, backlog: int, /) -> None: ...

    def accept(self) -> tuple[socket.socket, object]:
        """The next connection. Raises OSError, as sockets do; BlockingIOError if there is none."""

    def close(self) -> None: ...


class Listener:
    """Accepts connections on one socket and knows which of them have a request.

    Everything happens on the event loop.
    """

    def __init__(
        self,
        sock: ConnectionSource,
        limits: ConnectionLimits,
        make_protocol: Callable[[Listener], asyncio.Protocol],
        *,
        is_encrypted: bool = False,
    ) -> None:
        """``is_encrypted``: clients that are turned away could not read an answer."""
        self.limits = limits
        self._is_encrypted = is_encrypted
        self._socket = sock
        self._make_protocol = partial(make_protocol, self)
        self._loop = asyncio.get_running_loop()
        self._seldom = Seldom(logger)
        # Accepted, but their protocol does not know of it yet.
        self._connecting: set[asyncio.Task[None]] = set()
        self._open: set[GuardedProtocol] = set()
        # Connections without a request, the oldest first: those of _new never had one.
        self._new: dict[GuardedProtocol, None] = {}
        self._idle: dict[GuardedProtocol, None] = {}
        # Closed for a moment to refuse a client when no descriptor is left.
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._closed = False
        sock.setblocking(False)
        self._resume()

    @property
    def connections(self) -> int:
        return len(self._open) + len(self._connecting)

    def opened(self, connection: GuardedProtocol) -> None:
        self._open.add(connection)
        self._new[connection] = None

    def asks(self, connection: GuardedProtocol) -> bool:
        """Note that a connection has a request. Returns whether one more may be served."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        asking = len(self._open) - len(self._new) - len(self._idle)
        return asking <= self.limits.connections

    def waits(self, connection: GuardedProtocol) -> None:
        """A connection was answered and may ask again."""
        self._idle[connection] = None

    def lost(self, connection: GuardedProtocol) -> None:
        self._open.discard(connection)
        self._new.pop(connection, None)
        self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Have late connections ended."""
        now = time.monotonic()
        for connection in list(self._open):
            connection.sweep(now)
        self._bound_unread()

    def _bound_unread(self) -> None:
        """Keep what clients have not read within the limit."""
        unread = [(c.unread_since, c) for c in self._open if c.unread_since is not None]
        excess = sum(c.unread_bytes for _, c in unread) - self.limits.unread_bytes
        for _, connection in sorted(unread, key=itemgetter(0)):
            if excess <= 0:
                return
            excess -= connection.unread_bytes
            connection.give_way()
            self._seldom.warn(
                "clients leave too much unread: those that have not read for longest are closed"
            )

    def close(self) -> None:
        """Accept no more."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._close_spare()

    async def wait_closed(self) -> None:
        """uvicorn calls it after :meth:`close`."""

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._connecting and self.connections >= self.limits.connections:
                return  # those that connect may give way in the next turn
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # The network may have ended a connection before it was accepted, too.
                self._seldom.warn(f"cannot accept connections: {error.strerror}")
                if error.errno not in _NO_DESCRIPTORS or not self._refuse_with_spare():
                    self._loop.remove_reader(self._socket)
                    self._loop.call_later(_PAUSE_SECONDS, self._resume)
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
        except OSError as error:  # it was closed already
            connection.close()
            logger.debug("a connection ended at once: %s", error)

    def _make_room(self) -> bool:
        """Whether another connection may be held, closing one without a request if need be."""
        if self.connections < self.limits.connections:
            return True
        for waiting in (self._new, self._idle):
            if waiting:
                oldest = next(iter(waiting))
                self.lost(oldest)
                oldest.give_way()
                self._seldom.warn(
                    f"{self.connections} connections: the oldest without a request is closed"
                )
                return True
        return self.connections < self.limits.connections + self.limits.reserved

    def _turn_away(self, connection: socket.socket) -> None:
        self._seldom.warn(f"{self.connections} connections have requests: others are turned away")
        if not self._is_encrypted:
            with contextlib.suppress(OSError):  # it is gone, or does not read: all the same
                connection.send(refusal(503, "Service Unavailable", FULL))
        connection.close()

    def _refuse_with_spare(self) -> bool:
        """Take the next connection from the queue and close it; whether that worked."""
        self._close_spare()
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return False
        else:
            self._turn_away(connection)
            return True
        finally:
            with contextlib.suppress(OSError):  # another thread took it: tried again next time
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


class GuardedServer(uvicorn.Server):
    """uvicorn that accepts connections within limits, without signal handlers of its own: the
    command that runs the process decides about signals.

    Attributes:
        listeners: one per socket, once it has started.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ConnectionLimits,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """``tls`` returns the context of a connection that begins; without it nothing is
        encrypted."""
        super().__init__(config)
        self._limits = limits.fitting()
        self._handshakes = None if tls is None else Handshakes(tls)
        self.listeners: list[Listener] = []
        # Where a library for them is installed, uvicorn would hand connections over to it.
        config.ws = "none"
        config.timeout_keep_alive = limits.keep_alive_seconds

    async def serve_from(self, source: ConnectionSource) -> None:
        """Serve connections of one source until ``should_exit``."""
        await self.serve([cast("socket.socket", source)])

    @property
    def connections(self) -> int:
        """Connections at present."""
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
                    is_encrypted=self._handshakes is not None,
                )
            )
        self.servers = self.listeners  # type: ignore[assignment]  # closed when it ends
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SWEEP == 0:
            for listener in self.listeners:
                listener.sweep()
        return await super().on_tick(counter)

    def _make_protocol(self, listener: Listener) -> asyncio.Protocol:
        protocol = GuardedProtocol(
            listener,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        if self._handshakes is None:
            return protocol
        return TlsTransport(self._handshakes, protocol)
