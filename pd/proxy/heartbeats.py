"""Heartbeats that keep this proxy's leases at the nodes while its event loop is busy.

The event loop exchanges heartbeats with every node too, over the channel that carries requests:
those tell whether messages were lost and how the node is. Here a thread with sockets of its own
(ZMQ sockets belong to one thread) only says that the proxy lives. A proxy whose event loop hangs
must not hold requests for ever, so the thread falls silent when the loop has not turned for
:data:`HUNG_SECONDS`. Time in which the loop's thread was ready to run and got no CPU does not
count.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import zmq

from pd.core.messages import HEARTBEAT_INTERVAL, ProxyHeartbeat, encode, heartbeat_identity
from pd.core.starvation import RUN_DELAY, thread_run_delay

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.channel import Sockets

logger = logging.getLogger(__name__)

HUNG_SECONDS = 10.0


class LoopWatch:
    """Whether an event loop still turns.

    Args:
        clock: ``time.monotonic``, and ``delay`` the run delay of one thread, but in tests.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        delay: Callable[[int], float] = thread_run_delay,
    ) -> None:
        self._clock, self._delay = clock, delay
        self._thread = threading.get_native_id()
        self._turn = (clock(), 0.0)

    def turned(self) -> None:
        """Note that the loop turns; called by its own thread, at least every second."""
        self._thread = threading.get_native_id()
        self._turn = (self._clock(), self._delay(self._thread))

    def hangs(self) -> bool:
        """Whether the last turn is longer ago than a living loop takes. From any thread."""
        turned, delay_then = self._turn
        since = self._clock() - turned
        if since <= HUNG_SECONDS:
            return False
        return since - (self._delay(self._thread) - delay_then) > HUNG_SECONDS


class HeartbeatThread(threading.Thread):
    """Tells nodes twice a second that this proxy lives.

    :meth:`add`, :meth:`remove` and :meth:`close` may be called from any thread.
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

    def add(self, instance_id: str, endpoint: str) -> None:
        """Keep the lease at a node."""
        with self._lock:
            self._endpoints[instance_id] = endpoint

    def remove(self, instance_id: str) -> None:
        """Let the lease at a node end, if it was kept."""
        with self._lock:
            self._endpoints.pop(instance_id, None)

    def close(self) -> None:
        """End the thread and its sockets."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        context = zmq.Context()
        hung = False
        try:
            while not self._ended.wait(HEARTBEAT_INTERVAL):
                if self._watch.hangs() != hung:
                    hung = not hung
                    logger.error("the event loop %s", "hangs" if hung else "turns again")
                if not hung:
                    self._beat(context)
        finally:
            context.destroy(linger=0)

    def _beat(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with self._lock:
            wanted = set(self._endpoints.items())
        for gone in self._open.keys() - wanted:
            self._open.pop(gone).close()
        for instance_id, endpoint in wanted - self._open.keys():
            try:
                socket = self._sockets.connect(context, self._sender, endpoint, instance_id)
            except zmq.ZMQError as error:
                # The event loop has connected to the same endpoint, so this is for want of
                # descriptors or memory. The other leases are kept, and this one is tried again.
                logger.warning("cannot keep the lease at %s: %s", endpoint, error)
            else:
                self._open[instance_id, endpoint] = socket
        for (instance_id, _), socket in self._open.items():
            # NOTE: a node that is not there or does not read misses this one; its own lease at
            # the event loop ends what depends on it.
            with contextlib.suppress(zmq.Again):
                heartbeat = ProxyHeartbeat(
                    to=instance_id, sender=self._sender, run_delay=RUN_DELAY.total
                )
                socket.send(encode(heartbeat), zmq.NOBLOCK)
