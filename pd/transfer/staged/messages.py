"""What the two ends of a staged link say to each other over their channel."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from pd.core.messages import ROOM_BYTES
from pd.transfer.ranges import Block
from pd.transfer.wire.errors import PeerDataError

VERSION = 3
MAX_SLOTS = 256
MAX_SLOT_BYTES = 256 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_Slots = Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]
_SlotBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOT_BYTES)]
_Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class _Note(msgspec.Struct, tag=True, forbid_unknown_fields=True, array_like=True):
    pass


# ---- P to D


class Open(_Note):
    """Make me slots.

    Attributes:
        count, slot_bytes: how many and how large they would best be.
        device: P's pool lies in CUDA memory.
        host: P's host, see :func:`pd.transfer.host_id.host_id`.
    """

    version: int
    count: _Slots
    slot_bytes: _SlotBytes
    device: bool
    host: _Text


class Prepared(_Note):
    """P has ready what slots need besides memory, and opens the link when a room is there."""


class Waiting(_Note):
    """The library on P may need D's to go on; until ``waits`` is False."""

    waits: bool


class Filled(_Note):
    """A slot holds a block, whose bytes have all arrived."""

    slot: _Slot
    room: Annotated[bytes, msgspec.Meta(min_length=ROOM_BYTES, max_length=ROOM_BYTES)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    token_start: _Count
    token_stop: _Count
    layer_start: _Count
    layer_stop: _Count

    @property
    def block(self) -> Block:
        return Block(self.token_start, self.token_stop, self.layer_start, self.layer_stop)

    def check(self, num_layers: int, max_cells: int) -> None:
        """Raise PeerDataError naming the value that cannot be."""
        tokens, layers = self.token_stop - self.token_start, self.layer_stop - self.layer_start
        if tokens <= 0 or layers <= 0 or self.layer_stop > num_layers:
            raise PeerDataError(
                f"tokens [{self.token_start}, {self.token_stop}) of layers [{self.layer_start}, "
                f"{self.layer_stop}) are no block of {num_layers} layers"
            )
        if tokens * layers > max_cells:
            raise PeerDataError(f"{tokens} tokens of {layers} layers do not fit in a slot")


class FilledSlots(_Note):
    """Several at once."""

    notes: Annotated[list[Filled], msgspec.Meta(min_length=1, max_length=MAX_SLOTS)]


class Leaving(_Note):
    """P gave the link up; the channel's end follows when nothing can land any more.

    ``returns``: rooms of which nothing was sent will be sent over another link.
    """

    reason: _Text
    returns: bool


class LinkDrained(_Note, tag="Drained"):
    """Nothing can land any more; the channel's end follows."""


# ---- D to P


class BuffersReady(_Note, tag="Ready"):
    """The slots are there.

    Attributes:
        count, slot_bytes: at most what was asked for.
        device: they lie in CUDA memory, and so must P's.
        description: for the library.
    """

    count: _Slots
    slot_bytes: _SlotBytes
    device: bool
    description: Annotated[bytes, msgspec.Meta(max_length=64 << 10)]


class Refused(_Note):
    """There will be no slots; try again later."""

    reason: _Text


class Freed(_Note):
    """These slots may be written again."""

    slots: Annotated[list[_Slot], msgspec.Meta(min_length=1, max_length=MAX_SLOTS)]


ToDecode: TypeAlias = Open | Prepared | Waiting | FilledSlots | Leaving | LinkDrained
ToPrefill: TypeAlias = BuffersReady | Refused | Freed
decoder: msgspec.msgpack.Decoder[ToDecode | ToPrefill] = msgspec.msgpack.Decoder(
    ToDecode | ToPrefill
)
