"""Messages and published addresses of the nvlink backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pd.core.errors import TransferError
from pd.kernels.paging import token_slots
from pd.transfer.ranges import check_pages
from pd.transfer.wire.greeting import peer_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.core.node_info import KVLayout
    from pd.transfer.base import IntArray

MAX_PAGE_SIZE = 1 << 20


class SessionWelcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    """D to P, the only message of the channel: reservations of this session may be stored now."""

    session: int


welcome_decoder = msgspec.msgpack.Decoder(SessionWelcome)


class NvlinkDestination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The destination of a room's tokens, as carried by ``Reservation.destination``.

    Attributes:
        session: number of the session in which the destination is valid.
        pages: little-endian int32 page table of the whole sequence.
    """

    session: int
    page_size: int
    token_start: int
    token_stop: int
    pages: bytes

    def slots(self, num_slots: int) -> IntArray:
        """The slots of tokens ``[token_start, token_stop)``; all inside a pool of ``num_slots``.

        Raises ValueError naming what is wrong.
        """
        if not 0 < self.page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page size {self.page_size}")
        if len(self.pages) % 4:
            raise ValueError(f"a page table of {len(self.pages)} bytes")
        pages = np.frombuffer(self.pages, dtype="<i4").astype(np.int32)
        check_pages(pages, self.page_size, num_slots, self.token_start, self.token_stop)
        tokens = np.arange(self.token_start, self.token_stop)
        return token_slots(pages, tokens, self.page_size).astype(np.int32)


_destination_decoder = msgspec.msgpack.Decoder(NvlinkDestination)


def parse_destination(data: bytes, peer: str) -> NvlinkDestination:
    """Raises TransferError unless it is one."""
    try:
        return _destination_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise TransferError(f"{peer} sent a destination that is none: {error}") from error


@dataclass(frozen=True, slots=True)
class PeerPool:
    """The address of a peer's channel and its pool, as published in the handshake.

    Attributes:
        offset: where the pool begins in the memory that ``handle`` stands for.
        plane_offsets: where each of its planes begins in the pool.
    """

    address: tuple[str, int]
    handle: bytes
    offset: int
    num_slots: int
    plane_offsets: tuple[int, ...]

    @classmethod
    def parse(
        cls, published: Mapping[str, str], peer: str, key: bytes | None, layout: KVLayout
    ) -> PeerPool:
        """Raises TransferError naming what is wrong."""
        address = peer_address(dict(published), peer, key)
        try:
            handle = bytes.fromhex(published.get("handle", ""))
            offset, num_slots = int(published["offset"]), int(published["num_slots"])
        except (KeyError, ValueError) as error:
            raise TransferError(f"{peer} published no pool that can be mapped: {error}") from error
        # Slots travel as int32.
        if offset < 0 or not 0 < num_slots < 1 << 31:
            raise TransferError(f"{peer} published {num_slots} slots at offset {offset}")
        planes = tuple(extent.start for extent in layout.extents(num_slots))
        return cls(address, handle, offset, num_slots, planes)
