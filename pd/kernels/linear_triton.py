"""Products of a few rows with a matrix: streams of weights (the kernels for
:mod:`pd.kernels.linear`).

With so few rows the time is that of reading the weights once. Enough reads must be under way at
every moment, even while one kernel follows another. So each program requests some of its weights
before it waits for the kernel that computes ``x``.

We do not split the inputs over programs, so a row's result does not depend on the other rows,
except on whether there are any.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import triton
import triton.language as tl

from pd.kernels.activation_triton import apply_gate
from pd.kernels.triton_launch import (
    launch_kernel,
    start_next,
    wait_for_previous,
    zero_after_previous,
)

if TYPE_CHECKING:
    import torch

# With more rows, cuBLAS is faster. With fewer it is at most 9 % faster, and only for some matrices
# (``kernels_gpu``).
MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The tile of a program, and its launch.

    Attributes:
        outputs: rows of the weight that a program computes (when gated, of gate and of up).
        depth: inputs that it loads at a time.
        num_warps, num_stages: see Triton. stages - 1 tiles of weights are in flight.
    """

    outputs: int
    depth: int
    num_warps: int
    num_stages: int


# Up to this many outputs without a gate, the kernel for few rows is also faster for a single row
# (benchmarks/results/kernels_gpu.json: output and down).
_NARROW = 4096
# With no more outputs, such as a router's, the kernel for few rows would have so few programs that
# one program's reads would take the time (not measured).
_TINY = 512
_TINY_SHAPE = LinearShape(2, 1024, 4, 3)
# Keys are maximum numbers of rows. Values: gated; not gated with at most 4096 outputs, 8192, and
# more. Tuned on an H200 with Llama-3.1-8B's matrices. Those for 16 rows were tuned with a loop that
# read no tile early.
_SHAPES = {
    1: (LinearShape(4, 1024, 4, 4), None, LinearShape(16, 512, 4, 5), LinearShape(8, 1024, 4, 4)),
    16: (
        LinearShape(32, 256, 4, 3),
        LinearShape(32, 256, 4, 7),
        LinearShape(64, 128, 4, 9),
        LinearShape(64, 256, 4, 3),
    ),
}


def _choose_shape(rows: int, outputs: int, is_gated: bool) -> LinearShape:
    if rows == 1 and outputs <= _TINY and not is_gated:
        return _TINY_SHAPE
    shapes = _SHAPES[1 if _has_own_kernel(rows, outputs, is_gated) else MAX_ROWS]
    shape = shapes[0 if is_gated else 1 if outputs <= _NARROW else 2 if outputs <= 8192 else 3]
    assert shape is not None
    return shape


def _has_own_kernel(rows: int, outputs: int, is_gated: bool) -> bool:
    """Whether this is a product of one row for which :func:`_one_row` is faster."""
    return rows == 1 and (is_gated or not _TINY < outputs <= _NARROW)


