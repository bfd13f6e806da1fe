"""The message socket to one instance of a node."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from pd.core.cluster_key import curve_client_keypair, curve_server_keypair
from pd.core.messages import MAX_MESSAGE_BYTES, AnyMessage, Message, counts, decode, encode
from pd.core.numbering import Received, Sent

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
S = TypeVar("S", bound="zmq.Socket[Any]")

# Messages that may wait for a node that does not read; beyond it the node counts as failed.
_SEND_QUEUE = 4096


class Sockets:
    """Opens channels: one ZMQ context, this proxy's identity and keys."""

    def __init__(self, instance_id: str, cluster_key: bytes | None) -> None:
        self.instance_id = instance_id
        self._context = zmq.asyncio.Context()
        self._cluster_key = cluster_key

    def open(
        self,
        endpoint: str,
        node: str,
        on_message: Callable[[AnyMessage], None],
        on_gap: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> NodeChannel:
        """Connect to a node's ROUTER. Raises zmq.ZMQError for an endpoint that makes no sense.

        ``node``: its instance id. With a cluster key no other node's ROUTER takes the connection,
        so whoever names a foreign endpoint cannot have this proxy's stream there replaced.

        ``on_gap``: called before a message when others before it were lost. ``on_disconnect``:
        called when a connection ends; it is made again if the node lives.
        """
        socket = self.connect(self._context, self.instance_id, endpoint, node)
        return NodeChannel(socket, self.instance_id, on_message, on_gap, on_disconnect)

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


class NodeChannel:
    """Sends without waiting and hands every message of this proxy to one callback."""

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        identity: str,
        on_message: Callable[[AnyMessage], None],
        on_gap: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        self._socket = socket
        self._on_gap, self._on_disconnect = on_gap, on_disconnect
        # The node's stream began with an earlier channel, maybe.
        self._sent, self._received = Sent(), Received(whole=False)
        self._on_message = on_message
        self._identity = identity
        self._reader = asyncio.create_task(self._read())
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._watcher = asyncio.create_task(self._watch())

    def send(self, message: Message) -> bool:
        """Whether the message was taken; not if the node is not connected or does not read."""
        counting = counts(message)
        frames = [self._sent.number(counts=counting), encode(message)]
        sent = self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        # With NOBLOCK the future is done already.
        if cast("asyncio.Future[None]", sent).exception() is None:
            return True
        self._sent.take_back(counts=counting)
        return False

    def close(self) -> None:
        if self._socket.closed:
            return
        self._reader.cancel()
        self._watcher.cancel()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    async def _watch(self) -> None:
        while True:
            await self._monitor.recv_multipart()
            self._on_disconnect()

    async def _read(self) -> None:
        while True:
            try:
                frames = await self._socket.recv_multipart()
            except zmq.ZMQError:
                if self._socket.closed:
                    return
                raise
            if len(frames) > 1 and self._lacks(frames[0]):
                self._on_gap()
                if self._socket.closed:
                    return
            try:
                message = decode(frames[-1])
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                log.warning("dropped a malformed message of %d bytes: %s", len(frames[-1]), error)
                continue
            if message.to != self._identity:
                continue
            try:
                self._on_message(message)
            except Exception:  # one bad message must not silence the node
                log.exception("failed to handle %s of %s", type(message).__name__, message.sender)

    def _lacks(self, number: bytes) -> bool:
        try:
            return self._received.missing(number)
        except ValueError as error:
            log.warning("%s", error)
            return False
