"""Connections to a listening ZMQ socket whose peers have not proved their identity.

ZMQ accepts without a limit, and gives a peer half a minute for its handshake. So whoever reaches
the port could take every descriptor of the process, and memory with large messages, which ZMQ reads
whole before it refuses them. Here a handshake has a few seconds, and the oldest of too many
connections are ended, as the HTTP servers do.

ZMQ does not say which connection has ended its handshake (its event has no descriptor). So one
counts as proven when a message came from it, or when it is older than a handshake may be: ZMQ would
have ended it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from pd.core.seldom import Seldom

if TYPE_CHECKING:
    from zmq.utils.monitor import _MonitorMessage

logger = logging.getLogger(__name__)

# Peers that are let in need a few round trips, so even many nodes that start at once are rarely as
# many. Where more than this begin together, the oldest are ended before they are through, come
# again and end others: with a limit of 64, a hundred peers can keep each other out.
MOST = 256
# Milliseconds from the connection to the end of its handshake. A peer that is starved of CPU needs
# longer; its ZMQ connects again by itself, and keeps what it has to say.
HANDSHAKE_MS = 5000
# Milliseconds by which ZMQ may end one later.
_SLACK_MS = 1000
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def limit_handshakes(listener: zmq.Socket[bytes]) -> None:
    """End connections to a socket that is not bound yet when their handshake takes too long."""
    listener.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


class HalfOpenLimit:
    """Ends the oldest connections without a handshake while there are more than :data:`MOST`.

    Belongs to the thread that polls the socket, which also polls :attr:`monitor` and then calls
    :meth:`look`.

    Args:
        listener: a bound socket, whose monitor nobody else takes.

    Attributes:
        monitor: readable when connections began or ended.
    """

    def __init__(self, listener: zmq.Socket[bytes]) -> None:
        self.monitor: zmq.Socket[bytes] = listener.get_monitor_socket(_EVENTS)
        endpoint = listener.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(endpoint.rpartition(":")[2])
        # When they were accepted, by their descriptors; the oldest first.
        self._waiting: dict[int, float] = {}
        self._ended = Seldom(logger)

    @property
    def waits(self) -> bool:
        """Whether some connection is not known to be proven, so that :meth:`heard` matters."""
        return bool(self._waiting)

    def heard(self, descriptor: int) -> None:
        """A message came from this connection, which has therefore proved itself."""
        self._waiting.pop(descriptor, None)

    def look(self) -> None:
        """Take note of what happened."""
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._note(event)

    def _forget_the_proven(self) -> None:
        """Connections that ZMQ has not ended until now have proved themselves."""
        began = time.monotonic() - (HANDSHAKE_MS + _SLACK_MS) / 1000
        while self._waiting:
            oldest = next(iter(self._waiting))
            if self._waiting[oldest] > began:
                return
            del self._waiting[oldest]

    def _note(self, event: _MonitorMessage) -> None:
        descriptor = event["value"]
        self._waiting.pop(descriptor, None)
        if event["event"] != zmq.EVENT_ACCEPTED:
            return
        self._waiting[descriptor] = time.monotonic()
        self._forget_the_proven()
        if len(self._waiting) > MOST:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._end(oldest)

    def _end(self, descriptor: int) -> None:
        """End a connection; ZMQ sees its peer leave. The descriptor may be another's by now."""
        self._ended.warn(f"more than {MOST} connections to port {self._port} without a handshake")
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=descriptor)
            try:
                if connection.getsockname()[1:2] == (self._port,):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
