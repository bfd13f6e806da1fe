"""Sending side of one room over tcp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pd.transfer.common.sender import QueuedSender, SenderLink
from pd.transfer.pool_memory import InPlace
from pd.transfer.tcp.frames import HEADER, MAX_PAYLOAD, encode_header
from pd.transfer.tcp.host_buffers import Tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.messages import Reservation
    from pd.transfer.computed import Computed
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_memory import PoolMemory, Stretches
    from pd.transfer.pool_shape import MissingTokens
    from pd.transfer.ranges import Block

# Large enough to make headers and lookups cheap, small enough for rooms to take turns on the link.
FRAME_BYTES = MAX_PAYLOAD


class ProgressLink(SenderLink, Protocol):
    """A link that notes when the peer last took some bytes, by ``time.monotonic``."""

    progress: float


class TcpSender(QueuedSender[ProgressLink]):
    """Reads a block from the pool when its turn comes.

    The pages are free when the call that copies them into the kernel has returned. If the pool is
    staged, they are free when the host has observed the end of the copy into host memory.

    Attributes:
        lanes: numbers of the lanes that took a block of this room.
        tables: page table for copies to the host.
    """

    def __init__(
        self,
        link: ProgressLink,
        memory: PoolMemory,
        computed: Computed,
        reservation: Reservation,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(link, memory.shape, computed.call_when_done, reservation, tokens)
        self.lanes: set[int] = set()
        pages = pages.copy()
        self.tables = Tables(pages, tokens.stop)
        self._in_place = InPlace(memory, pages, HEADER.size)

    # ---- called by a lane, without the lock

    def make_header(self, block: Block) -> bytes:
        return encode_header(self.room, self.epoch, block, self._shape.num_bytes(block))

    def locate_block(self, block: Block) -> Stretches:
        return self._in_place.locate_block(block, self.make_header(block))

    # ---- with the lock

    def _split_block(self, block: Block) -> Iterator[Block]:
        return block.split(max(1, FRAME_BYTES // self._shape.plane_of(block).cell_bytes))

    def _stalled_since(self) -> float | None:
        if not self.has_queued and not self.sending:
            return None
        return max(self._link.progress, self.waiting_since)
