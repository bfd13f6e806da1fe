"""The kernels for :func:`pd.kernels.moe.moe_mlp` with weights in fp8: like those of
:mod:`pd.kernels.moe_triton`, with the products of :mod:`pd.kernels.fp8_triton`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd.kernels.activation_triton import apply_gate
from pd.kernels.fp8_rows_triton import quantize_rows
from pd.kernels.fp8_triton import Fp8Tile, sum_products
from pd.kernels.moe_triton import (
    count_blocks,
    find_block,
    place_rows,
    sort_by_expert,
    sum_experts,
)
from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

if TYPE_CHECKING:
    from pd.kernels.fp8 import Fp8Rows, Fp8Weight
    from pd.kernels.local_experts import LocalExperts


def _choose_tile(rows_per_expert: float, is_gated: bool) -> Fp8Tile:
    """Choose a tile by the rows of an expert."""
    if rows_per_expert <= 16:
        if is_gated:
            return Fp8Tile(16, 64, 128, 4, 4)
        return Fp8Tile(16, 128, 128, 4, 4)
    if rows_per_expert <= 96:
        return Fp8Tile(64, 64, 128, 4, 4)
    return Fp8Tile(128, 64 if is_gated else 128, 128, 8, 3)


@triton.jit(do_not_specialize=("stride",))
def _multiply_blocks(
    x,
    x_scales,
    matrices,
    scales,
    out,
    starts,
    order,
    weights,
    outputs,
    width,
    num_groups,
    stride,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPED: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of rows of one expert times OUTPUTS rows of its matrix. SHARED of these have the same
    scales.

    GATED: from tokens ``x`` to sorted rows, with the activation. Otherwise: from sorted rows to the
    places of their assignments, times their weights.
    """
    start_next(PDL)
    wait_for_previous(PDL)
    expert, row, stop = find_block(starts, tl.program_id(1), EXPERTS, EXPERTS_BLOCK, ROWS)
    if expert < EXPERTS:
        rows = row + tl.arange(0, ROWS)
        has_row = rows < stop
        assigned = tl.load(order + rows, mask=has_row, other=0)
        source, target = place_rows(assigned, rows, TOP_K, GATED)
        num_rows = 2 * outputs if GATED else outputs
        mine = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        w_rows, has_output = tl.minimum(mine, outputs - 1), mine < outputs
        first_row = expert.to(tl.int64) * num_rows
        first_scale = expert.to(tl.int64) * tl.cdiv(num_rows, SHARED) * num_groups
        scale_shifts = w_rows // SHARED * num_groups
        sums, ups = sum_products(
            x + source * width,
            x_scales + source,
            has_row,
            matrices + (first_row + w_rows) * width,
            scales + first_scale + scale_shifts,
            outputs.to(tl.int64) * width,
            (outputs + w_rows) // SHARED * num_groups - scale_shifts,
            has_output,
            width,
            stride,
            ROWS,
            OUTPUTS,
            DEPTH,
            GROUPED,
            GATED,
            EVEN,
            STAGES,
        )
        dtype: tl.constexpr = out.dtype.element_ty
        if GATED:
            result = apply_gate(sums, ups, dtype)
        else:
            scale = tl.load(weights + assigned, mask=has_row, other=0.0).to(tl.float32)
            result = (sums * scale[:, None]).to(dtype)
        there = out + target[:, None] * outputs + mine[None, :]
        tl.store(there, result, mask=has_row[:, None] & has_output[None, :])


def moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    local: LocalExperts | None = None,
) -> torch.Tensor:
    """:func:`pd.kernels.moe.moe_mlp`. Each token is converted once, for all of its experts."""
    tokens, top_k = ids.shape
    experts, hidden = down.values.shape[:2]
    size, count = gate_up.values.shape[1] // 2, tokens * top_k
    if count == 0:
        return torch.zeros_like(x)
    weights, ids = weights.contiguous(), ids.contiguous()
    first_expert, total = (0, experts) if local is None else local
    order, starts = sort_by_expert(ids, experts, first_expert)

    def multiply(rows: Fp8Rows, matrices: Fp8Weight, outputs: int, is_gated: bool) -> torch.Tensor:
        out = x.new_empty(count, outputs)
        tile = _choose_tile(count / total, is_gated)
        width = matrices.inputs.width
        launch_kernel(
            _multiply_blocks,
            (triton.cdiv(outputs, tile.outputs), count_blocks(count, experts, tile.rows)),
            x.device,
            rows.values,
            rows.scales,
            matrices.values,
            matrices.scales,
            out,
            starts,
            order,
            weights,
            outputs,
            width,
            matrices.inputs.num_groups,
            rows.scales.stride(1),
            TOP_K=top_k,
            EXPERTS=experts,
            EXPERTS_BLOCK=triton.next_power_of_2(experts),
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            SHARED=matrices.rows,
            GROUPED=matrices.inputs.group > 0,
            GATED=is_gated,
            EVEN=width % tile.depth == 0,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        return out

    inner = multiply(quantize_rows(x, gate_up.inputs), gate_up, size, True)
    # Other ranks' assignments come last, and have no rows in ``inner``.
    limit = None if local is None else starts[experts:]
    results = multiply(quantize_rows(inner, down.inputs, limit=limit), down, hidden, False)
    return sum_experts(results, ids, experts, local)
