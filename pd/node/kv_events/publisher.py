"""The thread that publishes events and repeats them to subscribers that missed some."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import zmq

from pd.core.errors import SetupError
from pd.net.cluster_key import derive_kv_publisher_keypair, derive_kv_subscriber_keypair
from pd.net.curve import admit_only
from pd.net.half_open import HalfOpenLimit, limit_handshakes
from pd.node.kv_events.wire import END_OF_REPLAY, NUMBER_BYTES, EventEncoder
from pd.util.waker import Waker

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

    from pd.core.config import NodeConfig
    from pd.core.kv_events_config import EventsEndpoint, KVEventsConfig
    from pd.radix.block_log import BlockChanges

logger = logging.getLogger(__name__)

# Subscribers, who may be strangers, send us only subscriptions and requests of 8 bytes.
_MAX_INCOMING_BYTES = 1024
# Total size of the batches that we keep for replay, whatever their number.
_MAX_REPLAY_BYTES = 64 << 20
_REQUESTS_PER_TURN = 64
# Minimum seconds between two publications of the whole cache, however many subscribers ask.
_SNAPSHOT_INTERVAL = 5.0
_JOIN_SECONDS = 5.0


class _Waiting(NamedTuple):
    """Changes queued for the thread, and the Unix time at which they were collected."""

    changes: BlockChanges
    ts: float


class KVEventPublisher(threading.Thread):
    """Publishes batches over a PUB socket, and repeats missed ones over a ROUTER socket.

    Sockets on loopback are plain. Others are encrypted and admit only holders of a key derived from
    the cluster key.

    Args:
        encoder: owned by this thread.

    Attributes:
        endpoint, replay_endpoint: addresses of the sockets.
        topic: first frame of each message.
        num_batches, num_snapshots: number published since the start.

    Raises:
        SetupError: we cannot bind an address.
    """

    def __init__(
        self, config: KVEventsConfig, encoder: EventEncoder, cluster_key: bytes | None
    ) -> None:
        super().__init__(name="kv-events", daemon=True)
        self._encoder = encoder
        self.topic = config.topic
        self._max_waiting = config.max_queue_size
        self._waiting: deque[_Waiting] = deque()
        self._past: deque[tuple[int, bytes]] = deque()
        self._past_bytes = 0
        self._max_past = config.buffer_steps
        self.num_batches = self.num_snapshots = 0
        self._snapshot_wanted = False
        self._last_snapshot = 0.0
        self._running = True
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._waker = Waker()
        events, replays = config.parse_endpoints()
        try:
            self._pub = self._open_socket(zmq.PUB, config.hwm, events, cluster_key)
            self._router: zmq.Socket[bytes] | None = None
            if replays is not None:
                depth = config.buffer_steps + 1
                self._router = self._open_socket(zmq.ROUTER, depth, replays, cluster_key)
        except BaseException:
            self._close_sockets()
            raise
        self.endpoint = _bound_endpoint(self._pub)
        self.replay_endpoint = None if self._router is None else _bound_endpoint(self._router)

    @property
    def has_room(self) -> bool:
        """Whether :meth:`publish_soon` may be called: its queue is not full."""
        return len(self._waiting) < self._max_waiting

    def publish_soon(self, changes: BlockChanges) -> None:
        """Queue changes for publication. Only one thread at a time may call this."""
        self._waiting.append(_Waiting(changes, time.time()))
        self._waker.wake_poll()

    def take_snapshot_wish(self, now: float) -> bool:
        """Return whether to publish the whole cache, because a subscriber missed more than we keep.

        ``now`` is on the monotonic clock.
        """
        if not self._snapshot_wanted or now < self._last_snapshot + _SNAPSHOT_INTERVAL:
            return False
        self._snapshot_wanted, self._last_snapshot = False, now
        return True

    def close(self) -> None:
        """Publish the queued changes, and end."""
        self._running = False
        self._waker.wake_poll()
        if self.ident is None:
            self._close_sockets()
        else:
            self.join(timeout=_JOIN_SECONDS)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        limits = [HalfOpenLimit(each) for each in (self._pub, self._router) if each is not None]
        for limit in limits:
            poller.register(limit.monitor, zmq.POLLIN)
        while self._running or self._waiting:
            ready = dict(poller.poll(None if self._running else 0))
            if self._waker.fileno() in ready:
                self._waker.drain()
            for limit in limits:
                limit.process_events()
            try:
                while self._waiting:
                    self._send_batches(self._waiting.popleft())
                if self._router is not None and self._router in ready:
                    self._answer_replay(self._router)
            except Exception:  # one faulty batch must not end all publishing
                logger.exception("cannot publish KV events")
                self._snapshot_wanted = True
        self._close_sockets()

    def _send_batches(self, waiting: _Waiting) -> None:
        self.num_snapshots += waiting.changes.is_complete
        for payload in self._encoder.encode_changes(waiting.changes, waiting.ts):
            number = self.num_batches
            self.num_batches += 1
            self._past.append((number, payload))
            self._past_bytes += len(payload)
            while len(self._past) > self._max_past or self._past_bytes > _MAX_REPLAY_BYTES:
                _, dropped = self._past.popleft()
                self._past_bytes -= len(dropped)
            self._pub.send_multipart((self.topic.encode(), _encode_number(number), payload))

    def _answer_replay(self, router: zmq.Socket[bytes]) -> None:
        for _ in range(_REQUESTS_PER_TURN):
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
                logger.debug("dropped a malformed replay request of %.64r", frames[0])
                continue
            self._replay_from(router, frames[0], int.from_bytes(frames[2], "big"))

    def _replay_from(self, router: zmq.Socket[bytes], subscriber: bytes, start: int) -> None:
        """Send all batches from number ``start``."""
        oldest = self._past[0][0] if self._past else self.num_batches
        if start < oldest:
            self._snapshot_wanted = True
        try:
            for number, payload in self._past:
                if number >= start:
                    frames = (subscriber, b"", _encode_number(number), payload)
                    router.send_multipart(frames, zmq.NOBLOCK)
            router.send_multipart((subscriber, b"", END_OF_REPLAY, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("replay for %.64r ended: %s", subscriber, error)

    def _open_socket(
        self, kind: int, hwm: int, endpoint: EventsEndpoint, cluster_key: bytes | None
    ) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.IPV6, ":" in endpoint.host)
        limit_handshakes(socket)
        if kind == zmq.ROUTER:
            # Makes sending to a subscriber that does not read fail, so that we give up.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if not endpoint.is_local:
            assert cluster_key is not None, "a public endpoint needs a cluster key"
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = derive_kv_publisher_keypair(
                cluster_key
            )
            if self._authenticator is None:
                client, _ = derive_kv_subscriber_keypair(cluster_key)
                self._authenticator = admit_only(self._context, client)
        try:
            socket.bind(endpoint.url)
        except zmq.ZMQError as error:
            raise SetupError(
                f"cannot publish KV events at {endpoint.url}: {error}; choose another endpoint in "
                "--kv-events-config"
            ) from error
        return socket

    def _close_sockets(self) -> None:
        if self._context.closed:
            return
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=200)
        self._waker.close()


def make_publisher(config: NodeConfig) -> KVEventPublisher | None:
    """Make the node's publisher, not started yet. None if nothing is to be published."""
    settings = config.kv_events_config
    if not settings.is_on:
        return None
    encoder = EventEncoder(config.page_size, token_ids=settings.token_ids)
    return KVEventPublisher(settings, encoder, config.cluster_key)


def _encode_number(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def _bound_endpoint(socket: zmq.Socket[bytes]) -> str:
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
