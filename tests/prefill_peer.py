"""A prefill node reduced to its registry, messages and data, to test decode nodes with."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zmq
from raw_peer import receive_kind

from pd.bootstrap.registry import Registry
from pd.bootstrap.server import make_bootstrap_app
from pd.core.messages import (
    AbortRoom,
    Commit,
    Drained,
    ErrorInfo,
    FirstToken,
    GrammarReady,
    Message,
    PeerHeartbeat,
    Reservation,
    encode_message,
)
from pd.core.node_info import NodeInfo
from pd.engine.kv_pool import KVPool
from pd.net.http_server import HttpServers, open_listener
from pd.speculative.choice import describe_drafter
from pd.transfer.base import TransferState
from pd.transfer.registry import make_transfer_manager

if TYPE_CHECKING:
    from pd.core.messages import AnyMessage
    from pd.launch import NodeServer
    from pd.transfer.base import Sender

POOL_PAGES = 64


class PrefillPeer:
    """Answers handshakes. A test sends everything else.

    Its pool is full of ones, so that received memory differs from unwritten memory.
    """

    def __init__(self, decode_node: NodeServer, backend: str = "tcp", endpoint: str = "") -> None:
        node = decode_node.node
        self.decode_node = decode_node
        self.name = f"prefill-{secrets.token_hex(4)}"
        self.pool = KVPool(node.engine.layout, POOL_PAGES, "cpu")
        for plane in self.pool.planes:
            plane.buffer.fill_(1.0)
        self.transfer = make_transfer_manager(backend, self.pool, self.name)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        # As nodes do: a decode node that comes back may be there before its old connection ends.
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        socket = open_listener("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        info = NodeInfo(
            instance_id=self.name,
            role="prefill",
            model_id=node.engine.model_id,
            kv=node.engine.layout,
            endpoint=endpoint or f"tcp://127.0.0.1:{port}",
            bootstrap=self.url,
            transfers=self.transfer.addresses(),
            drafter=describe_drafter(node.core.config, node.engine),
        )
        self.registry = Registry(info, connect=self.transfer.connect)
        self.registry.set_ready()
        self._http = HttpServers([(make_bootstrap_app(self.registry), socket)])
        self._http.start()
        self.seen: list[AnyMessage] = []
        self._unread: list[AnyMessage] = []

    def send(self, message: Message) -> None:
        self._router.send_multipart(
            [self.decode_node.instance_id.encode(), encode_message(message)]
        )

    def say(self, kind: Any, room: bytes, epoch: int, **fields: Any) -> None:
        to = self.decode_node.instance_id
        self.send(kind(to=to, sender=self.name, room=room, epoch=epoch, **fields))

    def live(self) -> None:
        """Send one heartbeat."""
        self.send(PeerHeartbeat(to=self.decode_node.instance_id, sender=self.name))

    def has_grammar(self, room: bytes) -> None:
        to = self.decode_node.instance_id
        self.send(GrammarReady(to=to, sender=self.name, room=room))

    def receive(self, kind: type[Message], timeout: float = 5.0) -> Any:
        """Return the next message of a kind. Others stay for later calls."""
        return receive_kind(self._router, kind, timeout, self.seen, self._unread)

    def push(self, reservation: Reservation, prompt_len: int, *, finish: bool = True) -> Sender:
        """Send all KV of a prompt (of ones) for a reservation."""
        pages = np.arange(POOL_PAGES, dtype=np.int32)
        sender = self.transfer.sender(self.decode_node.instance_id, reservation, pages, prompt_len)
        layers = self.pool.layout.num_layers
        if prompt_len > min(reservation.cached):
            sender.send(min(reservation.cached), prompt_len, 0, layers)
        if finish:
            sender.finish()
            while sender.poll() is TransferState.ACTIVE:
                time.sleep(0.001)
        return sender

    def commit(self, reservation: Reservation, num_bytes: int, **fields: Any) -> None:
        fields = {"first_tokens": [FirstToken(0, 7)], "epoch": reservation.epoch} | fields
        self.say(Commit, reservation.room, num_bytes=num_bytes, **fields)

    def give_up(self, room: bytes, epoch: int, kind: str = "node_failed") -> None:
        self.say(AbortRoom, room, epoch, error=ErrorInfo(kind, "the test gave the room up"))

    def drained(self, room: bytes, epoch: int) -> None:
        self.say(Drained, room, epoch)

    def close(self) -> None:
        self._http.stop()
        self._context.destroy(linger=0)
        self.transfer.close()

    def __enter__(self) -> PrefillPeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_ones(server: NodeServer, pages: np.ndarray) -> bool:
    """Return whether these pages of a decode node hold a PrefillPeer's KV."""
    copies = server.node.engine.pool.gather_pages(pages)
    return all(bool(torch.all(host == 1.0)) for host in copies)