@triton.jit(do_not_specialize=("num_rows",))
def _one_row(
    x,
    weight,
    bias,
    out,
    num_rows,
    outputs,
    inputs,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS outputs of the only row, without tensor cores.

    The pipelined loop has its first tiles of weights under way before it waits. We load ``x`` in a
    branch, which the compiler does not pipeline, and from an address that is known only after the
    wait. So it is not loaded early.
    """
    start_next(PDL)
    mine = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.minimum(mine, outputs - 1).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    weight += rows[:, None] * inputs + depth[None, :]
    up_shift = outputs.to(tl.int64) * inputs
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros([OUTPUTS, DEPTH], tl.float32)
    ups = sums
    zero = 0
    whole = inputs // DEPTH * DEPTH
    for start in tl.range(0, whole, DEPTH, num_stages=STAGES):
        w = tl.load(weight + start, eviction_policy="evict_first")
        if GATED:
            u = tl.load(weight + up_shift + start, eviction_policy="evict_first")
        if num_rows > 0:
            if start == 0:
                zero = zero_after_previous(PDL)
            tile = tl.load(x + tl.multiple_of(start + zero, 16) + depth)
        else:
            tile = tl.zeros([DEPTH], dtype)
        wide = tile.to(tl.float32)[None, :]
        sums += w.to(tl.float32) * wide
        if GATED:
            ups += u.to(tl.float32) * wide
    if whole < inputs:
        wait_for_previous(PDL)
        mask = depth < inputs - whole
        wide = tl.load(x + whole + depth, mask=mask, other=0.0).to(tl.float32)[None, :]
        w = tl.load(weight + whole, mask=mask[None, :], other=0.0)
        sums += w.to(tl.float32) * wide
        if GATED:
            u = tl.load(weight + up_shift + whole, mask=mask[None, :], other=0.0)
            ups += u.to(tl.float32) * wide
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + rows).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 1)
        if BIAS:
            up += tl.load(bias + outputs + rows).to(tl.float32)
        tl.store(out + mine, apply_gate(result, up, dtype), mask=mine < outputs)
    else:
        tl.store(out + mine, result.to(dtype), mask=mine < outputs)


@triton.jit(do_not_specialize=("num_rows",))
def _few_rows(
    x,
    weight,
    bias,
    out,
    num_rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS outputs of all rows on tensor cores.

    We read the last tile of weights into registers before the wait, and use it at the end.
    """
    start_next(PDL)
    mine = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.minimum(mine, outputs - 1).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    weight += rows[:, None] * inputs + depth[None, :]
    up_shift = outputs.to(tl.int64) * inputs
    last = (inputs - 1) // DEPTH * DEPTH
    in_last = (depth < inputs - last)[None, :]
    last_w = tl.load(weight + last, mask=in_last, other=0.0, eviction_policy="evict_first")
    if GATED:
        there = weight + up_shift + last
        last_u = tl.load(there, mask=in_last, other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    x_rows = tl.arange(0, ROWS)
    has_row = (x_rows < num_rows)[:, None]
    x += x_rows[:, None].to(tl.int64) * inputs + depth[None, :]
    last_tile = tl.load(x + last, mask=has_row & in_last, other=0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    ups = sums
    for start in tl.range(0, last, DEPTH, num_stages=STAGES):
        tile = tl.load(x + start, mask=has_row, other=0.0)
        w = tl.load(weight + start, eviction_policy="evict_first")
        sums = tl.dot(tile, tl.trans(w), sums)
        if GATED:
            u = tl.load(weight + up_shift + start, eviction_policy="evict_first")
            ups = tl.dot(tile, tl.trans(u), ups)
    sums = tl.dot(last_tile, tl.trans(last_w), sums)
    if BIAS:
        sums += tl.load(bias + rows).to(tl.float32)[None, :]
    there = out + x_rows[:, None].to(tl.int64) * outputs + mine[None, :]
    exists = has_row & (mine < outputs)[None, :]
    if GATED:
        ups = tl.dot(last_tile, tl.trans(last_u), ups)
        if BIAS:
            ups += tl.load(bias + outputs + rows).to(tl.float32)[None, :]
        tl.store(there, apply_gate(sums, ups, dtype), mask=exists)
    else:
        tl.store(there, sums.to(dtype), mask=exists)


class _KernelSettings(TypedDict):
    """Settings that both kernels have."""

    OUTPUTS: int
    DEPTH: int
    GATED: bool
    BIAS: bool
    STAGES: int
    num_warps: int


def can_multiply(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear` supports these: 1 to MAX_ROWS rows with 2 bytes per element,
    aligned."""
    return (
        x.element_size() == 2
        and x.dtype == weight.dtype
        and 0 < x.shape[0] <= MAX_ROWS
        and x.shape[1] % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    shape: LinearShape | None = None,
) -> torch.Tensor:
    """:func:`pd.kernels.linear.linear`, or ``gate_up_silu``, if :func:`can_multiply`.

    Weight and bias must be in memory already. They may not be the result of a kernel launched just
    before.
    """
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if is_gated else weight.shape[0]
    out = x.new_empty(rows, outputs)
    shape = shape or _choose_shape(rows, outputs, is_gated)
    arguments = (x, weight, weight if bias is None else bias, out, rows, outputs, inputs)
    common: _KernelSettings = {
        "OUTPUTS": shape.outputs,
        "DEPTH": shape.depth,
        "GATED": is_gated,
        "BIAS": bias is not None,
        "STAGES": shape.num_stages,
        "num_warps": shape.num_warps,
    }
    grid = (triton.cdiv(outputs, shape.outputs),)
    if _has_own_kernel(rows, outputs, is_gated):
        launch_kernel(_one_row, grid, x.device, *arguments, **common)
    else:
        launch_kernel(_few_rows, grid, x.device, *arguments, ROWS=MAX_ROWS, **common)
    return out
