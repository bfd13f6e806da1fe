"""The kernels for :mod:`pd.kernels.fp8`: conversion to fp8, and products of fp8 on tensor cores.

A product of few rows may not have weights that a kernel launched just before computes. We do not
split the inputs over programs, so a row's result does not depend on the other rows,
except on how many there are.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd.kernels.activation_triton import apply_gate
from pd.kernels.fp8 import FP8, Fp8Rows
from pd.kernels.triton_launch import (
    launch_kernel,
    start_next,
    wait_for_previous,
    zero_after_previous,
)

if TYPE_CHECKING:
    from pd.kernels.fp8 import Fp8Inputs, Fp8Weight

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
# Rows with groups are allocated in multiples of this, which cuBLAS multiplies.
_PADDED = 16
# Most warps of a program that converts a whole row, of 512 inputs each if it can.
_QUANTIZE_WARPS = 32
# With more rows than this, a long row is converted in blocks of so many inputs.
_LONG_ROWS = 512
_LONG_BLOCK = 4096
# Groups of inputs that a program converts.
_GROUPS = 8


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
def saturate(x):
    """Convert float32 to fp8. NaN stays NaN."""
    x = tl.where(x > 448.0, 448.0, x)
    return tl.where(x < -448.0, -448.0, x).to(tl.float8e4nv)


@triton.jit
def compute_scales(largest, ROUNDS: tl.constexpr):
    """:func:`pd.kernels.fp8.compute_scales`."""
    most = tl.full(largest.shape, 448.0, tl.float32)
    scales = tl.maximum(tl.div_rn(largest, most), 1e-12 / 448.0)
    if ROUNDS:
        bits = (scales.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scales = bits.to(tl.float32, bitcast=True)
    return scales


@triton.jit
def divide_rows(x, scales):
    """Divide each row by its scale. The result is rounded once, as by a division, because the
    remainder of the first quotient is exact; but a number costs three operations."""
    inverse = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    inverse = tl.broadcast_to(inverse[:, None], x.shape)
    quotient = x * inverse
    remainder = tl.fma(-quotient, tl.broadcast_to(scales[:, None], x.shape), x)
    return tl.fma(remainder, inverse, quotient)


@triton.jit
def store_groups(
    wide,
    places,
    groups,
    input_scale,
    values,
    scales,
    row,
    width,
    num_groups,
    stride,
    SPAN: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Convert some groups of a row, float32 ``[groups, SPAN]``, to fp8, and store them.

    SPAN is the size of a group, or more than the width of the row if it is a single group. Scales
    of a group are ``stride`` after those of the group before.
    """
    if input_scale is None:
        scale = compute_scales(tl.max(tl.abs(wide), 1), ROUNDS)
        divided = divide_rows(wide, scale)
    else:  # numbers may be beyond the range of float32 when they are divided
        scale = tl.zeros(groups.shape, tl.float32) + tl.load(input_scale)
        divided = tl.div_rn(wide, tl.broadcast_to(scale[:, None], wide.shape))
    tl.store(values + row * width + places, saturate(divided), mask=places < width)
    tl.store(scales + groups.to(tl.int64) * stride + row, scale, mask=groups < num_groups)


