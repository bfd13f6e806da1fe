"""Receiving side of one room over tcp."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.common.receiver import CountedReceiver
from pd.transfer.pool_memory import InPlace
from pd.transfer.tcp.host_buffers import Tables

if TYPE_CHECKING:
    from pd.transfer.common.receiver import ReceiverOwner
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_memory import PoolMemory
    from pd.transfer.pool_shape import MissingTokens


class TcpReceiver(CountedReceiver):
    """Written by the inbox's thread and by the copies it began.

    Attributes:
        tables, in_place: the pages, for pools in a GPU's and in the host's memory.
    """

    def __init__(
        self,
        owner: ReceiverOwner,
        memory: PoolMemory,
        peer: str,
        room: bytes,
        epoch: int,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(owner, memory.shape, peer, room, epoch, tokens)
        pages = pages.copy()
        self.tables, self.in_place = Tables(pages, tokens.stop), InPlace(memory, pages)
        # Bytes on this node. ``_received`` counts only those in the pages.
        self._arrived = 0

    def on_frame_arrived(self, num_bytes: int) -> None:
        """Note that a frame has arrived completely and no longer needs its connection."""
        with self._lock:
            self._arrived += num_bytes
            self._progress = time.monotonic()

    def on_connection_lost(self, connection: int, reason: str) -> None:
        """Fail the room if it lacks bytes, because a connection that ended may have lost them."""
        if connection in self.sources and self._arrived < self._expected:
            self.fail(TransferError(f"a data connection from node {self.peer} was lost: {reason}"))
