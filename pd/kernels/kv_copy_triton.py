"""The kernel for :mod:`pd.kernels.kv_copy`: rows of one memory to rows of another."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd.kernels.triton_launch import launch_kernel

if TYPE_CHECKING:
    from pd.kernels.triton_launch import Pointer

# Widest access first. Each thread moves 16 bytes at once, two 8-byte words.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)

# A piece of a row with fewer words does not get its own tile.
_MIN_CHUNK = 16


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The distribution of the kernel's work over the GPU.

    Attributes:
        programs: size of the grid. Each program walks over many tiles, so a few multiprocessors
            suffice and the forward pass keeps the others.
        tile_bytes: bytes that a program holds in registers at a time. It loads the next tile before
            it stores this one.
        num_warps: warps of a program.
    """

    programs: int
    tile_bytes: int
    num_warps: int


# Otherwise Triton would compile a kernel during requests for each combination of multiples of 16
# and ones.
_ANY_VALUE = (
    "num_tokens",
    "num_slabs",
    "source_first",
    "source_stride",
    "target_first",
    "target_stride",
)

PEER_SHAPE = LaunchShape(programs=132, tile_bytes=16384, num_warps=8)
LOCAL_SHAPE = LaunchShape(programs=264, tile_bytes=16384, num_warps=8)


