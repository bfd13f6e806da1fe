"""Keeps our leases at the nodes while the event loop is busy.

The event loop also exchanges heartbeats with every node, over the channel of requests. They show
lost messages and the state of the node. The thread here has its own sockets, because a ZMQ socket
belongs to one thread, and only says that the proxy is alive. A proxy with a hanging event loop must
not hold requests forever, so the thread stops when the loop has not turned for
:data:`HUNG_SECONDS`. We do not count time in which the loop's thread was ready to run but had no
CPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import zmq

from pd.core.messages import HEARTBEAT_INTERVAL, ProxyHeartbeat, encode_message, heartbeat_identity
from pd.util.starvation import RUN_DELAY, thread_run_delay

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.nodes.channel import Sockets

logger = logging.getLogger(__name__)

HUNG_SECONDS = 10.0


class LoopWatch:
    """Detects whether an event loop hangs.

    Args:
        clock: ``time.monotonic``, except in tests.
        delay: returns the run delay of a thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        delay: Callable[[int], float] = thread_run_delay,
    ) -> None:
        self._clock, self._delay = clock, delay
        self._thread = threading.get_native_id()
        self._turn = (clock(), 0.0)

    def note_turn(self) -> None:
        """Note a turn of the loop. Its own thread calls this at least once a second."""
        self._thread = threading.get_native_id()
        self._turn = (self._clock(), self._delay(self._thread))

    def is_hung(self) -> bool:
        """Whether the last turn is too long ago. Any thread may call this."""
        turned, delay_then = self._turn
        since = self._clock() - turned
        if since <= HUNG_SECONDS:
            return False
        return since - (self._delay(self._thread) - delay_then) > HUNG_SECONDS


class HeartbeatThread(threading.Thread):
    """Tells nodes twice a second that this proxy is alive.

    Any thread may call :meth:`keep_lease`, :meth:`drop_lease` and :meth:`close`.
    """

    def __init__(self, sockets: Sockets, watch: LoopWatch) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self._sockets = sockets
        self._watch = watch
        self._sender = heartbeat_identity(sockets.instance_id)
        self._lock = threading.Lock()
        self._endpoints: dict[str, str] = {}
        self._ended = threading.Event()
        self._open: dict[tuple[str, str], zmq.Socket[bytes]] = {}

    def keep_lease(self, instance_id: str, endpoint: str) -> None:
        """Start to send heartbeats to a node."""
        with self._lock:
            self._endpoints[instance_id] = endpoint

    def drop_lease(self, instance_id: str) -> None:
        """Stop sending heartbeats to a node, if we do."""
        with self._lock:
            self._endpoints.pop(instance_id, None)

    def close(self) -> None:
        """End the thread and close its sockets."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        context = zmq.Context()
        hung = False
        try:
            while not self._ended.wait(HEARTBEAT_INTERVAL):
                if self._watch.is_hung() != hung:
                    hung = not hung
                    logger.error("the event loop %s", "hangs" if hung else "turns again")
                if not hung:
                    self._send_heartbeats(context)
        finally:
            context.destroy(linger=0)

    def _send_heartbeats(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with self._lock:
            wanted = set(self._endpoints.items())
        for gone in self._open.keys() - wanted:
            self._open.pop(gone).close()
        for instance_id, endpoint in wanted - self._open.keys():
            try:
                socket = self._sockets.connect_socket(context, self._sender, endpoint, instance_id)
            except zmq.ZMQError as error:
                # The event loop connected to the same endpoint, so we lack descriptors or memory.
                # We keep the other leases and try this one again.
                logger.warning("cannot keep the lease at %s: %s", endpoint, error)
            else:
                self._open[instance_id, endpoint] = socket
        for (instance_id, _), socket in self._open.items():
            # NOTE: a node that is gone or does not read misses this heartbeat. The event loop
            # handles its loss.
            with contextlib.suppress(zmq.Again):
                heartbeat = ProxyHeartbeat(
                    to=instance_id, sender=self._sender, run_delay=RUN_DELAY.total
                )
                socket.send(encode_message(heartbeat), zmq.NOBLOCK)
