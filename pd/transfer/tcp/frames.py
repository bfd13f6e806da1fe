"""The data frame of the tcp backend: a fixed header, then the bytes of one block."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pd.core.messages import ROOM_BYTES
from pd.transfer.ranges import Block
from pd.transfer.wire.errors import PeerDataError

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
    """The header for ``payload`` bytes of ``block``."""
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


def decode_header(header: bytes | bytearray, num_layers: int, cell_bytes: int) -> Frame:
    """Parse and check a header against the layout (``cell_bytes``: K and V of one token in one
    layer). Raises PeerDataError naming the value that cannot be."""
    magic, kind, room, epoch, token, tokens, layer, layers, payload = HEADER.unpack(header)
    if magic != MAGIC:
        raise PeerDataError(f"magic is {magic!r}, not {MAGIC!r}")
    if kind != DATA:
        raise PeerDataError(f"unknown frame type {kind}")
    if not tokens or not layers or layer + layers > num_layers:
        raise PeerDataError(
            f"{tokens} tokens of layers [{layer}, {layer + layers}) are not of {num_layers} layers"
        )
    if payload > MAX_PAYLOAD:
        raise PeerDataError(f"payload of {payload} bytes exceeds {MAX_PAYLOAD}")
    if payload != tokens * layers * cell_bytes:
        raise PeerDataError(
            f"payload of {payload} bytes, but {tokens} tokens of {layers} layers have "
            f"{tokens * layers * cell_bytes}"
        )
    return Frame(room, epoch, Block(token, token + tokens, layer, layer + layers), payload)
