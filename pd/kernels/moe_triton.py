"""The kernels for :mod:`pd.kernels.moe`: a grouped matrix product over tokens sorted by expert.

An assignment is a (token, expert) pair. Assignment i is entry i of the flattened ids. After sorting
by expert, each expert's assignments are adjacent and are multiplied in blocks of rows, like in
MegaBlocks (Gale et al., 2022). Only the device knows the number of blocks, so the grid is the
largest possible one, and programs beyond the last block end at once. Nothing waits for the GPU, and
the launches depend only on the number of tokens, because CUDA graphs need that.

If other ranks have some of the experts, we sort only the assignments to our own. Other assignments
have no block, and no row in the sums, so they cost nothing.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd.kernels.activation_triton import apply_clamped_gate, apply_gate
from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

if TYPE_CHECKING:
    from pd.kernels.activation import ClampedGate
    from pd.kernels.local_experts import LocalExperts
    from pd.kernels.mxfp4 import Mxfp4Weight

_SORT_CHUNK = 1024
_SUM_BLOCK = 512


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows, columns and depth that a program multiplies at a time, and its launch."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def _choose_tile(rows_per_expert: float, dtype: torch.dtype) -> _Tile:
    """Choose a tile by the rows of an expert. With few rows the product is a stream of weights."""
    if dtype == torch.float32:
        return _Tile(16, 32, 32, 4, 2)
    if rows_per_expert <= 16:
        return _Tile(16, 64, 128, 4, 4)
    if rows_per_expert <= 96:
        return _Tile(64, 64, 64, 4, 4)
    return _Tile(128, 128, 64, 8, 3)


def _choose_mxfp4_tile(rows_per_expert: float) -> _Tile:
    """:func:`_choose_tile` for MXFP4 and half precision.

    With few rows, two warps, for which the compiler uses products of registers (``mma``). For a
    group of four warps it would use ``wgmma`` and copy weights in pieces of 4 bytes.
    """
    if rows_per_expert <= 1:
        return _Tile(8, 32, 256, 2, 4)
    if rows_per_expert <= 16:
        return _Tile(16, 64, 256, 2, 4)
    if rows_per_expert <= 96:
        return _Tile(64, 64, 128, 4, 4)
    return _Tile(128, 128, 64, 8, 3)


@triton.jit
def _route_token(
    router_logits,
    weights,
    ids,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Softmax of one token's logits, and the TOP_K largest, one after another."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    exists = experts < EXPERTS
    logits = tl.load(router_logits + token * EXPERTS + experts, mask=exists, other=float("-inf"))
    logits = logits.to(tl.float32)
    mass = tl.exp(logits - tl.max(logits, 0))
    probabilities = tl.div_rn(mass, tl.broadcast_to(tl.sum(mass, 0), mass.shape))
    left = tl.where(exists, probabilities, -1.0)
    places = tl.full([BLOCK], TOP_K, tl.int32)
    total = 0.0
    for place in range(TOP_K):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, experts, BLOCK), 0)
        places = tl.where(experts == expert, place, places)
        left = tl.where(experts == expert, -1.0, left)
        total += best
    if NORMALIZE:
        probabilities = tl.div_rn(probabilities, tl.broadcast_to(total, mass.shape))
    there = token * TOP_K + places
    is_chosen = places < TOP_K
    tl.store(weights + there, probabilities.to(weights.dtype.element_ty), mask=is_chosen)
    tl.store(ids + there, experts.to(tl.int64), mask=is_chosen)


@triton.jit(do_not_specialize=("count", "first_expert"))
def _sort_assignments(
    ids, order, starts, count, first_expert, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """One expert per program, from ``first_expert`` on: the start of its assignments, and the
    assignments in order."""
    start_next(PDL)
    wait_for_previous(PDL)
    expert = first_expert + tl.program_id(0)
    smaller = tl.zeros([CHUNK], tl.int32)
    for first in range(0, count, CHUNK):
        places = first + tl.arange(0, CHUNK)
        chosen = tl.load(ids + places, mask=places < count, other=0x7FFFFFFF)
        smaller += ((chosen >= first_expert) & (chosen < expert)).to(tl.int32)
    filled = tl.sum(smaller, 0)
    tl.store(starts + tl.program_id(0), filled)
    for first in range(0, count, CHUNK):
        places = first + tl.arange(0, CHUNK)
        is_mine = tl.load(ids + places, mask=places < count, other=-1) == expert
        ranks = tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(order + filled + ranks, places, mask=is_mine)
        filled += tl.sum(is_mine.to(tl.int32), 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(starts + tl.num_programs(0), filled)


@triton.jit
def find_block(starts, block, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a block of rows, its first row and the row after the expert's last. The expert
    is EXPERTS if there is no such block."""
    experts = tl.arange(0, BLOCK)
    exists = experts < EXPERTS
    first = tl.load(starts + experts, mask=exists, other=0)
    stop = tl.load(starts + experts + 1, mask=exists, other=0)
    blocks = (stop - first + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((exists & (ends <= block)).to(tl.int32), 0)
    is_it = experts == expert
    row = tl.sum(tl.where(is_it, first + (block - ends + blocks) * ROWS, 0), 0)
    return expert, row, tl.sum(tl.where(is_it, stop, 0), 0)


@triton.jit
def _sum_products(
    x_rows,
    has_row,
    w_rows,
    has_column,
    shift,
    inputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Rows of ``x`` times rows of a matrix, and, if GATED, times rows ``shift`` numbers further."""
    depth = tl.arange(0, DEPTH)
    x_at, w_at = x_rows[:, None] + depth[None, :], w_rows[None, :] + depth[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = sums
    for start in range(0, inputs, DEPTH):
        in_depth = depth < inputs - start
        w_mask = in_depth[:, None] & has_column[None, :]
        tile = tl.load(x_at + start, mask=has_row[:, None] & in_depth[None, :], other=0.0)
        w = tl.load(w_at + start, mask=w_mask, other=0.0)
        sums = tl.dot(tile, w, sums, input_precision="ieee")
        if GATED:
            w = tl.load(w_at + start + shift, mask=w_mask, other=0.0)
            ups = tl.dot(tile, w, ups, input_precision="ieee")
    return sums, ups


@triton.jit
def _sum_mxfp4_products(
    x_rows,
    has_row,
    block_rows,
    scale_rows,
    scale_step,
    has_column,
    groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Rows of ``x``, in half precision, times rows of a matrix in MXFP4. The compiler unpacks it in
    registers.

    We count inputs in groups of 32, because then the compiler knows that a row begins at a multiple
    of 16 bytes and that a mask holds for as many, so it copies pieces of that size. It copies ahead
    only if each thread copies at least 4 bytes. AHEAD: a thread has fewer scales, so we read them
    one round ahead.
    """
    depth, packed, group = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 32)
    x_at, w_at = x_rows[:, None] + depth[None, :], block_rows[None, :] + packed[:, None]
    scale_at = scale_rows[:, None] + group[None, :] * scale_step
    format: tl.constexpr = "bf16" if x_rows.dtype.element_ty == tl.bfloat16 else "fp16"
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if AHEAD:
        coming = tl.load(scale_at, mask=has_column[:, None] & (group < groups)[None, :], other=0)
    for first in range(0, groups, DEPTH // 32):
        left = groups - first
        x_mask = has_row[:, None] & (depth // 32 < left)[None, :]
        w_mask = (packed // 16 < left)[:, None] & has_column[None, :]
        tile = tl.load(x_at + first * 32, mask=x_mask, other=0.0)
        w = tl.load(w_at + first * 16, mask=w_mask, other=0)
        if AHEAD:
            scale, first, left = coming, first + DEPTH // 32, left - DEPTH // 32
        scale_mask = has_column[:, None] & (group < left)[None, :]
        wanted = tl.load(scale_at + first * scale_step, mask=scale_mask, other=0)
        if AHEAD:
            coming = wanted
        else:
            scale = wanted
        # fast_math: no scale is NaN.
        sums = tl.dot_scaled(tile, None, format, w, scale, "e2m1", sums, fast_math=True)
    return sums


@triton.jit
def _decode_mxfp4(codes, scales, DTYPE: tl.constexpr):
    """The values of E2M1 codes times scales, which are E8M0."""
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).to(tl.int32)
    doubled = tl.where(exponent == 0, mantissa, ((2 + mantissa) << exponent) >> 1)
    signed = tl.where((codes & 8) == 0, doubled, -doubled).to(tl.float32)
    return (signed * 0.5 * (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)).to(DTYPE)


@triton.jit
def _sum_unpacked_products(
    x_rows,
    has_row,
    block_rows,
    scale_rows,
    scale_step,
    has_column,
    inputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """:func:`_sum_mxfp4_products` for float32 and for the interpreter. Inputs with even and odd
    numbers are multiplied one after the other, because their codes share bytes."""
    packed = tl.arange(0, DEPTH // 2)
    dtype: tl.constexpr = x_rows.dtype.element_ty
    x_at, w_at = x_rows[:, None] + 2 * packed[None, :], block_rows[None, :] + packed[:, None]
    scale_at = scale_rows[None, :] + packed[:, None] // 16 * scale_step
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inputs, DEPTH):
        in_depth = packed < (inputs - start) // 2
        x_mask, w_mask = (
            has_row[:, None] & in_depth[None, :],
            in_depth[:, None] & has_column[None, :],
        )
        even = tl.load(x_at + start, mask=x_mask, other=0.0)
        odd = tl.load(x_at + start + 1, mask=x_mask, other=0.0)
        w = tl.load(w_at + start // 2, mask=w_mask, other=0)
        scale = tl.load(scale_at + start // 32 * scale_step, mask=w_mask, other=0)
        sums = tl.dot(even, _decode_mxfp4(w & 15, scale, dtype), sums, input_precision="ieee")
        sums = tl.dot(odd, _decode_mxfp4(w >> 4, scale, dtype), sums, input_precision="ieee")
    return sums


@triton.jit
def place_rows(assigned, rows, TOP_K: tl.constexpr, GATED: tl.constexpr):
    """Find the rows that a block reads and writes. GATED: from tokens to sorted rows, and otherwise
    from sorted rows to assignments."""
    if GATED:
        return (assigned // TOP_K).to(tl.int64), rows.to(tl.int64)
    else:
        return rows.to(tl.int64), assigned.to(tl.int64)


@triton.jit
def _multiply_blocks(
    x,
    matrices,
    scales,
    out,
    starts,
    order,
    weights,
    biases,
    scale_pitch,
    scale_step,
    inputs,
    outputs,
    first_expert,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNPACK: tl.constexpr,
    AHEAD: tl.constexpr,
    SORTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of rows of one expert times COLUMNS rows of its matrix.

    GATED: from tokens ``x`` to sorted rows, with the activation, which halves the columns.
    Otherwise: from sorted rows to the places of their assignments, times their weights. CLAMPED:
    with ``biases``, and gate and up alternate. UNPACK: whether matrices with ``scales``, in MXFP4,
    are unpacked by this program. ``scale_pitch`` and ``scale_step`` are the strides of outputs and
    of groups of inputs in ``scales``. AHEAD: of :func:`_sum_mxfp4_products`. SORTED: otherwise each
    block is one assignment, and ``order`` has their experts, counted from 0 instead of
    ``first_expert``. ``outputs`` counts the columns of the result.
    """
    start_next(PDL)
    wait_for_previous(PDL)
    if SORTED:
        expert, row, stop = find_block(starts, tl.program_id(1), EXPERTS, EXPERTS_BLOCK, ROWS)
    else:
        row = tl.program_id(1)
        expert, stop = tl.load(order + row).to(tl.int32) - first_expert, row + 1
    if (expert >= 0) & (expert < EXPERTS):
        rows = row + tl.arange(0, ROWS)
        has_row = rows < stop
        assigned = tl.load(order + rows, mask=has_row, other=0) if SORTED else rows
        source, target = place_rows(assigned, rows, TOP_K, GATED)
        num_rows = 2 * outputs if GATED else outputs
        # Gate and up either alternate, or have the same number in two halves of the matrix.
        APART: tl.constexpr = GATED and not CLAMPED
        WIDTH: tl.constexpr = COLUMNS // 2 if APART else COLUMNS
        w_columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        has_w = w_columns < (outputs if APART else num_rows)
        w_rows = expert.to(tl.int64) * num_rows + w_columns
        x_rows = x + source * inputs
        if scales is None:
            shift = outputs.to(tl.int64) * inputs
            sums, ups = _sum_products(
                x_rows,
                has_row,
                matrices + w_rows * inputs,
                has_w,
                shift,
                inputs,
                ROWS,
                WIDTH,
                DEPTH,
                APART,
            )
        else:
            groups = inputs // 32
            at = matrices + w_rows * (groups * 16)
            # The scales of an expert are adjacent, either by outputs or by groups.
            scale_at = scales + expert.to(tl.int64) * num_rows * groups + w_columns * scale_pitch
            if UNPACK:
                sums = _sum_unpacked_products(
                    x_rows, has_row, at, scale_at, scale_step, has_w, inputs, ROWS, WIDTH, DEPTH
                )
            else:
                x_rows = x + source * (groups * 32)
                sums = _sum_mxfp4_products(
                    x_rows,
                    has_row,
                    at,
                    scale_at,
                    scale_step,
                    has_w,
                    groups,
                    ROWS,
                    WIDTH,
                    DEPTH,
                    AHEAD,
                )
        dtype: tl.constexpr = out.dtype.element_ty
        if CLAMPED:
            sums += tl.load(biases + w_rows, mask=has_w, other=0.0).to(tl.float32)[None, :]
        if APART:
            result = apply_gate(sums, ups, dtype)
        elif GATED:
            gates, ups = tl.split(tl.reshape(sums, [ROWS, WIDTH // 2, 2]))
            result = apply_clamped_gate(gates, ups, alpha, limit, dtype)
        else:
            scale = tl.load(weights + assigned, mask=has_row, other=0.0).to(tl.float32)
            result = (sums * scale[:, None]).to(dtype)
        STORED: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
        columns = tl.program_id(0) * STORED + tl.arange(0, STORED)
        there = out + target[:, None] * outputs + columns[None, :]
        tl.store(there, result, mask=has_row[:, None] & (columns < outputs)[None, :])


@triton.jit
def _sum_experts(
    results,
    out,
    ids,
    size,
    first_expert,
    stop_expert,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum of a token's rows, one for each of its experts. Given ``ids``, of those experts alone
    that lie between ``first_expert`` and ``stop_expert``; other rows hold anything."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    sums = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        row = results + (token * TOP_K + place) * size
        if ids is None:
            wanted = mask
        else:
            expert = tl.load(ids + token * TOP_K + place)
            wanted = mask & (expert >= first_expert) & (expert < stop_expert)
        sums += tl.load(row + columns, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, sums.to(out.dtype.element_ty), mask=mask)


def route_tokens(
    router_logits: torch.Tensor, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`pd.kernels.moe.route_tokens`."""
    router_logits = router_logits.contiguous()
    tokens, experts = router_logits.shape
    weights = router_logits.new_empty(tokens, top_k)
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=router_logits.device)
    if tokens:
        launch_kernel(
            _route_token,
            (tokens,),
            router_logits.device,
            router_logits,
            weights,
            ids,
            EXPERTS=experts,
            BLOCK=triton.next_power_of_2(experts),
            TOP_K=top_k,
            NORMALIZE=normalize,
            num_warps=1,
        )
    return weights, ids


def sort_by_expert(
    ids: torch.Tensor, experts: int, first_expert: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the assignments to ``experts`` experts from ``first_expert`` on. Returns int32
    ``[assignments]``, their numbers in that order and then anything, and int32 ``[experts + 1]``,
    the start of each expert's assignments."""
    count, device = ids.numel(), ids.device
    order = torch.empty(count, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    args = (ids, order, starts, count, first_expert)
    launch_kernel(_sort_assignments, (experts,), device, *args, CHUNK=_SORT_CHUNK, num_warps=4)
    return order, starts


def sum_experts(
    results: torch.Tensor, ids: torch.Tensor, experts: int, local: LocalExperts | None
) -> torch.Tensor:
    """Sum the rows of each token, ``[tokens * top_k, size]``, in float32. Torch does the same, but
    does not overlap with the kernels before and after.

    Args:
        ids: ``[tokens, top_k]``, contiguous.
        experts: number of this rank's experts; only their rows are read.
        local: see :func:`pd.kernels.moe.moe_mlp`.
    """
    top_k, first = ids.shape[1], 0 if local is None else local.first
    count, size = results.shape
    out = results.new_empty(count // top_k, size)
    grid = len(out), triton.cdiv(size, _SUM_BLOCK)
    args = (results, out, None if local is None else ids, size, first, first + experts)
    launch_kernel(_sum_experts, grid, out.device, *args, TOP_K=top_k, BLOCK=_SUM_BLOCK, num_warps=4)
    return out


def count_blocks(count: int, experts: int, rows: int) -> int:
    """Return the largest possible number of blocks of ``count`` assignments to some experts."""
    used = min(experts, count)
    return used + (count - used) // rows


def _split_scales(
    weight: torch.Tensor | Mxfp4Weight,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a stack of matrices, and its scales if it is in MXFP4."""
    return (weight, None) if isinstance(weight, torch.Tensor) else weight


def moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor | Mxfp4Weight,
    down: torch.Tensor | Mxfp4Weight,
    clamp: ClampedGate | None = None,
    local: LocalExperts | None = None,
) -> torch.Tensor:
    """:func:`pd.kernels.moe.moe_mlp`."""
    tokens, top_k = ids.shape
    first, first_scales = _split_scales(gate_up)
    second, second_scales = _split_scales(down)
    experts, hidden = second.shape[:2]
    size = first.shape[1] // 2
    count = tokens * top_k
    if count == 0:
        return torch.zeros_like(x)
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    first_expert, total = (0, experts) if local is None else local
    # The experts of a single token differ, so each of its assignments is a block.
    order, starts = (ids, None) if tokens == 1 else sort_by_expert(ids, experts, first_expert)
    inner, results = x.new_empty(count, size), x.new_empty(count, hidden)
    unpacks = x.dtype == torch.float32 or not x.is_cuda
    if first_scales is None or unpacks:
        tile = _choose_tile(count / total, x.dtype)
    else:
        tile = _choose_mxfp4_tile(count / total)
    blocks = count if starts is None else count_blocks(count, experts, tile.rows)
    biases = (None, None) if clamp is None else (clamp.gate_up_bias, clamp.down_bias)
    alpha, limit = (0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit)
    assert first_scales is None or clamp is not None, "in MXFP4, gate and up alternate"
    for source, matrices, scales, bias, out, is_gated in (
        (x, first, first_scales, biases[0], inner, True),
        (inner, second, second_scales, biases[1], results, False),
    ):
        outputs = out.shape[1]
        pitch, step = (0, 0) if scales is None else scales.stride()[1:]
        launch_kernel(
            _multiply_blocks,
            (triton.cdiv(outputs * (2 if is_gated else 1), tile.columns), blocks),
            x.device,
            source,
            matrices,
            scales,
            out,
            starts,
            order,
            weights,
            bias,
            pitch,
            step,
            source.shape[1],
            outputs,
            first_expert,
            alpha,
            limit,
            TOP_K=top_k,
            EXPERTS=experts,
            EXPERTS_BLOCK=triton.next_power_of_2(experts),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            GATED=is_gated,
            CLAMPED=clamp is not None,
            UNPACK=unpacks,
            AHEAD=tile.columns * tile.depth // 32 < 4 * 32 * tile.num_warps,
            SORTED=starts is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return sum_experts(results, ids, experts, local)