@triton.jit
def _load_inputs(there, has_input, size, GATED: tl.constexpr):
    """Load inputs as float32. GATED: the gated activation of these and others ``size`` later."""
    wide = tl.load(there, mask=has_input, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(there + size, mask=has_input, other=0.0).to(tl.float32)
        wide = apply_gate(wide, up, there.dtype.element_ty).to(tl.float32)
    return wide


@triton.jit
def _quantize_long_rows(
    x,
    values,
    scales,
    x_stride,
    size,
    width,
    lead,
    limit,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row with one scale per program, BLOCK inputs at a time, which it loads twice. So a
    processor of the GPU has room for several programs. Rows from number ``limit`` on, if given, are
    left out."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if limit is not None:  # noqa: SIM102  (the compiler would evaluate both sides of `and`)
        if row >= tl.load(limit):
            return
    x += row * x_stride - lead
    places = tl.arange(0, BLOCK)[None, :]
    largest = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = places + start
        has_input = (at >= lead) & (at < lead + size)
        largest = tl.maximum(largest, tl.abs(_load_inputs(x + at, has_input, size, GATED)))
    scale = compute_scales(tl.max(largest, 1), ROUNDS)
    for start in range(0, width, BLOCK):
        at = places + start
        has_input = (at >= lead) & (at < lead + size)
        divided = divide_rows(_load_inputs(x + at, has_input, size, GATED), scale)
        tl.store(values + row * width + at, saturate(divided), mask=at < width)
    tl.store(scales + row + tl.arange(0, 1), scale)


@triton.jit(do_not_specialize=("stride",))
def _quantize_rows(
    x,
    input_scale,
    values,
    scales,
    x_stride,
    size,
    width,
    num_groups,
    stride,
    lead,
    limit,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    ROUNDS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """GROUPS groups of one row per program. GATED: of the gated activation of a row, whose second
    half is up. Rows from number ``limit`` on, if given, are left out."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if limit is not None:  # noqa: SIM102  (the compiler would evaluate both sides of `and`)
        if row >= tl.load(limit):
            return
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    places = groups[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    has_input = (places >= lead) & (places < lead + size)
    wide = _load_inputs(x + row * x_stride + places - lead, has_input, size, GATED)
    store_groups(
        wide,
        places,
        groups,
        input_scale,
        values,
        scales,
        row,
        width,
        num_groups,
        stride,
        SPAN,
        ROUNDS,
    )


@triton.jit(do_not_specialize=("stride",))
def _rms_norm(
    x,
    residual,
    weight,
    input_scale,
    values,
    scales,
    eps,
    size,
    width,
    num_groups,
    stride,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program: of ``x``, which is added to ``residual`` unless that is None."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    places = groups[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    mask = places < size
    by_place = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + row * size + places, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        there = residual + row * size + places
        total = (tl.load(there, mask=mask, other=0.0).to(tl.float32) + wide).to(dtype)
        tl.store(there, total, mask=mask)
        wide = total.to(tl.float32)
    square = tl.sum(tl.sum(wide * wide, 1), 0)
    wide = (wide * tl.rsqrt(square / size + eps)).to(dtype).to(tl.float32)
    normed = (wide * by_place).to(dtype).to(tl.float32)
    store_groups(
        normed,
        places,
        groups,
        input_scale,
        values,
        scales,
        row,
        width,
        num_groups,
        stride,
        SPAN,
        ROUNDS,
    )


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


def quantize_rows(
    x: torch.Tensor,
    inputs: Fp8Inputs,
    is_gated: bool = False,
    limit: torch.Tensor | None = None,
) -> Fp8Rows:
    """:func:`pd.kernels.fp8.quantize_rows`, or :func:`silu_and_quantize`.

    Args:
        limit: int32 ``[1]``, the number of rows to convert. The rest of the result holds anything.
            None for all rows.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = _allocate_rows(len(x), inputs, x)
    span = inputs.group or triton.next_power_of_2(inputs.width)
    count = _GROUPS if inputs.group else 1
    is_long = span > 2 * _LONG_BLOCK and len(x) > _LONG_ROWS and inputs.scale is None
    if is_long:
        launch_kernel(
            _quantize_long_rows,
            (len(x),),
            x.device,
            x,
            rows.values,
            rows.scales,
            x.stride(0),
            inputs.size,
            inputs.width,
            inputs.lead,
            limit,
            BLOCK=_LONG_BLOCK,
            ROUNDS=inputs.rounds_scales,
            GATED=is_gated,
            num_warps=max(1, _LONG_BLOCK // 512),
        )
    elif len(x):
        launch_kernel(
            _quantize_rows,
            (len(x), triton.cdiv(inputs.num_groups, count)),
            x.device,
            x,
            inputs.scale,
            rows.values,
            rows.scales,
            x.stride(0),
            inputs.size,
            inputs.width,
            inputs.num_groups,
            rows.scales.stride(1),
            inputs.lead,
            limit,
            GROUPS=count,
            SPAN=span,
            ROUNDS=inputs.rounds_scales,
            GATED=is_gated,
            num_warps=max(1, min(_QUANTIZE_WARPS, count * span // 512)),
        )
    return rows


def silu_and_quantize(gate_up: torch.Tensor, inputs: Fp8Inputs) -> Fp8Rows:
    """:func:`pd.kernels.linear.silu_and_quantize`."""
    return quantize_rows(gate_up, inputs, is_gated=True)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inputs: Fp8Inputs,
    residual: torch.Tensor | None = None,
) -> Fp8Rows:
    """:func:`pd.kernels.norm.rms_norm` of ``[rows, size]``, or ``add_rms_norm`` with a contiguous
    ``residual``, in fp8. ``inputs`` has no lead."""
    x = x.contiguous()
    rows = _allocate_rows(len(x), inputs, x)
    span = inputs.group or triton.next_power_of_2(inputs.width)
    count = triton.next_power_of_2(inputs.num_groups)
    if len(x):
        launch_kernel(
            _rms_norm,
            (len(x),),
            x.device,
            x,
            residual,
            weight,
            inputs.scale,
            rows.values,
            rows.scales,
            eps,
            inputs.size,
            inputs.width,
            inputs.num_groups,
            rows.scales.stride(1),
            GROUPS=count,
            SPAN=span,
            ROUNDS=inputs.rounds_scales,
            num_warps=max(1, min(16, count * span // 512)),
        )
    return rows


def _allocate_rows(count: int, inputs: Fp8Inputs, x: torch.Tensor) -> Fp8Rows:
    """Allocate rows in fp8 for numbers in the dtype of ``x``, on its device."""
    if not inputs.group:
        values = torch.empty((count, inputs.width), dtype=FP8, device=x.device)
        scales = torch.empty((count, 1), dtype=torch.float32, device=x.device)
        return Fp8Rows(values, scales, x.dtype)
    padded = triton.cdiv(count, _PADDED) * _PADDED
    values = torch.empty((padded, inputs.width), dtype=FP8, device=x.device)
    scales = torch.empty((inputs.num_groups, padded), dtype=torch.float32, device=x.device)
    return Fp8Rows(values[:count], scales.t()[:count], x.dtype)


def multiply_rows(
    rows: Fp8Rows,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    tile: Fp8Tile | None = None,
) -> torch.Tensor:
    """Compute :func:`pd.kernels.linear.linear` of inputs in fp8."""
    values, (count, width) = weight.values, rows.values.shape
    outputs = len(values)
    out = torch.empty((count, outputs), dtype=rows.dtype, device=values.device)
    if count == 0:
        return out
    group = weight.inputs.group
    tile = tile or _choose_tile(count, outputs, group)
    launch_kernel(
        _multiply_rows,
        (triton.cdiv(count, tile.rows) * triton.cdiv(outputs, tile.outputs),),
        values.device,
        rows.values,
        rows.scales,
        values,
        weight.scales,
        bias,
        out,
        count,
        outputs,
        width,
        weight.inputs.num_groups,
        rows.scales.stride(1),
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        SHARED=weight.rows,
        GROUPED=group > 0,
        EVEN=width % tile.depth == 0,
        NEIGHBOURS=_NEIGHBOURS,
        LINES=_PREFETCHED // (128 * tile.outputs) if tile.rows <= MAX_CHANNEL_ROWS else 0,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out


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
    values = weight.values
    outputs, width = values.shape
    tile = tile or _choose_row_tile(outputs, width)
    out = torch.empty((1, outputs), dtype=rows.dtype, device=values.device)
    launch_kernel(
        _multiply_row,
        (triton.cdiv(outputs, tile.outputs),),
        values.device,
        rows.values,
        rows.scales,
        values,
        weight.scales,
        bias,
        out,
        1,
        outputs,
        width,
        weight.inputs.num_groups,
        rows.scales.stride(1),
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        SHARED=weight.rows,
        GROUP=weight.inputs.group,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out
