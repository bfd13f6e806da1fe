"""Messages and published addresses of the nvlink backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pd.core.errors import TransferError
from pd.kernels.paging import find_token_slots
from pd.transfer.ranges import check_pages
from pd.transfer.wire.greeting import peer_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.core.node_info import KVLayout
    from pd.transfer.kv_buffer import IntArray

MAX_PAGE_SIZE = 1 << 20


class SessionWelcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    """D to P, the only message of the channel: P may store for reservations of this session now."""

    session: int


welcome_decoder = msgspec.msgpack.Decoder(SessionWelcome)


class NvlinkDestination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The destination of a room's tokens, carried by ``Reservation.destination``.

    Attributes:
        session: number of the session in which the destination is valid.
        pages: little-endian int32 page table of the whole sequence.
    """

    session: int
    page_size: int
    token_start: int
    token_stop: int
    pages: bytes

    def compute_slots(self, num_slots: int) -> IntArray:
        """Return the slots of tokens ``[token_start, token_stop)`` in a pool of ``num_slots``.
        Raises ValueError if one lies outside, or for another fault."""
        if not 0 < self.page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page size {self.page_size}")
        if len(self.pages) % 4:
            raise ValueError(f"a page table of {len(self.pages)} bytes")
        pages = np.frombuffer(self.pages, dtype="<i4").astype(np.int32)
        check_pages(pages, self.page_size, num_slots, self.token_start, self.token_stop)
        tokens = np.arange(self.token_start, self.token_stop)
        return find_token_slots(pages, tokens, self.page_size).astype(np.int32)


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
