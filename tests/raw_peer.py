"""A process that says to a node whatever a test likes."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import zmq

from pd.core.messages import Message, ProxyHeartbeat, decode_message, encode_message
from pd.net.cluster_key import derive_client_keypair, derive_server_keypair

if TYPE_CHECKING:
    from pd.core.messages import AnyMessage
    from pd.launch import NodeServer

# Aborts reach a reachable peer in under a second; on a busy machine it must at least be before a
# lease ends, which would end the room too.
SOON = 3.0


def receive_kind(
    socket: zmq.Socket[bytes],
    kind: type[Message],
    timeout: float,
    seen: list[AnyMessage],
    unread: list[AnyMessage],
) -> Any:
    """Receive the next message of a kind.

    Args:
        seen: gets all messages.
        unread: gets those of other kinds, for later calls.
    """
    deadline = time.monotonic() + timeout
    while True:
        for message in unread:
            if isinstance(message, kind):
                unread.remove(message)
                return message
        left = deadline - time.monotonic()
        assert left > 0, f"no {kind.__name__} within {timeout} s, only {seen}"
        if socket.poll(int(left * 1000) + 1):
            message = decode_message(socket.recv_multipart()[-1])
            seen.append(message)
            unread.append(message)


class RawPeer:
    """A DEALER with an identity of its choice; reads and writes messages, or bytes.

    ``node``: instance id of the node that listens, which matters with a cluster key only.
    """

    def __init__(
        self,
        endpoint: str,
        identity: str = "raw-peer",
        cluster_key: bytes | None = None,
        *,
        node: str = "",
    ) -> None:
        self.name = identity
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        if cluster_key is not None:
            public, secret = derive_client_keypair(cluster_key)
            self._socket.curve_serverkey, _ = derive_server_keypair(cluster_key, node)
            self._socket.curve_publickey = public
            self._socket.curve_secretkey = secret
        self._socket.connect(endpoint)
        self.seen: list[AnyMessage] = []
        self._unread: list[AnyMessage] = []

    def send(self, message: Message) -> None:
        self.send_bytes(encode_message(message))

    def send_bytes(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def beat(self) -> None:
        """Send a proxy's heartbeat, which every node answers."""
        self.send(ProxyHeartbeat(to="", sender=self.name))

    def receive(self, kind: type[Message], timeout: float = 5.0) -> Any:
        """Return the next message of a kind. Others stay for later calls, and ``seen`` has all of
        them."""
        return receive_kind(self._socket, kind, timeout, self.seen, self._unread)

    def answers(self, kind: type[Message], timeout: float) -> bool:
        """Return whether a message of this kind arrives."""
        try:
            self.receive(kind, timeout)
        except AssertionError:
            return False
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def proxy_of(server: NodeServer, name: str = "") -> RawPeer:
    """Make a proxy that talks to one node."""
    name = name or f"proxy-{secrets.token_hex(4)}"
    key = server.config.cluster_key
    return RawPeer(server.node.endpoint, name, key, node=server.instance_id)
