"""Sending side of one room of the fake backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from pd.core.errors import TransferError
from pd.kernels.paging import count_needed_pages, find_token_slots
from pd.transfer.common.sender import QueuedSender, SenderLink
from pd.transfer.fake.nic import FakeDestination

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.messages import Reservation
    from pd.transfer.computed import Computed
    from pd.transfer.fake.script import Corrupt, FaultScript
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_memory import PoolMemory
    from pd.transfer.pool_shape import MissingTokens
    from pd.transfer.ranges import Block

_WRITE_BYTES = 1 << 20
_destination_decoder = msgspec.msgpack.Decoder(FakeDestination)


class ScriptedLink(SenderLink, Protocol):
    """A link with faults from a script."""

    @property
    def script(self) -> FaultScript: ...


class FakeSender(QueuedSender[ScriptedLink]):
    """Blocks are writes. The link takes them at once, and reads the pages when a write goes out.

    ``reading`` and ``sending`` count writes that may still land, for the first or the second time.
    So the room is not DONE while a duplicate may come, because nobody waits for a drain after a
    commit.

    Args:
        ordinal: number of the room, from 1. The script selects by it.
    """

    def __init__(
        self,
        link: ScriptedLink,
        memory: PoolMemory,
        computed: Computed,
        ordinal: int,
        reservation: Reservation,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(link, memory.shape, computed.call_when_done, reservation, tokens)
        self.ordinal = ordinal
        tables = memory.shape.num_tables
        self.destination = parse_destination(reservation, tokens, tables)
        self._targets = np.frombuffer(self.destination.pages, dtype="<i4").reshape(tables, -1)
        self._memory = memory
        self._pages = pages.copy()
        self.num_writes = 0

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        if self._link.script.fails_room(self._link.peer, self.ordinal):
            self.fail(TransferError(f"fake script: room {self.ordinal} fails"))
        super().send(token_start, token_stop, layer_start, layer_stop)

    def read_block(self, block: Block, corrupt: list[Corrupt]) -> bytes:
        """Return the block's bytes as they are at this moment, as a card would read them."""
        data = self._memory.read_block(self._pages, block)
        tokens = block.token_stop - block.token_start
        plane = self._memory.plane_of(block)
        width = plane.width
        for rule in corrupt:
            vector = int(rule.part == "v")
            here = (
                block.token_start <= rule.token < block.token_stop
                and block.layer_start <= rule.layer < block.layer_stop
                and vector < plane.vectors
            )
            if here:
                slab = plane.vectors * (rule.layer - block.layer_start) + vector
                row = slab * tokens + rule.token - block.token_start
                data[row * width + rule.byte % width] ^= 0xFF
        return bytes(data)

    def encode_slots(self, block: Block) -> bytes:
        """Return the slots of the block's tokens in the peer's pool, little-endian int32."""
        tokens = np.arange(block.token_start, block.token_stop)
        table = self._targets[self._shape.plane_of(block).table]
        slots = find_token_slots(table, tokens, self.destination.page_size)
        return slots.astype("<i4").tobytes()

    # ---- with the lock

    def _split_block(self, block: Block) -> Iterator[Block]:
        return block.split(max(1, _WRITE_BYTES // self._shape.plane_of(block).cell_bytes))


def parse_destination(
    reservation: Reservation, tokens: MissingTokens, tables: int = 1
) -> FakeDestination:
    """Decode a destination. Raises TransferError unless it is one for these tokens, in so many page
    tables."""
    try:
        found = _destination_decoder.decode(reservation.destination)
    except msgspec.DecodeError as error:
        raise TransferError(f"{reservation.sender} sent a bad destination: {error}") from error
    pages = count_needed_pages(tokens.stop, found.page_size) if found.page_size > 0 else -1
    fits = (found.token_start, found.token_stop) == (tokens.start, tokens.stop)
    if not fits or len(found.pages) != 4 * pages * tables:
        raise TransferError(
            f"{reservation.sender} reserved tokens [{found.token_start}, {found.token_stop}) on "
            f"{len(found.pages) // 4} pages of {found.page_size}; those sent "
            f"are [{tokens.start}, {tokens.stop})"
        )
    return found
