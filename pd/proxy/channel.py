"""The message socket to one instance of a node."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from pd.core.cluster_key import curve_client_keypair, curve_server_keypair
from pd.core.messages import MAX_MESSAGE_BYTES, AnyMessage, Message, counts, decode, encode
from pd.core.numbering import Received, Sent

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
S = TypeVar("S", bound="zmq.Socket[Any]")

Socket = zmq.Socket[bytes]

# Messages that may wait for a node that does not read; beyond it the node counts as failed.
_SEND_QUEUE = 4096
# Messages of a socket that are taken before the event loop turns to others.
PASS_MESSAGES = 64


class Sockets:
    """Opens channels: one ZMQ context, this proxy's identity and keys."""

    def __init__(self, instance_id: str, cluster_key: bytes | None) -> None:
        self.instance_id = instance_id
        self._context: zmq.Context[Socket] = zmq.Context()
        self._cluster_key = cluster_key

    def open(
        self,
        endpoint: str,
        node: str,
        on_message: Callable[[AnyMessage], None],
        on_taken: Callable[[], None],
        on_gap: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> NodeChannel:
        """Connect to a node's ROUTER. Raises zmq.ZMQError for an endpoint that makes no sense.

        ``node``: its instance id. With a cluster key no other node's ROUTER takes the connection,
        so whoever names a foreign endpoint cannot have this proxy's stream there replaced.

        ``on_taken``: called when those messages that were there have been handed to ``on_message``,
        up to PASS_MESSAGES of them. ``on_gap``: called before a message when others before it were
        lost. ``on_disconnect``: called when a connection ends; it is made again if the node lives.
        """
        socket = self.connect(self._context, self.instance_id, endpoint, node)
        return NodeChannel(socket, self.instance_id, on_message, on_taken, on_gap, on_disconnect)

    def connect(self, context: zmq.Context[S], identity: str, endpoint: str, node: str) -> S:
        """A socket of ``context`` that is (or will be) connected to the ROUTER of ``node``.

        From any thread; raises as :meth:`open` does.
        """
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.IPV6, "[" in endpoint)
        socket.set(zmq.IDENTITY, identity.encode())
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)  # refuse at once what no connection is there for
        socket.set(zmq.SNDHWM, _SEND_QUEUE)
        socket.set(zmq.RCVHWM, 0)  # a dropped output would be a gap; the loop below always reads
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
        if self._cluster_key is not None:
            public, secret = curve_client_keypair(self._cluster_key)
            socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, secret)
            theirs, _ = curve_server_keypair(self._cluster_key, node)
            socket.set(zmq.CURVE_SERVERKEY, theirs)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def close(self) -> None:
        """Call after all channels are closed."""
        self._context.destroy(linger=0)


class SocketReader:
    """Hands the messages of a ZMQ socket to a callback, on the event loop that runs.

    NOTE: a ZMQ socket's descriptor does not say that there are messages. It becomes readable once
    when something has happened to the socket, and any call of the socket's may take note of that.
    So messages are received until there are none, and :meth:`look` follows each other call.

    Args:
        on_message: gets the frames of a message. It may close the reader.
        on_taken: called after the messages that were there, or PASS_MESSAGES of them.
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
        self._loop.add_reader(self._descriptor, self._take)
        self.look()

    def look(self) -> None:
        """Have messages taken soon if there are any."""
        if not self._pass_is_due and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._pass_is_due = True
            self._loop.call_soon(self._take)

    def close(self) -> None:
        """Take nothing more. Call before the socket is closed."""
        self._loop.remove_reader(self._descriptor)
        self._descriptor = -1

    def _take(self) -> None:
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
                self.look()
        finally:
            self._on_taken()


class NodeChannel:
    """Sends without waiting and hands every message of this proxy to one callback."""

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
        # The node's stream began with an earlier channel, maybe.
        self._sent, self._received = Sent(), Received(whole=False)
        self._on_message = on_message
        self._identity = identity
        self._monitor: Socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._watcher = SocketReader(self._monitor, lambda _: on_disconnect())
        self._reader = SocketReader(socket, self._receive, on_taken)

    def send(self, message: Message) -> bool:
        """Whether the message was taken; not if the node is not connected or does not read."""
        data, counting = encode(message), counts(message)
        # NOTE: a number that is taken must be sent, or the node takes the message for lost.
        frames = [self._sent.number(counts=counting), data]
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            self._sent.take_back(counts=counting)
            return False
        self._reader.look()
        return True

    def close(self) -> None:
        if self._socket.closed:
            return
        self._reader.close()
        self._watcher.close()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) > 1 and self._lacks(frames[0]):
            self._on_gap()
            if self._socket.closed:
                return
        try:
            message = decode(frames[-1])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("dropped a malformed message of %d bytes: %s", len(frames[-1]), error)
            return
        if message.to != self._identity:
            return
        try:
            self._on_message(message)
        except Exception:  # one bad message must not silence the node
            logger.exception("failed to handle %s of %s", type(message).__name__, message.sender)

    def _lacks(self, number: bytes) -> bool:
        try:
            return self._received.missing(number)
        except ValueError as error:
            logger.warning("%s", error)
            return False
