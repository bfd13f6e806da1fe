"""The data frame of the tcp backend: a fixed header, then the bytes of one block."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.messages import ROOM_BYTES
from pd.transfer.ranges import Block
from pd.transfer.wire.errors import PeerDataError

if TYPE_CHECKING:
    from pd.transfer.pool_shape import PoolShape

# magic, type, room, epoch, first token, tokens, first layer, layers, payload bytes
HEADER = struct.Struct(f"<4sI{ROOM_BYTES}sQIIIII")
MAGIC = b"pdKV"
DATA = 1
MAX_PAYLOAD = 8 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed header."""

    room: bytes
    epoch: int
    block: Block
    payload: int


def encode_header(room: bytes, epoch: int, block: Block, payload: int) -> bytes:
    """Return the header for ``payload`` bytes of a block."""
    return HEADER.pack(
        MAGIC,
        DATA,
        room,
        epoch,
        block.token_start,
        block.token_stop - block.token_start,
        block.layer_start,
        block.layer_stop - block.layer_start,
        payload,
    )


def decode_header(header: bytes | bytearray, shape: PoolShape) -> Frame:
    """Parse a header and check it against the shape of the pool. Raises PeerDataError naming the
    bad value."""
    magic, kind, room, epoch, token, tokens, layer, layers, payload = HEADER.unpack(header)
    if magic != MAGIC:
        raise PeerDataError(f"magic is {magic!r}, not {MAGIC!r}")
    if kind != DATA:
        raise PeerDataError(f"unknown frame type {kind}")
    block = Block(token, token + tokens, layer, layer + layers)
    if not tokens or not shape.is_in_one_plane(block):
        raise PeerDataError(
            f"{tokens} tokens of layers [{layer}, {layer + layers}) do not fit a pool of {shape}"
        )
    if payload > MAX_PAYLOAD:
        raise PeerDataError(f"payload of {payload} bytes exceeds {MAX_PAYLOAD}")
    if payload != shape.num_bytes(block):
        raise PeerDataError(
            f"payload of {payload} bytes, but {tokens} tokens of {layers} layers have "
            f"{shape.num_bytes(block)}"
        )
    return Frame(room, epoch, block, payload)
