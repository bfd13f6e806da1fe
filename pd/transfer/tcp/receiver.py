"""Receiving side of one room over tcp."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.pool_memory import InPlace
from pd.transfer.rooms.receiver import CountedReceiver
from pd.transfer.tcp.host_buffers import Tables

if TYPE_CHECKING:
    from pd.transfer.base import IntArray
    from pd.transfer.pool_shape import MissingTokens
    from pd.transfer.tcp.inbox import TcpInbox


class TcpReceiver(CountedReceiver):
    """Written to by the inbox's thread and by copies that it began.

    Attributes:
        tables, in_place: the pages, for pools in a GPU's and in the host's memory.
    """

    def __init__(
        self,
        inbox: TcpInbox,
        peer: str,
        room: bytes,
        epoch: int,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(inbox.memory.shape, inbox.patience, peer, room, epoch, pages, tokens)
        pages = pages.copy()
        self.tables, self.in_place = Tables(pages, tokens.stop), InPlace(inbox.memory, pages)
        self._inbox = inbox
        # Bytes that have reached this node; ``_received`` counts those in the pages.
        self._arrived = 0

    def arrived(self, num_bytes: int) -> None:
        """A frame has arrived completely, so that it does not need its connection any more."""
        with self._lock:
            self._arrived += num_bytes
            self._progress = time.monotonic()

    def lost(self, connection: int, reason: str) -> None:
        """A connection ended; if this room lacks bytes, they may have been lost with it."""
        if connection in self.sources and self._arrived < self._expected:
            self.fail(TransferError(f"a data connection from node {self.peer} was lost: {reason}"))

    def _remove(self) -> None:
        self._inbox.remove(self)
