"""Limits on the HTTP connections to one listening socket."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Paths of a proxy for load balancers and Prometheus, which have no key.
OPEN_PATHS = frozenset({"/health", "/readiness", "/ping", "/metrics"})


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on connections to one listening socket.

    Attributes:
        connections: simultaneous connections. At this number we close one for each new connection:
            the oldest without a request, or else the one whose body has been silent for longest.
        reserved: further connections if all have a request. We answer them 503, unless they ask for
            one of ``open_paths`` or another connection gives way.
        silent_seconds: time in which a connection must begin a request, or send more of its body.
            After it the connection gives way to any other.
        head_seconds: time for request line and headers, from the connection's beginning or the
            head's first byte. It includes the TLS handshake.
        head_bytes: limit on request line and headers.
        body_seconds, body_rate: time for a body, plus one second for each ``body_rate`` bytes that
            arrived.
        body_pause_seconds: limit on a pause within a body, however much of it has arrived.
        body_bytes: limit on a body. We close the connection of a longer one.
        long_bodies: other limits, by path.
        framing_bytes: number of bytes by which the framing of a chunked body (sizes, extensions,
            trailers) may exceed the body.
        read_seconds, read_rate: time for a client to read our answer, plus one second for each
            ``read_rate`` bytes it reads.
        unread_bytes: limit on the unread answers of all clients together. Beyond it we close the
            connections of the clients that have not read for longest.
        keep_alive_seconds: limit on a connection's wait for its next request.
    """

    connections: int = 8192
    reserved: int = 64
    silent_seconds: float = 1.0
    open_paths: frozenset[str] = OPEN_PATHS
    head_seconds: float = 10.0
    head_bytes: int = 64 << 10
    body_seconds: float = 20.0
    body_rate: int = 32 << 10
    body_pause_seconds: float = 120.0
    body_bytes: int = 64 << 20
    long_bodies: Mapping[str, int] = field(default_factory=dict)
    framing_bytes: int = 16 << 10
    read_seconds: float = 60.0
    read_rate: int = 32 << 10
    unread_bytes: int = 256 << 20
    keep_alive_seconds: int = 75

    def divide_among(self, count: int) -> ConnectionLimits:
        """Return the limits of one process if ``count`` processes share these."""
        return replace(
            self,
            connections=max(1, self.connections // count),
            unread_bytes=self.unread_bytes // count,
        )

    def fit_files(self, files: int) -> ConnectionLimits:
        """Return a copy that needs at most ``files`` descriptors, reserved connections included."""
        reserved = min(self.reserved, files // 4)
        connections = max(1, min(self.connections, files - reserved))
        return replace(self, connections=connections, reserved=reserved)
