"""Connections to a listening ZMQ socket whose peers have not proved their identity.

ZMQ accepts connections without a limit, and gives a peer half a minute for its handshake. A
stranger could therefore take every descriptor of the process. It could also take its memory,
because ZMQ reads a large message completely before it refuses it. So we give a handshake a few
seconds and end the oldest of too many connections, as our HTTP servers do.

ZMQ does not tell us which connection has completed its handshake (its event has no descriptor). We
count a connection as proven after a message from it. We also do so when it is older than a
handshake may be, because otherwise ZMQ would have ended it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from pd.util.descriptors import limit_strangers
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from zmq.utils.monitor import _MonitorMessage

logger = logging.getLogger(__name__)

# Unproven connections to one socket. A handshake takes a few round trips, so even nodes that start
# together rarely have this many under way. If more begin at once, we end the oldest before they are
# through; they reconnect and replace others. With a limit of 64, a hundred peers can keep each
# other out.
MAX_HALF_OPEN = 256
# Part of the process's descriptors for the connections to one port.
_PARTS = 16
# Milliseconds from the connection to the end of its handshake. A peer without enough CPU time may
# need longer. Its ZMQ then reconnects by itself and keeps its messages.
HANDSHAKE_MS = 5000
# Milliseconds by which ZMQ may end a late handshake later.
_SLACK_MS = 1000
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def limit_handshakes(listener: zmq.Socket[bytes]) -> None:
    """Make a socket end connections with slow handshakes. Call this before you bind it."""
    listener.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


class HalfOpenLimit:
    """Ends the oldest unproven connections beyond a limit.

    The limit is :data:`MAX_HALF_OPEN`, or less if the process has few descriptors. The object
    belongs to the thread that polls the socket. This thread also polls :attr:`monitor` and then
    calls :meth:`process_events`.

    Args:
        listener: a bound socket. Nobody else may take its monitor.

    Attributes:
        monitor: readable when connections have begun or ended.
    """

    def __init__(self, listener: zmq.Socket[bytes]) -> None:
        self.monitor: zmq.Socket[bytes] = listener.get_monitor_socket(_EVENTS)
        endpoint = listener.getsockopt_string(zmq.LAST_ENDPOINT)
        # A Unix socket has no port, and its peers are our own processes.
        self._port = int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp://") else 0
        self._limit = limit_strangers(MAX_HALF_OPEN, _PARTS)
        # When we accepted each unproven connection, by descriptor; the oldest first.
        self._waiting: dict[int, float] = {}
        self._ended = WarningLimit(logger)

    @property
    def has_unproven(self) -> bool:
        """Whether some connection may be unproven, so :meth:`on_message` has an effect."""
        return bool(self._waiting)

    def on_message(self, descriptor: int) -> None:
        """Count a connection as proven, because a message came from it."""
        self._waiting.pop(descriptor, None)

    def process_events(self) -> None:
        """Read the monitor's events: count new connections and end those beyond the limit."""
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._process_event(event)

    def _drop_proven(self) -> None:
        """Drop connections older than a handshake may be: ZMQ would have ended them."""
        began = time.monotonic() - (HANDSHAKE_MS + _SLACK_MS) / 1000
        while self._waiting:
            oldest = next(iter(self._waiting))
            if self._waiting[oldest] > began:
                return
            del self._waiting[oldest]

    def _process_event(self, event: _MonitorMessage) -> None:
        descriptor = event["value"]
        self._waiting.pop(descriptor, None)
        if event["event"] != zmq.EVENT_ACCEPTED:
            return
        self._waiting[descriptor] = time.monotonic()
        self._drop_proven()
        if len(self._waiting) > self._limit:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._end_connection(oldest)

    def _end_connection(self, descriptor: int) -> None:
        """End a connection, so that ZMQ sees its peer leave.

        We check the port first, because the descriptor may belong to another connection meanwhile.
        """
        self._ended.log_warning(
            f"connections to port {self._port} without a handshake: more than {self._limit}; "
            "closing the oldest"
        )
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=descriptor)
            try:
                if connection.getsockname()[1:2] == (self._port,):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
