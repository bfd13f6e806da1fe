"""A decode node reduced to its messages and its data connection, to test prefill nodes with."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from raw_peer import RawPeer

from pd.bootstrap.client import handshake
from pd.core.errors import NodeFailedError
from pd.core.messages import (
    AbortRoom,
    CommitAck,
    ErrorInfo,
    GrammarReady,
    PeerHeartbeat,
    Reservation,
)
from pd.core.node_info import NodeInfo
from pd.engine.kv_pool import KVPool
from pd.transfer.registry import make_transfer_manager

if TYPE_CHECKING:
    from pd.launch import NodeServer
    from pd.transfer.base import Receiver

POOL_PAGES = 64


class DecodePeer(RawPeer):
    """Shakes hands as ``name``, and then sends only a test's messages."""

    def __init__(
        self,
        prefill: NodeServer,
        name: str = "decode-1",
        backend: str = "tcp",
        *,
        silent: bool = False,
    ) -> None:
        super().__init__(prefill.node.endpoint, name)
        self.prefill = prefill
        layout = prefill.node.engine.layout
        self.pool = KVPool(layout, POOL_PAGES, "cpu")
        self.transfer = make_transfer_manager(backend, self.pool, name)
        self._epochs = itertools.count(1000)
        self._info = NodeInfo(
            instance_id=name,
            role="decode",
            model_id=prefill.node.engine.model_id,
            kv=layout,
            endpoint=f"tcp://{name}",
            bootstrap="",
            transfers=self.transfer.addresses(),
        )
        self.shake_hands()
        if not silent:
            self.live()

    def shake_hands(self) -> None:
        to = self.prefill.instance_id
        self.transfer.connect(
            handshake(self.prefill.bootstrap_url, self._info, expected_instance=to)
        )

    def live(self) -> None:
        """Send one heartbeat."""
        self.send(PeerHeartbeat(to=self.prefill.instance_id, sender=self.name))

    def has_grammar(self, room: bytes) -> None:
        self.send(GrammarReady(to=self.prefill.instance_id, sender=self.name, room=room))

    def reserve(
        self, room: bytes, prompt_len: int, *, epoch: int | None = None, cached: int = 0
    ) -> tuple[int, Receiver]:
        """Send a reservation; returns its epoch and the receiver."""
        epoch = next(self._epochs) if epoch is None else epoch
        pages = np.arange(POOL_PAGES, dtype=np.int32)
        receiver = self.transfer.receiver(
            self.prefill.instance_id, room, epoch, pages, (cached,), prompt_len
        )
        self.say(Reservation, room, epoch, cached=(cached,), destination=receiver.destination)
        return epoch, receiver

    def acknowledge(self, room: bytes, epoch: int) -> None:
        self.say(CommitAck, room, epoch)

    def give_up(self, room: bytes, epoch: int, error: Any = None) -> None:
        """Ask for the drain of a room."""
        error = error or NodeFailedError("the test gave the room up")
        self.say(AbortRoom, room, epoch, error=ErrorInfo(error.kind, error.message))

    def say(self, kind: Any, room: bytes, epoch: int, **fields: Any) -> None:
        to = self.prefill.instance_id
        self.send(kind(to=to, sender=self.name, room=room, epoch=epoch, **fields))

    def close(self) -> None:
        super().close()
        self.transfer.close()
