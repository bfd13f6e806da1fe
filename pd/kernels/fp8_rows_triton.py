"""Kernels that convert rows to fp8 (:mod:`pd.kernels.fp8`), alone or after a norm or activation."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd.kernels.activation_triton import apply_gate
from pd.kernels.fp8 import FP8, Fp8Rows
from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

if TYPE_CHECKING:
    from pd.kernels.fp8 import Fp8Inputs

# Rows with groups are allocated in multiples of this, which cuBLAS multiplies.
_PADDED = 16
# Most warps of a program that converts a whole row, of 512 inputs each if it can.
_QUANTIZE_WARPS = 32
# With more rows than this, a long row is converted in blocks of so many inputs.
_LONG_ROWS = 512
_LONG_BLOCK = 4096
# Groups of inputs that a program converts.
_GROUPS = 8


@triton.jit
def convert_saturated(x):
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
    tl.store(values + row * width + places, convert_saturated(divided), mask=places < width)
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
        tl.store(values + row * width + at, convert_saturated(divided), mask=at < width)
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
