"""Kernels that multiply rows in fp8 for :mod:`pd.kernels.fp8`.

A product of few rows may not have weights that a kernel launched just before computes. We do not
split the inputs over programs, so a row's result does not depend on the other rows,
except on how many there are.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from pd.kernels.triton_launch import (
    launch_kernel,
    start_next,
    wait_for_previous,
    zero_after_previous,
)

if TYPE_CHECKING:
    from pd.kernels.fp8 import Fp8Rows, Fp8Weight
    from pd.kernels.triton_launch import TritonKernel

# With more rows, torch's product with scales per row and channel is faster.
MAX_CHANNEL_ROWS = 64
# With more rows, torch's product with scales is faster than one without for :func:`scale_sums`, if
# there are no more outputs than inputs.
MAX_SUM_ROWS = 256
# With more rows, cuBLAS is faster for weights with scales of blocks.
MAX_BLOCK_ROWS = 1
# Row tiles that share a column's weights before the next column.
_NEIGHBOURS = 16
# Bytes of weights that a program with few rows requests before it waits.
_PREFETCHED = 32768


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """Rows of the input, rows of the weight (when gated, of gate and of up) and inputs that a
    program multiplies at a time, and its launch."""

    rows: int
    outputs: int
    depth: int
    num_warps: int
    num_stages: int


def _choose_tile(rows: int, outputs: int, group: int) -> Fp8Tile:
    """Choose a tile. With few rows the product is a stream of weights."""
    if rows <= 16:
        if group:
            return Fp8Tile(16, 32, group, 4, 5)
        if outputs > 8192:
            return Fp8Tile(16, 64, 256, 4, 5)
        return Fp8Tile(16, 32, 256, 4, 5) if outputs <= 4096 else Fp8Tile(16, 32, 512, 4, 4)
    depth = group or 128
    if rows <= 64:
        if group:
            return Fp8Tile(64, 32 if outputs <= 8192 else 64, group, 4, 5)
        return Fp8Tile(64, 32, 256, 4, 4) if outputs <= 8192 else Fp8Tile(64, 128, 128, 4, 4)
    return Fp8Tile(64 if rows <= 128 else 128, 128, depth, 4 if rows <= 128 else 8, 3)


def _choose_row_tile(outputs: int, inputs: int) -> Fp8Tile:
    """Choose a tile of one row, as measured on an H200."""
    return Fp8Tile(1, 16, 512, 4, 4) if outputs > inputs else Fp8Tile(1, 8, 1024, 4, 4)


@triton.jit
def _load_tile(at, has_row, depth, left, EVEN: tl.constexpr):
    """Load a tile of fp8. Its last inputs may not exist, unless EVEN."""
    if EVEN:
        return tl.load(at, mask=has_row, other=0.0)
    else:
        return tl.load(at, mask=has_row & (depth < left), other=0.0)


@triton.jit
def sum_products(
    x_at,
    x_scale_at,
    has_row,
    weight_at,
    scale_at,
    up_shift,
    up_scale_shift,
    has_output,
    width,
    stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of fp8 times rows of a matrix, and, if GATED, times others, which begin ``up_shift``
    numbers further. Returns float32.

    GROUPED: DEPTH inputs share a scale, so we scale each product of them before we add it.
    Otherwise, we scale sums. ``stride``: from a group's scales of rows to the next group's.
    EVEN: whether ``width`` is a multiple of DEPTH.
    """
    depth = tl.arange(0, DEPTH)[None, :]
    x_at, weight_at = x_at[:, None] + depth, weight_at[:, None] + depth
    x_mask, w_mask = has_row[:, None], has_output[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    ups = sums
    for step in tl.range(0, tl.cdiv(width, DEPTH), num_stages=STAGES):
        start = step * DEPTH
        tile = _load_tile(x_at + start, x_mask, depth, width - start, EVEN)
        w = _load_tile(weight_at + start, w_mask, depth, width - start, EVEN)
        if GATED:
            u = _load_tile(weight_at + up_shift + start, w_mask, depth, width - start, EVEN)
        if GROUPED:
            x_scale = tl.load(x_scale_at, mask=has_row, other=0.0)[:, None]
            x_scale_at += stride
            scale = tl.load(scale_at + step)[None, :]
            sums += tl.dot(tile, tl.trans(w)) * (x_scale * scale)
            if GATED:
                scale = tl.load(scale_at + up_scale_shift + step)[None, :]
                ups += tl.dot(tile, tl.trans(u)) * (x_scale * scale)
        else:
            sums = tl.dot(tile, tl.trans(w), sums)
            if GATED:
                ups = tl.dot(tile, tl.trans(u), ups)
    if not GROUPED:
        x_scale = tl.load(x_scale_at, mask=has_row, other=0.0)[:, None]
        sums *= x_scale * tl.load(scale_at)[None, :]
        if GATED:
            ups *= x_scale * tl.load(scale_at + up_scale_shift)[None, :]
    return sums, ups


@triton.jit
def _prefetch_rows(rows, width, LINES: tl.constexpr):
    """Have the cache read the first LINES · 128 numbers of rows of fp8."""
    shifts = tl.minimum(tl.arange(0, LINES) * 128, width - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [(rows[:, None] + shifts[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=("num_rows", "stride"))
def _multiply_rows(
    x,
    x_scales,
    weight,
    w_scales,
    bias,
    out,
    num_rows,
    outputs,
    width,
    num_groups,
    stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows times OUTPUTS rows of the weight. SHARED of these have the same scales.

    Each program requests LINES lines of its weights before it waits for the kernel that computes
    ``x``.
    """
    start_next(PDL)
    across, down = tl.cdiv(outputs, OUTPUTS), tl.cdiv(num_rows, ROWS)
    above = tl.program_id(0) // (NEIGHBOURS * across) * NEIGHBOURS
    height = tl.minimum(down - above, NEIGHBOURS)
    within = tl.program_id(0) % (NEIGHBOURS * across)
    rows = (above + within % height) * ROWS + tl.arange(0, ROWS)
    mine = within // height * OUTPUTS + tl.arange(0, OUTPUTS)
    w_rows = tl.minimum(mine, outputs - 1)
    has_row, has_output = rows < num_rows, mine < outputs
    if PDL and LINES > 0:
        _prefetch_rows(weight + w_rows.to(tl.int64) * width, width, LINES)
    wait_for_previous(PDL)
    sums, _ = sum_products(
        x + rows.to(tl.int64) * width,
        x_scales + rows,
        has_row,
        weight + w_rows.to(tl.int64) * width,
        w_scales + w_rows // SHARED * num_groups,
        0,
        0,
        has_output,
        width,
        stride,
        ROWS,
        OUTPUTS,
        DEPTH,
        GROUPED,
        False,
        EVEN,
        STAGES,
    )
    if bias is not None:
        sums += tl.load(bias + w_rows).to(tl.float32)[None, :]
    there = out + rows[:, None].to(tl.int64) * outputs + mine[None, :]
    tl.store(there, sums.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


@triton.jit(do_not_specialize=("num_rows", "stride"))
def _multiply_row(
    x,
    x_scales,
    weight,
    w_scales,
    bias,
    out,
    num_rows,
    outputs,
    width,
    num_groups,
    stride,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS outputs of the only row, without tensor cores. If there are groups, the outputs have
    the same scales.

    The loop requests its first weights before it waits, as in :mod:`pd.kernels.linear_triton`.
    """
    start_next(PDL)
    first = tl.program_id(0) * OUTPUTS
    mine = first + tl.arange(0, OUTPUTS)
    rows = tl.minimum(mine, outputs - 1)
    depth = tl.arange(0, DEPTH)
    weight += rows.to(tl.int64)[:, None] * width + depth[None, :]
    group_scales = w_scales + first // SHARED * num_groups
    sums = tl.zeros([OUTPUTS, DEPTH], tl.float32)
    zero = 0
    whole = width // DEPTH * DEPTH
    for start in tl.range(0, whole, DEPTH, num_stages=STAGES):
        w = tl.load(weight + start, eviction_policy="evict_first")
        if num_rows > 0:
            if start == 0:
                zero = zero_after_previous(PDL)
            at = tl.multiple_of(start + zero, 16) + depth
            tile = tl.load(x + at).to(tl.float32)
            if GROUP > 0:
                group = at // GROUP
                tile *= tl.load(x_scales + group * stride) * tl.load(group_scales + group)
        else:
            tile = tl.zeros([DEPTH], tl.float32)
        sums += w.to(tl.float32) * tile[None, :]
    if whole < width:
        wait_for_previous(PDL)
        at = whole + depth
        mask = at < width
        tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if GROUP > 0:
            group = at // GROUP
            scale = tl.load(x_scales + group * stride, mask=mask, other=0.0)
            tile *= scale * tl.load(group_scales + group, mask=mask, other=0.0)
        w = tl.load(weight + whole, mask=mask[None, :], other=0.0)
        sums += w.to(tl.float32) * tile[None, :]
    result = tl.sum(sums, 1)
    if GROUP == 0:
        result *= tl.load(x_scales) * tl.load(w_scales + rows // SHARED)
    if bias is not None:
        result += tl.load(bias + rows).to(tl.float32)
    tl.store(out + mine, result.to(out.dtype.element_ty), mask=mine < outputs)


@triton.jit
def _scale_sums(
    sums, x_scales, w_scales, bias, out, outputs, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """BLOCK outputs of a row."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < outputs
    scale = tl.load(w_scales + columns, mask=mask, other=0.0)
    wait_for_previous(PDL)
    result = tl.load(sums + row * outputs + columns, mask=mask, other=0.0)
    result *= scale * tl.load(x_scales + row)
    if bias is not None:
        result += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + columns, result.to(out.dtype.element_ty), mask=mask)


def _launch_product(
    kernel: TritonKernel,
    programs: int,
    rows: Fp8Rows,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    tile: Fp8Tile,
    **constants: Any,
) -> torch.Tensor:
    """Launch a kernel that multiplies all rows, and return its result."""
    values, (count, width) = weight.values, rows.values.shape
    out = torch.empty((count, len(values)), dtype=rows.dtype, device=values.device)
    launch_kernel(
        kernel,
        (programs,),
        values.device,
        rows.values,
        rows.scales,
        values,
        weight.scales,
        bias,
        out,
        count,
        len(values),
        width,
        weight.inputs.num_groups,
        rows.scales.stride(1),
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        SHARED=weight.rows,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **constants,
    )
    return out


def multiply_rows(
    rows: Fp8Rows,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    tile: Fp8Tile | None = None,
) -> torch.Tensor:
    """Compute :func:`pd.kernels.linear.linear` of inputs in fp8."""
    count, width = rows.values.shape
    outputs, group = len(weight.values), weight.inputs.group
    if count == 0:
        return torch.empty((0, outputs), dtype=rows.dtype, device=weight.values.device)
    tile = tile or _choose_tile(count, outputs, group)
    return _launch_product(
        _multiply_rows,
        triton.cdiv(count, tile.rows) * triton.cdiv(outputs, tile.outputs),
        rows,
        weight,
        bias,
        tile,
        ROWS=tile.rows,
        GROUPED=group > 0,
        EVEN=width % tile.depth == 0,
        NEIGHBOURS=_NEIGHBOURS,
        LINES=_PREFETCHED // (128 * tile.outputs) if tile.rows <= MAX_CHANNEL_ROWS else 0,
    )


def scale_sums(
    sums: torch.Tensor, rows: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Turn float32 ``[rows, outputs]`` of :func:`pd.kernels.fp8.multiply_values` into results of
    :func:`pd.kernels.linear.linear`."""
    count, outputs = sums.shape
    out = torch.empty((count, outputs), dtype=rows.dtype, device=sums.device)
    block = 1024
    if count:
        launch_kernel(
            _scale_sums,
            (count, triton.cdiv(outputs, block)),
            sums.device,
            sums,
            rows.scales,
            weight.scales,
            bias,
            out,
            outputs,
            BLOCK=block,
            num_warps=4,
        )
    return out


def can_multiply_row(rows: Fp8Rows, weight: Fp8Weight) -> bool:
    """Whether :func:`multiply_row` supports these: one row, with scales of channels or groups."""
    shared = weight.rows
    return len(rows.values) == 1 and (shared % 16 == 0 if weight.inputs.group else shared == 1)


def multiply_row(
    rows: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, tile: Fp8Tile | None = None
) -> torch.Tensor:
    """Compute :func:`pd.kernels.linear.linear` of one row in fp8, without tensor cores.

    Args:
        tile: of one row. If there are groups, ``weight.rows`` must be a multiple of its outputs.
    """
    outputs, width = weight.values.shape
    tile = tile or _choose_row_tile(outputs, width)
    programs = triton.cdiv(outputs, tile.outputs)
    group = weight.inputs.group
    return _launch_product(_multiply_row, programs, rows, weight, bias, tile, GROUP=group)