@triton.jit
def _load_tile(
    source,
    source_slots,
    target_slots,
    tile,
    tiles,
    num_tokens,
    source_first,
    source_stride,
    target_first,
    target_stride,
    ROW: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    FROM_SLOTS: tl.constexpr,
    TO_SLOTS: tl.constexpr,
):
    """Words ``[TOKENS, CHUNK]`` of a tile and their target rows ``[TOKENS]``, -1 for none."""
    chunks: tl.constexpr = (ROW + CHUNK - 1) // CHUNK
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    slab = tile // (chunks * token_tiles)
    tokens = (tile // chunks) % token_tiles * TOKENS + tl.arange(0, TOKENS)
    exists = (tokens < num_tokens) & (tile < tiles)
    from_rows = (source_first + slab).to(tl.int64) * source_stride
    if FROM_SLOTS:
        from_rows = from_rows + tl.load(source_slots + tokens, mask=exists, other=0).to(tl.int64)
    else:
        from_rows = from_rows + tokens
    to_rows = (target_first + slab).to(tl.int64) * target_stride
    if TO_SLOTS:
        to_rows = to_rows + tl.load(target_slots + tokens, mask=exists, other=0).to(tl.int64)
    else:
        to_rows = to_rows + tokens
    columns = tile % chunks * CHUNK + tl.arange(0, CHUNK)
    mask = exists[:, None]
    if ROW % CHUNK != 0:
        mask = mask & (columns < ROW)[None, :]
    words = tl.load(source + from_rows[:, None] * ROW + columns[None, :], mask=mask)
    return words, tl.where(exists, to_rows, -1)


@triton.jit(
    do_not_specialize=_ANY_VALUE,
    do_not_specialize_on_alignment=("source_slots", "target_slots"),
)
def _copy_rows(
    source,
    target,
    source_slots,
    target_slots,
    num_tokens,
    num_slabs,
    source_first,
    source_stride,
    target_first,
    target_stride,
    ROW: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    FROM_SLOTS: tl.constexpr,
    TO_SLOTS: tl.constexpr,
):
    """Copy rows of ROW words of ``num_slabs`` slabs. A slab has ``stride`` rows.

    A tile is TOKENS rows by CHUNK words. Rows are found by slot, or by token if there are no slots.
    The loads of a tile are under way before the previous one is stored.
    """
    chunks: tl.constexpr = (ROW + CHUNK - 1) // CHUNK
    tiles = tl.cdiv(num_tokens, TOKENS) * chunks * num_slabs
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    words, rows = _load_tile(
        source,
        source_slots,
        target_slots,
        program,
        tiles,
        num_tokens,
        source_first,
        source_stride,
        target_first,
        target_stride,
        ROW,
        CHUNK,
        TOKENS,
        FROM_SLOTS,
        TO_SLOTS,
    )
    for tile in range(program, tiles, programs):
        next_words, next_rows = _load_tile(
            source,
            source_slots,
            target_slots,
            tile + programs,
            tiles,
            num_tokens,
            source_first,
            source_stride,
            target_first,
            target_stride,
            ROW,
            CHUNK,
            TOKENS,
            FROM_SLOTS,
            TO_SLOTS,
        )
        # NOTE: we compute this from ``tile`` again, because the compiler must see that 16 bytes are
        # adjacent. Otherwise it would store them one word at a time.
        columns = tile % chunks * CHUNK + tl.arange(0, CHUNK)
        mask = (rows >= 0)[:, None]
        if ROW % CHUNK != 0:
            mask = mask & (columns < ROW)[None, :]
        tl.store(target + rows[:, None] * ROW + columns[None, :], words, mask=mask)
        words = next_words
        rows = next_rows


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a copy: slabs of rows in memory that the device can reach.

    Attributes:
        address: address of slab 0.
        first: first slab to copy.
        stride: rows of a slab.
        slots: the row of each token; None if token t is row t.
    """

    address: int
    first: int
    stride: int
    slots: torch.Tensor | None = None


def select_part(packed: torch.Tensor, slots: torch.Tensor, index: int, parts: int) -> Side:
    """Select part ``index`` of each row of packed memory. Its rows consist of ``parts`` rows of
    pools, one after the other. The result has one row for each of ``slots``."""
    first = torch.arange(len(slots), dtype=torch.int32, device=slots.device) * parts
    return Side(packed.data_ptr(), 0, len(slots) * parts, first + index)


class _Pointer:
    """An address as an argument of a kernel. It has the two members of a tensor that a launch
    uses."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


def copy_rows(
    source: Side,
    target: Side,
    num_tokens: int,
    num_slabs: int,
    row_bytes: int,
    device: torch.device,
    shape: LaunchShape = LOCAL_SHAPE,
) -> None:
    """Queue the copy on the current stream of ``device``. It checks nothing and keeps nothing
    alive. On the CPU this works with ``TRITON_INTERPRET=1`` only (for tests)."""
    if not num_tokens or not num_slabs:
        return
    word = next(
        word for word in _WORDS if not (row_bytes | source.address | target.address) % word.itemsize
    )
    row = row_bytes // word.itemsize
    chunk, tokens = _choose_tile(row, shape.tile_bytes // word.itemsize)
    tiles = triton.cdiv(num_tokens, tokens) * triton.cdiv(row, chunk) * num_slabs
    pointers = [
        _make_pointer(side, num_slabs, row_bytes, word, device) for side in (source, target)
    ]
    slots = [pointers[0] if s.slots is None else s.slots for s in (source, target)]
    launch_kernel(
        _copy_rows,
        (min(shape.programs, tiles),),
        device,
        *pointers,
        *slots,
        num_tokens,
        num_slabs,
        source.first,
        source.stride,
        target.first,
        target.stride,
        ROW=row,
        CHUNK=chunk,
        TOKENS=tokens,
        FROM_SLOTS=source.slots is not None,
        TO_SLOTS=target.slots is not None,
        num_warps=shape.num_warps,
    )


def _choose_tile(row: int, tile_words: int) -> tuple[int, int]:
    """Choose the words and tokens of a tile, both powers of two. A row is cut if that leaves no
    thread without work. The tile must not depend on the number of tokens, or Triton would compile
    more kernels."""
    even = row & -row
    chunk = even if even >= _MIN_CHUNK else triton.next_power_of_2(row)
    chunk = min(chunk, tile_words)
    return chunk, tile_words // chunk


def _make_pointer(
    side: Side, num_slabs: int, row_bytes: int, word: torch.dtype, device: torch.device
) -> Pointer:
    if device.type == "cuda":
        return _Pointer(side.address, word)
    size = (side.first + num_slabs) * side.stride * row_bytes
    return torch.frombuffer((ctypes.c_int8 * size).from_address(side.address), dtype=word)
