"""The control thread, which owns a node's message sockets and its clock."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec
import zmq

from pd.core.errors import HandshakeError, SetupError
from pd.core.messages import (
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Message,
    decode_message,
    encode_message,
    is_counted,
)
from pd.net.cluster_key import derive_client_keypair, derive_server_keypair
from pd.net.curve import admit_only
from pd.net.half_open import HalfOpenLimit, limit_handshakes
from pd.util.numbering import ReceivedNumbers, SentNumbers
from pd.util.waker import Waker
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from zmq.auth.thread import ThreadAuthenticator

logger = logging.getLogger(__name__)

_Stream = TypeVar("_Stream")

_TICK = 0.1
# We poll a transfer this often while it is about to complete.
_FAST_POLL_MS = 1
_MESSAGES_PER_TURN = 256
_MAX_STREAMS = 4096


class ControlLink(NamedTuple):
    """A connection to another process, by its identity.

    ``dialled``: this node opened the connection, so the process is a prefill node that sends KV
    here. Two nodes that send KV to each other have one connection in each direction.
    """

    identity: bytes
    dialled: bool


class ControlHandler(Protocol):
    """Receives the calls of the control thread; no other thread calls these."""

    def on_message(self, link: ControlLink, message: AnyMessage) -> None:
        """Handle a message received over this link."""

    def on_gap(self, link: ControlLink) -> None:
        """Handle the loss of messages. The next message of this link comes after the gap."""

    def on_restart(self, identity: bytes) -> None:
        """Handle a process that gave up its requests at this node and restarted its stream."""

    def on_tick(self) -> None:
        """Handle a clock tick, about ten times a second."""

    def on_poll(self) -> bool:
        """Advance transfers after every turn of the loop.

        Return True while a transfer is about to complete: we then poll again a millisecond later.
        """


def _evict_streams(streams: OrderedDict[ControlLink, _Stream]) -> None:
    """Make room for one more stream. The least recently used ones belong to processes that left."""
    while len(streams) >= _MAX_STREAMS:
        streams.popitem(last=False)


class ControlThread(threading.Thread):
    """Owns the ROUTER that proxies and decode nodes connect to and the DEALERs to prefill nodes.

    Identities are instance ids. Other threads use :meth:`post_message` and :meth:`call_soon`. With
    a cluster key, sockets are CURVE-encrypted and admit only holders of the key.

    Args:
        own: instance id of this node.
        mutual: whether the prefill nodes we connect to may also connect to us. Otherwise we accept
            messages in their name only over our connection to them.
        endpoint: where to listen instead of a free TCP port of ``host``. Then :attr:`port` is 0.
    """

    _handler: ControlHandler

    def __init__(
        self,
        own: str,
        host: str,
        cluster_key: bytes | None,
        *,
        mutual: bool = False,
        endpoint: str = "",
    ) -> None:
        super().__init__(name="control", daemon=True)
        self._own, self._mutual = own, mutual
        self._cluster_key = cluster_key
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._router = self._open_socket(zmq.ROUTER, ipv6=":" in host)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        limit_handshakes(self._router)
        if cluster_key is not None:
            self._require_key(cluster_key)
        try:
            self.port = self._bind_router(host, endpoint)
        except zmq.ZMQError as error:
            # NOTE: ending a context waits for its sockets, forever if nobody closes them.
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)
            raise SetupError(f"cannot listen on {endpoint or host}: {error}") from error
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        # Both are in order of use, the most recent last.
        self._sent = OrderedDict[ControlLink, SentNumbers]()
        self._received = OrderedDict[ControlLink, ReceivedNumbers]()
        self._outbox: deque[tuple[ControlLink, bytes, bool]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._half_open = HalfOpenLimit(self._router)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._half_open.monitor, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)
        self._dropped = WarningLimit(logger)
        self._running = True

    def _bind_router(self, host: str, endpoint: str) -> int:
        if not endpoint:
            return int(self._router.bind_to_random_port(f"tcp://{host}"))
        self._router.bind(endpoint)
        return 0

    def _open_socket(self, kind: int, *, ipv6: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, ipv6)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        return socket

    def _require_key(self, cluster_key: bytes) -> None:
        expected, _ = derive_client_keypair(cluster_key)
        self._authenticator = admit_only(self._context, expected)
        public, secret = derive_server_keypair(cluster_key, self._own)
        self._router.curve_server = True
        self._router.curve_secretkey = secret
        self._router.curve_publickey = public

    def start_serving(self, handler: ControlHandler) -> None:
        """Start the thread. It calls ``handler``."""
        self._handler = handler
        self.start()

    def post_message(self, identity: bytes, message: Message) -> None:
        """Send to a process that connected here. Lost if the process is gone; its lease then
        expires."""
        self._queue_message(ControlLink(identity, dialled=False), message)

    def post_to_prefill(self, identity: bytes, message: Message) -> None:
        """Send to a prefill node we connected to (:meth:`connect_node`)."""
        self._queue_message(ControlLink(identity, dialled=True), message)

    def _queue_message(self, link: ControlLink, message: Message) -> None:
        frame = encode_message(message)
        if len(frame) > MAX_MESSAGE_BYTES:
            # The receiver would close the connection over it. Skipping its number shows it the
            # loss.
            kind = type(message).__name__
            logger.error(
                "%s for %.64r is too large: %d bytes (%d)",
                kind,
                link.identity,
                len(frame),
                MAX_MESSAGE_BYTES,
            )
            frame = b""
        self._outbox.append((link, frame, is_counted(message)))
        self._waker.wake_poll()

    def request_poll(self) -> None:
        """Make the thread call :meth:`ControlHandler.on_poll` soon. Any thread."""
        self._waker.wake_poll()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the control thread. Any thread may call this."""
        self._calls.append(function)
        self._waker.wake_poll()

    def connect_node(self, identity: bytes, endpoint: str) -> None:
        """Open a DEALER to a prefill node (control thread only).

        With a cluster key, only the node with this identity can answer. Raises HandshakeError for
        an invalid endpoint.
        """
        self.disconnect_node(identity)
        dealer = self._open_socket(zmq.DEALER, ipv6="[" in endpoint)
        dealer.setsockopt(zmq.IDENTITY, self._own.encode())
        if self._cluster_key is not None:
            dealer.curve_serverkey, _ = derive_server_keypair(self._cluster_key, identity.decode())
            dealer.curve_publickey, dealer.curve_secretkey = derive_client_keypair(
                self._cluster_key
            )
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close()
            raise HandshakeError(f"cannot connect to endpoint {endpoint!r}: {error}") from error
        self._dealers[identity] = dealer
        # NOTE: the peer's stream goes on, so messages that it sent to our last socket are not a
        # gap.
        link = ControlLink(identity, dialled=True)
        self._sent[link], self._received[link] = SentNumbers(), ReceivedNumbers(whole=False)
        self._poller.register(dealer, zmq.POLLIN)

    def disconnect_node(self, identity: bytes) -> None:
        """Close the DEALER to a prefill node, if there is one (control thread only)."""
        dealer = self._dealers.pop(identity, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close()
            link = ControlLink(identity, dialled=True)
            self._sent.pop(link, None)
            self._received.pop(link, None)

    def stop(self) -> None:
        """Send everything posted so far, close the sockets and end the thread.

        A thread that was never started also has sockets to close.
        """
        if self.ident is None:
            self._close_sockets()
            return
        self.call_soon(self._stop_running)
        if self.is_alive():
            self.join(timeout=5)

    def _stop_running(self) -> None:
        self._running = False

    def run(self) -> None:
        next_tick = time.monotonic()
        soon = False
        while self._running:
            # NOTE: rounded up, because we would spin for the last millisecond before a tick.
            until_tick = math.ceil((next_tick - time.monotonic()) * 1000)
            timeout = _FAST_POLL_MS if soon else max(0, until_tick)
            for ready, _ in self._poller.poll(timeout):
                if ready == self._waker.fileno():
                    self._waker.drain()
                elif ready is self._half_open.monitor:
                    self._half_open.process_events()
                else:
                    self._receive_all(ready)
            while self._calls:
                self._call_guarded(self._calls.popleft())
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + _TICK
                self._call_guarded(self._handler.on_tick)
            soon = bool(self._call_guarded(self._handler.on_poll))
            self._flush_queues()
        self._close_sockets()

    def _call_guarded(self, function: Callable[..., object], *args: object) -> object:
        try:
            return function(*args)
        except Exception:  # a failing handler must not end the node's clock
            logger.exception("%s%.200r failed", getattr(function, "__qualname__", ""), args)
            return None

    def _receive_all(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._router:
            self._half_open.process_events()  # learn of a connection before its first message
        for _ in range(_MESSAGES_PER_TURN):
            try:
                if socket is self._router and self._half_open.has_unproven:
                    frames = self._receive_from(socket)
                else:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                # Nothing is left, or the last message made us disconnect this peer.
                return
            message = self._parse_frames(frames)
            if message is None:
                continue
            link = self._find_link(socket, frames)
            if link is None or message.sender.encode() != link.identity:
                name = None if link is None else link.identity
                self._dropped.log_warning(
                    f"dropped a message of {name!r:.64}: it claims another sender"
                )
                continue
            if len(frames) > 1 + (socket is self._router):
                self._check_number(link, frames[-2])
            self._call_guarded(self._handler.on_message, link, message)

    def _receive_from(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        """Receive a message and note the connection it came over."""
        received = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        descriptor = received[-1].get(zmq.SRCFD)
        if isinstance(descriptor, int):
            self._half_open.on_message(descriptor)
        return [frame.bytes for frame in received]

    def _find_link(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> ControlLink | None:
        """Return the link of a message, or None if its sender may not use this socket."""
        if socket is not self._router:
            name = next((name for name, dealer in self._dealers.items() if dealer is socket), None)
            return None if name is None else ControlLink(name, dialled=True)
        if frames[0] in self._dealers and not self._mutual:
            return None  # a prefill node must use the connection we opened to it
        return ControlLink(frames[0], dialled=False)

    def _check_number(self, link: ControlLink, number: bytes) -> None:
        """Check the number of a message and report missing ones to the handler."""
        received = self._received.get(link)
        if received is None:
            _evict_streams(self._received)
            received = self._received[link] = ReceivedNumbers(whole=True)
        else:
            self._received.move_to_end(link)
        began = received.began
        try:
            gap = received.detect_loss(number)
        except ValueError as error:
            self._dropped.log_warning(f"ignored a message of {link.identity!r:.64}: {error}")
            return
        if received.began > began > 0 and not link.dialled:
            self._call_guarded(self._handler.on_restart, link.identity)
        if gap:
            self._call_guarded(self._handler.on_gap, link)

    def _parse_frames(self, frames: list[bytes]) -> AnyMessage | None:
        try:
            return decode_message(frames[-1])
        except msgspec.MsgspecError as error:
            self._dropped.log_warning(
                f"dropped a malformed message of {len(frames[-1])} bytes: {error}"
            )
        except (UnicodeError, RecursionError) as error:
            self._dropped.log_warning(f"dropped a malformed message: {error}")
        return None

    def _flush_queues(self) -> None:
        while self._outbox:
            link, frame, counting = self._outbox.popleft()
            dealer = self._dealers.get(link.identity)
            if link.dialled and dealer is None:
                continue  # the prefill node was dropped meanwhile
            sent = self._sent.get(link)
            if sent is None:
                _evict_streams(self._sent)
                sent = self._sent[link] = SentNumbers()
            else:
                self._sent.move_to_end(link)
            frames = [sent.number_message(counts=counting), frame]
            try:
                if not frame:
                    continue
                if link.dialled and dealer is not None:
                    dealer.send_multipart(frames, zmq.NOBLOCK)
                else:
                    self._router.send_multipart([link.identity, *frames], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # NOTE: the receiver left or does not read. Either its lease expires, or the number
                # of the next message shows it the loss.
                logger.debug("message to %.64r not sent: %s", link.identity, error)

    def _close_sockets(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=200)
        self._waker.close()
