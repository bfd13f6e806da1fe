"""The control thread: every message socket of a node, and its clock."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec
import zmq

from pd.core.cluster_key import curve_client_keypair, curve_server_keypair
from pd.core.errors import HandshakeError, SetupError
from pd.core.messages import MAX_MESSAGE_BYTES, AnyMessage, Message, counts, decode, encode
from pd.core.numbering import Received, Sent
from pd.core.seldom import Seldom
from pd.core.waker import Waker
from pd.node.curve import admit_only
from pd.node.half_open import HalfOpenLimit, limit_handshakes

if TYPE_CHECKING:
    from collections.abc import Callable

    from zmq.auth.thread import ThreadAuthenticator

logger = logging.getLogger(__name__)

_Stream = TypeVar("_Stream")

_TICK = 0.1
# While a transfer is about to complete its state is polled this often.
_FAST_POLL_MS = 1
_MESSAGES_PER_TURN = 256
_MAX_STREAMS = 4096


class ControlLink(NamedTuple):
    """A connection to another process, by its identity.

    ``dialled``: this node opened the connection, so the process is a prefill node that sends KV
    here. Two nodes that send KV to each other have a connection in each direction.
    """

    identity: bytes
    dialled: bool


class ControlHandler(Protocol):
    """Receives the calls of the control thread; no other thread calls these."""

    def on_message(self, link: ControlLink, message: AnyMessage) -> None:
        """Handle a message that came by this link."""

    def on_gap(self, link: ControlLink) -> None:
        """Note that messages were lost before the one that comes next by this link."""

    def on_anew(self, identity: bytes) -> None:
        """Note that a process dropped everything that it had at this node and begins anew."""

    def on_tick(self) -> None:
        """Handle a tick of the clock; called about ten times a second."""

    def on_poll(self) -> bool:
        """Move transfers along; called after every turn. True asks for another call a
        millisecond later, since a transfer is about to complete."""


def _forget_some(streams: OrderedDict[ControlLink, _Stream]) -> None:
    """Make room for one more stream; those used least lately are of processes that left."""
    while len(streams) >= _MAX_STREAMS:
        streams.popitem(last=False)


class ControlThread(threading.Thread):
    """Owns the ROUTER that proxies and decode nodes connect to and the DEALERs to prefill nodes.

    Identities are instance ids. Other threads talk to it with :meth:`post` and :meth:`call`.
    Sockets are CURVE-encrypted and open only to holders of the cluster key when there is one.

    Args:
        own: instance id of this node.
        mutual: prefill nodes that this node connects to may connect to it, too. Otherwise none may
            speak in their name but through the connection to them.
    """

    _handler: ControlHandler

    def __init__(
        self, own: str, host: str, cluster_key: bytes | None, *, mutual: bool = False
    ) -> None:
        super().__init__(name="control", daemon=True)
        self._own, self._mutual = own, mutual
        self._cluster_key = cluster_key
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._router = self._open(zmq.ROUTER, ipv6=":" in host)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        limit_handshakes(self._router)
        if cluster_key is not None:
            self._require_key(cluster_key)
        try:
            self.port: int = self._router.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            # NOTE: the end of a context waits for its sockets, for ever if nobody closes them.
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)
            raise SetupError(f"cannot listen on {host}: {error}") from error
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        # Those used last are the last.
        self._sent = OrderedDict[ControlLink, Sent]()
        self._received = OrderedDict[ControlLink, Received]()
        self._outbox: deque[tuple[ControlLink, bytes, bool]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._half_open = HalfOpenLimit(self._router)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._half_open.monitor, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)
        self._dropped = Seldom(logger)
        self._running = True

    def _open(self, kind: int, *, ipv6: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, ipv6)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        return socket

    def _require_key(self, cluster_key: bytes) -> None:
        expected, _ = curve_client_keypair(cluster_key)
        self._authenticator = admit_only(self._context, expected)
        public, secret = curve_server_keypair(cluster_key, self._own)
        self._router.curve_server = True
        self._router.curve_secretkey = secret
        self._router.curve_publickey = public

    def serve(self, handler: ControlHandler) -> None:
        """Start the thread; it calls ``handler`` from now on."""
        self._handler = handler
        self.start()

    def post(self, identity: bytes, message: Message) -> None:
        """Send to a process that connected here. Lost when it is gone: leases find that out."""
        self._queue(ControlLink(identity, dialled=False), message)

    def post_to_prefill(self, identity: bytes, message: Message) -> None:
        """Send to a prefill node that this node connected to (:meth:`connect`)."""
        self._queue(ControlLink(identity, dialled=True), message)

    def _queue(self, link: ControlLink, message: Message) -> None:
        frame = encode(message)
        if len(frame) > MAX_MESSAGE_BYTES:
            # The receiver would close the connection. The gap tells it that something is missing.
            kind = type(message).__name__
            logger.error("%s for %.64r is too large: %d bytes", kind, link.identity, len(frame))
            frame = b""
        self._outbox.append((link, frame, counts(message)))
        self._waker.wake()

    def wake(self) -> None:
        """Have :meth:`ControlHandler.on_poll` called soon."""
        self._waker.wake()

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the control thread."""
        self._calls.append(function)
        self._waker.wake()

    def connect(self, identity: bytes, endpoint: str) -> None:
        """Open a DEALER to a prefill node (control thread only). Raises HandshakeError when the
        endpoint is no address. With a cluster key only the node with this identity can answer."""
        self.disconnect(identity)
        dealer = self._open(zmq.DEALER, ipv6="[" in endpoint)
        dealer.setsockopt(zmq.IDENTITY, self._own.encode())
        if self._cluster_key is not None:
            dealer.curve_serverkey, _ = curve_server_keypair(self._cluster_key, identity.decode())
            dealer.curve_publickey, dealer.curve_secretkey = curve_client_keypair(self._cluster_key)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close()
            raise HandshakeError(f"cannot connect to endpoint {endpoint!r}: {error}") from error
        self._dealers[identity] = dealer
        # NOTE: the peer's own stream goes on; its messages to the last socket are not missed.
        link = ControlLink(identity, dialled=True)
        self._sent[link], self._received[link] = Sent(), Received(whole=False)
        self._poller.register(dealer, zmq.POLLIN)

    def disconnect(self, identity: bytes) -> None:
        """Close the DEALER to a prefill node, if there is one (control thread only)."""
        dealer = self._dealers.pop(identity, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close()
            link = ControlLink(identity, dialled=True)
            self._sent.pop(link, None)
            self._received.pop(link, None)

    def stop(self) -> None:
        """End the thread and close its sockets; what was posted before is still sent. A thread that
        was never started has sockets, too."""
        if self.ident is None:
            self._close()
            return
        self.call(self._end)
        if self.is_alive():
            self.join(timeout=5)

    def _end(self) -> None:
        self._running = False

    def run(self) -> None:
        next_tick = time.monotonic()
        soon = False
        while self._running:
            # NOTE: rounded up, or the last millisecond before a tick would be spent in a spin.
            until_tick = math.ceil((next_tick - time.monotonic()) * 1000)
            timeout = _FAST_POLL_MS if soon else max(0, until_tick)
            for ready, _ in self._poller.poll(timeout):
                if ready == self._waker.fileno():
                    self._waker.drain()
                elif ready is self._half_open.monitor:
                    self._half_open.look()
                else:
                    self._receive(ready)
            while self._calls:
                self._guarded(self._calls.popleft())
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + _TICK
                self._guarded(self._handler.on_tick)
            soon = bool(self._guarded(self._handler.on_poll))
            self._flush()
        self._close()

    def _guarded(self, function: Callable[..., object], *args: object) -> object:
        try:
            return function(*args)
        except Exception:  # a fault in one event must not end the node's clock
            logger.exception("%s%.200r failed", getattr(function, "__qualname__", ""), args)
            return None

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._router:
            self._half_open.look()  # a connection must be known before what came by it
        for _ in range(_MESSAGES_PER_TURN):
            try:
                if socket is self._router and self._half_open.waits:
                    frames = self._receive_from(socket)
                else:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                # Nothing more, or the last message made us disconnect this peer.
                return
            message = self._parse(frames)
            if message is None:
                continue
            link = self._link(socket, frames)
            if link is None or message.sender.encode() != link.identity:
                name = None if link is None else link.identity
                self._dropped.warn(f"dropped a message of {name!r:.64} that claims another sender")
                continue
            if len(frames) > 1 + (socket is self._router):
                self._check(link, frames[-2])
            self._guarded(self._handler.on_message, link, message)

    def _receive_from(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        """A message, with a note of the connection that it came by."""
        received = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        descriptor = received[-1].get(zmq.SRCFD)
        if isinstance(descriptor, int):
            self._half_open.heard(descriptor)
        return [frame.bytes for frame in received]

    def _link(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> ControlLink | None:
        """The link by which a message came; None if it may not come through this socket."""
        if socket is not self._router:
            names = (name for name, dealer in self._dealers.items() if dealer is socket)
            name = next(names, None)
            return None if name is None else ControlLink(name, dialled=True)
        if frames[0] in self._dealers and not self._mutual:
            return None  # a prefill node speaks through the socket that was opened to it
        return ControlLink(frames[0], dialled=False)

    def _check(self, link: ControlLink, number: bytes) -> None:
        """Note the number of a message, and tell the handler of messages that are missing."""
        received = self._received.get(link)
        if received is None:
            _forget_some(self._received)
            received = self._received[link] = Received(whole=True)
        else:
            self._received.move_to_end(link)
        began = received.began
        try:
            gap = received.missing(number)
        except ValueError as error:
            self._dropped.warn(f"ignored a message of {link.identity!r:.64}: {error}")
            return
        if received.began > began > 0 and not link.dialled:
            self._guarded(self._handler.on_anew, link.identity)
        if gap:
            self._guarded(self._handler.on_gap, link)

    def _parse(self, frames: list[bytes]) -> AnyMessage | None:
        try:
            return decode(frames[-1])
        except msgspec.MsgspecError as error:
            self._dropped.warn(f"dropped a malformed message of {len(frames[-1])} bytes: {error}")
        except (UnicodeError, RecursionError) as error:
            self._dropped.warn(f"dropped a malformed message: {error}")
        return None

    def _flush(self) -> None:
        while self._outbox:
            link, frame, counting = self._outbox.popleft()
            dealer = self._dealers.get(link.identity)
            if link.dialled and dealer is None:
                continue  # the prefill node was dropped meanwhile
            sent = self._sent.get(link)
            if sent is None:
                _forget_some(self._sent)
                sent = self._sent[link] = Sent()
            else:
                self._sent.move_to_end(link)
            frames = [sent.number(counts=counting), frame]
            try:
                if not frame:
                    continue
                if link.dialled and dealer is not None:
                    dealer.send_multipart(frames, zmq.NOBLOCK)
                else:
                    self._router.send_multipart([link.identity, *frames], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # NOTE: the receiver left or does not read; its lease ends what concerns it, or the
                # number of the next message tells it.
                logger.debug("message to %.64r not sent: %s", link.identity, error)

    def _close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=200)
        self._waker.close()
