"""The message socket to one instance of a node."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from pd.core.messages import (
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Message,
    decode_message,
    encode_message,
    is_counted,
)
from pd.net.cluster_key import derive_client_keypair, derive_server_keypair
from pd.util.numbering import ReceivedNumbers, SentNumbers

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
S = TypeVar("S", bound="zmq.Socket[Any]")

Socket = zmq.Socket[bytes]

# Messages queued for a node that does not read. Beyond this limit, sending fails.
_SEND_QUEUE = 4096
# Messages we receive from a socket before the event loop serves others.
PASS_MESSAGES = 64


class Sockets:
    """Opens channels with one ZMQ context, and with the identity and keys of this proxy."""

    def __init__(self, instance_id: str, cluster_key: bytes | None) -> None:
        self.instance_id = instance_id
        self._context: zmq.Context[Socket] = zmq.Context()
        self._cluster_key = cluster_key

    def open_channel(
        self,
        endpoint: str,
        node: str,
        on_message: Callable[[AnyMessage], None],
        on_taken: Callable[[], None],
        on_gap: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> NodeChannel:
        """Connect to a node's ROUTER. Raises zmq.ZMQError for an impossible endpoint.

        Args:
            node: instance id of the node. With a cluster key, only the ROUTER of that node accepts
                the connection. A node claiming another node's endpoint can therefore not replace
                our stream there.
            on_message: gets every message.
            on_taken: called after all received messages, or after PASS_MESSAGES of them.
            on_gap: called before a message if earlier ones were lost.
            on_disconnect: called when a connection ends. ZMQ connects again if the node is alive.
        """
        socket = self.connect_socket(self._context, self.instance_id, endpoint, node)
        return NodeChannel(socket, self.instance_id, on_message, on_taken, on_gap, on_disconnect)

    def connect_socket(self, context: zmq.Context[S], identity: str, endpoint: str, node: str) -> S:
        """Connect a socket of ``context`` to the ROUTER of ``node``, now or once it exists.

        Any thread may call this. Raises as :meth:`open_channel` does.
        """
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.IPV6, "[" in endpoint)
        socket.set(zmq.IDENTITY, identity.encode())
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)  # make sending fail at once without a connection
        socket.set(zmq.SNDHWM, _SEND_QUEUE)
        socket.set(zmq.RCVHWM, 0)  # a dropped output would be a gap; our reader always reads
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
        if self._cluster_key is not None:
            public, secret = derive_client_keypair(self._cluster_key)
            socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, secret)
            theirs, _ = derive_server_keypair(self._cluster_key, node)
            socket.set(zmq.CURVE_SERVERKEY, theirs)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def close(self) -> None:
        """Close the context. Close all channels first."""
        self._context.destroy(linger=0)


class SocketReader:
    """Passes the messages of a ZMQ socket to a callback on the running event loop.

    NOTE: the descriptor of a ZMQ socket does not tell us whether there are messages. It becomes
    readable once when something happened to the socket, and any call on the socket may reset it. We
    therefore receive until there is nothing left, and call :meth:`check_soon` after every other
    call.

    Args:
        on_message: gets the frames of a message. It may close the reader.
        on_taken: called after all received messages, or after PASS_MESSAGES of them.
    """

    def __init__(
        self,
        socket: Socket,
        on_message: Callable[[list[bytes]], None],
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._on_taken = on_taken
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._pass_is_due = False
        self._loop.add_reader(self._descriptor, self._take_messages)
        self.check_soon()

    def check_soon(self) -> None:
        """Receive messages soon, if there are any."""
        if not self._pass_is_due and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._pass_is_due = True
            self._loop.call_soon(self._take_messages)

    def close(self) -> None:
        """Stop receiving. Call this before you close the socket."""
        self._loop.remove_reader(self._descriptor)
        self._descriptor = -1

    def _take_messages(self) -> None:
        self._pass_is_due = False
        try:
            for _ in range(PASS_MESSAGES):
                if self._descriptor < 0:
                    return
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_message(frames)
            if self._descriptor >= 0:
                self.check_soon()
        finally:
            self._on_taken()


class NodeChannel:
    """Sends without waiting, and passes every message for this proxy to one callback."""

    def __init__(
        self,
        socket: Socket,
        identity: str,
        on_message: Callable[[AnyMessage], None],
        on_taken: Callable[[], None],
        on_gap: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        self._socket = socket
        self._on_gap = on_gap
        # The node's stream may have begun with an earlier channel.
        self._sent, self._received = SentNumbers(), ReceivedNumbers(whole=False)
        self._on_message = on_message
        self._identity = identity
        self._monitor: Socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._watcher = SocketReader(self._monitor, lambda _: on_disconnect())
        self._reader = SocketReader(socket, self._receive_message, on_taken)

    def send_message(self, message: Message) -> bool:
        """Send a message. Returns False if the node is not connected or does not read."""
        data, counting = encode_message(message), is_counted(message)
        # NOTE: we must send every number we take, or the node assumes a lost message.
        frames = [self._sent.number_message(counts=counting), data]
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            self._sent.take_back(counts=counting)
            return False
        self._reader.check_soon()
        return True

    def close(self) -> None:
        if self._socket.closed:
            return
        self._reader.close()
        self._watcher.close()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _receive_message(self, frames: list[bytes]) -> None:
        if len(frames) > 1 and self._detect_loss(frames[0]):
            self._on_gap()
            if self._socket.closed:
                return
        try:
            message = decode_message(frames[-1])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("dropped a malformed message of %d bytes: %s", len(frames[-1]), error)
            return
        if message.to != self._identity:
            return
        try:
            self._on_message(message)
        except Exception:  # one bad message must not silence the node
            logger.exception("cannot handle %s of %s", type(message).__name__, message.sender)

    def _detect_loss(self, number: bytes) -> bool:
        try:
            return self._received.detect_loss(number)
        except ValueError as error:
            logger.warning("%s", error)
            return False
