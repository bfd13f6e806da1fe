"""Messages between the two ends of a staged link, over its channel. Where the name of a class
differs from its tag, the wire keeps the tag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from pd.core.messages import ROOM_BYTES
from pd.transfer.ranges import Block
from pd.transfer.wire.errors import PeerDataError

if TYPE_CHECKING:
    from pd.transfer.pool_shape import PoolShape

VERSION = 3
MAX_BUFFERS = 256
MAX_BUFFER_BYTES = 256 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_Buffers = Annotated[int, msgspec.Meta(ge=1, le=MAX_BUFFERS)]
_BufferBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BUFFER_BYTES)]
_Buffer = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BUFFERS)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class _Note(msgspec.Struct, tag=True, forbid_unknown_fields=True, array_like=True):
    pass


# ---- P to D


class Open(_Note):
    """P asks for staging buffers.

    Attributes:
        count, buffer_bytes: number and size that P would like.
        device: whether P's pool lies in CUDA memory.
        host: P's host, see :func:`pd.transfer.host_id.host_id`.
    """

    version: int
    count: _Buffers
    buffer_bytes: _BufferBytes
    device: bool
    host: _Text


class Prepared(_Note):
    """P has prepared everything but memory for buffers. It opens the link for the first room."""


class Waiting(_Note):
    """P's library may need D to drive its own, until ``waits`` is False."""

    waits: bool


class Filled(_Note):
    """A buffer of D holds a complete block."""

    buffer: _Buffer
    room: Annotated[bytes, msgspec.Meta(min_length=ROOM_BYTES, max_length=ROOM_BYTES)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    token_start: _Count
    token_stop: _Count
    layer_start: _Count
    layer_stop: _Count

    @property
    def block(self) -> Block:
        return Block(self.token_start, self.token_stop, self.layer_start, self.layer_stop)

    def check_fits(self, shape: PoolShape, buffer_bytes: int) -> None:
        """Raise PeerDataError naming an impossible value."""
        tokens, layers = self.token_stop - self.token_start, self.layer_stop - self.layer_start
        if tokens <= 0 or not shape.is_in_one_plane(self.block):
            raise PeerDataError(
                f"tokens [{self.token_start}, {self.token_stop}) of layers [{self.layer_start}, "
                f"{self.layer_stop}) are no block of {shape}"
            )
        if shape.num_bytes(self.block) > buffer_bytes:
            raise PeerDataError(f"{tokens} tokens of {layers} layers do not fit in a buffer")


class FilledBuffers(_Note, tag="FilledSlots"):
    """Buffers filled since the last message."""

    notes: Annotated[list[Filled], msgspec.Meta(min_length=1, max_length=MAX_BUFFERS)]


class Leaving(_Note):
    """P ends the link. The channel's end follows when nothing can land any more.

    ``returns``: P will send rooms of which nothing was sent over another link.
    """

    reason: _Text
    returns: bool


class LinkDrained(_Note, tag="Drained"):
    """Nothing can land any more. The channel's end follows."""


# ---- D to P


class BuffersReady(_Note, tag="Ready"):
    """D's buffers are registered.

    Attributes:
        count, buffer_bytes: at most the wishes of P.
        device: whether they lie in CUDA memory, as P's must then.
        description: describes the buffers for P's library.
    """

    count: _Buffers
    buffer_bytes: _BufferBytes
    device: bool
    description: Annotated[bytes, msgspec.Meta(max_length=64 << 10)]


class Refused(_Note):
    """D makes no buffers. P may try again later."""

    reason: _Text


class Freed(_Note):
    """D has read these buffers, so P may write them again."""

    buffers: Annotated[list[_Buffer], msgspec.Meta(min_length=1, max_length=MAX_BUFFERS)]


ToDecode: TypeAlias = Open | Prepared | Waiting | FilledBuffers | Leaving | LinkDrained
ToPrefill: TypeAlias = BuffersReady | Refused | Freed
decoder: msgspec.msgpack.Decoder[ToDecode | ToPrefill] = msgspec.msgpack.Decoder(
    ToDecode | ToPrefill
)
