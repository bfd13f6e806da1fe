"""Messages and published addresses of the nvlink backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pd.core.errors import TransferError
from pd.kernels.paging import find_token_slots
from pd.transfer.wire.greeting import peer_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.core.node_info import KVLayout
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_shape import MissingTokens, PoolShape

MAX_PAGE_SIZE = 1 << 20


class SessionWelcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    """D to P, the only message of the channel: P may store for reservations of this session now."""

    session: int


welcome_decoder = msgspec.msgpack.Decoder(SessionWelcome)


class NvlinkDestination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The destination of a room's tokens, carried by ``Reservation.destination``.

    Attributes:
        session: number of the session in which the destination is valid.
        pages: little-endian int32 page tables of the whole sequence, one after the other.
    """

    session: int
    page_size: int
    token_start: int
    token_stop: int
    pages: bytes

    def compute_slots(self, num_slots: int, shape: PoolShape, tokens: MissingTokens) -> IntArray:
        """Return the slots of tokens in a pool of ``num_slots`` with planes like those of
        ``shape``, see :func:`find_slots`. Raises ValueError if one lies outside, or for another
        fault."""
        if not 0 < self.page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page size {self.page_size}")
        if len(self.pages) % (4 * shape.num_tables):
            raise ValueError(f"a page table of {len(self.pages) / shape.num_tables:g} bytes")
        pages = np.frombuffer(self.pages, dtype="<i4").astype(np.int32)
        if shape.num_tables > 1:
            pages = pages.reshape(shape.num_tables, -1)
        shape.check_peer_pages(pages, self.page_size, num_slots, tokens)
        return find_slots(pages, tokens, self.page_size)


def find_slots(pages: IntArray, tokens: MissingTokens, page_size: int) -> IntArray:
    """Return the slots of all tokens missing in some plane, int32, in each page table. Those of
    freed pages are meaningless."""
    positions = np.arange(tokens.start, tokens.stop)
    tables = np.atleast_2d(pages)
    slots = [find_token_slots(table, positions, page_size) for table in tables]
    return np.concatenate(slots).astype(np.int32)


_destination_decoder = msgspec.msgpack.Decoder(NvlinkDestination)


def parse_destination(data: bytes, peer: str) -> NvlinkDestination:
    """Decode a destination. Raises TransferError if it is invalid."""
    try:
        return _destination_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise TransferError(f"{peer} sent an invalid destination: {error}") from error


@dataclass(frozen=True, slots=True)
class PeerPool:
    """A peer's pool and the address of its channel, as published in the handshake.

    Attributes:
        offset: position of the pool in the memory named by ``handle``.
        plane_offsets: position of each plane in the pool.
    """

    address: tuple[str, int]
    handle: bytes
    offset: int
    num_slots: int
    plane_offsets: tuple[int, ...]

    @classmethod
    def from_published(
        cls, published: Mapping[str, str], peer: str, key: bytes | None, layout: KVLayout
    ) -> PeerPool:
        """Parse published values. Raises TransferError naming the fault."""
        address = peer_address(dict(published), peer, key)
        try:
            handle = bytes.fromhex(published.get("handle", ""))
            offset, num_slots = int(published["offset"]), int(published["num_slots"])
        except (KeyError, ValueError) as error:
            raise TransferError(f"{peer} published no pool that can be mapped: {error}") from error
        # Slots travel as int32.
        if offset < 0 or not 0 < num_slots < 1 << 31:
            raise TransferError(f"{peer} published {num_slots} slots at offset {offset}")
        planes = tuple(extent.start for extent in layout.plane_extents(num_slots))
        return cls(address, handle, offset, num_slots, planes)
