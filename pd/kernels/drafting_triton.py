"""The kernels for :mod:`pd.kernels.drafting`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd.kernels.draft_tensors import CHILD_FIELDS, LEVEL_HEAD
from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

if TYPE_CHECKING:
    from pd.kernels.draft_tensors import DraftRoots, DraftRows, DraftTables, Norms, States


@triton.jit
def _apply_norm(values, weight, eps, SIZE: tl.constexpr):
    """RMS norm of one row, like :func:`pd.kernels.norm.rms_norm`."""
    wide = values.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    return (wide.to(values.dtype).to(tl.float32) * weight.to(tl.float32)).to(values.dtype)


@triton.jit
def _join_states(
    token_ids,
    embedding,
    first,
    second,
    places,
    embedding_weight,
    state_weight,
    out,
    num_first,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    wait_for_previous(PDL)
    token = tl.load(token_ids + row)
    embedded = tl.load(embedding + token * SIZE + columns, mask=mask, other=0.0)
    place = row
    if GATHERED:
        place = tl.load(places + row)
    if GATHERED and place >= num_first:
        state = tl.load(second + (place - num_first) * SIZE + columns, mask=mask, other=0.0)
    else:
        state = tl.load(first + place * SIZE + columns, mask=mask, other=0.0)
    if NORMED:
        weight = tl.load(embedding_weight + columns, mask=mask, other=0.0)
        embedded = _apply_norm(embedded, weight, eps, SIZE)
        weight = tl.load(state_weight + columns, mask=mask, other=0.0)
        state = _apply_norm(state, weight, eps, SIZE)
    there = out + row * (2 * SIZE) + columns
    tl.store(there, embedded, mask=mask)
    tl.store(there + SIZE, state, mask=mask)


@triton.jit
def _carry_states(
    carried,
    rows,
    fused,
    roots,
    last,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program."""
    start_next(PDL)
    wait_for_previous(PDL)
    work = tl.program_id(0)
    source = tl.load(roots + work) + 1 + tl.load(last + work)
    row = tl.load(rows + work)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    state = tl.load(fused + source * SIZE + columns, mask=mask)
    tl.store(carried + row * SIZE + columns, state, mask=mask)


@triton.jit
def _reset_row(places, bases, masks, row):
    """Keep a row from writing to a page of a sequence."""
    tl.store(places + row, tl.full((), -1, tl.int64))
    tl.store(bases + row, tl.full((), 1, tl.int64))
    tl.store(masks + row, tl.zeros((), tl.int64))


@triton.jit
def _copy_row(to, source, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    tl.store(to + columns, tl.load(source + columns, mask=mask), mask=mask)


@triton.jit
def _start_rows(
    count,
    index,
    carried_rows,
    seeds,
    temperatures,
    root_positions,
    row_tokens,
    row_positions,
    row_states,
    places,
    bases,
    masks,
    noise_at,
    row_temperatures,
    levels,
    level,
    tokens,
    positions,
    carried,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    width = tl.load(levels)
    root = row // width
    if row == 0:
        tl.store(level, tl.zeros((), tl.int64))
    if (root >= tl.load(count)) | (row % width > 0):
        _reset_row(places, bases, masks, row)
    else:
        source = tl.load(index + root)
        position = tl.load(positions + source)
        tl.store(root_positions + root, position)
        tl.store(row_tokens + row, tl.load(tokens + source))
        tl.store(row_positions + row, position)
        tl.store(places + row, position)
        tl.store(bases + row, position + 1)
        tl.store(masks + row, tl.zeros((), tl.int64))
        tl.store(noise_at + 2 * row, tl.load(seeds + root))
        tl.store(noise_at + 2 * row + 1, position + 1)
        tl.store(row_temperatures + row, tl.load(temperatures + root))
        state = carried + tl.load(carried_rows + root) * SIZE
        _copy_row(row_states + row * SIZE, state, SIZE, BLOCK)


@triton.jit
def _branch_rows(
    count,
    seeds,
    temperatures,
    root_positions,
    row_tokens,
    row_positions,
    row_states,
    places,
    bases,
    masks,
    noise_at,
    row_temperatures,
    levels,
    level,
    drafted,
    best,
    target_ids,
    hidden,
    num_rows,
    guesses,
    level_size,
    RANKS: tl.constexpr,
    HEAD: tl.constexpr,
    FIELDS: tl.constexpr,
    NAMED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One guess per program. A program also resets the row of its number if the next pass does not
    use it."""
    start_next(PDL)
    wait_for_previous(PDL)
    program = tl.program_id(0).to(tl.int64)
    depth = tl.load(level)
    table = levels + depth * level_size
    width, children, following = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    roots = tl.load(count)
    unused = (program // width >= roots) | (program % width >= following)
    if unused & (program < num_rows):
        _reset_row(places, bases, masks, program)
    if program < roots * children:
        sequence, child = program // children, program % children
        fields = table + HEAD + child * FIELDS
        source = sequence * width + tl.load(fields)
        token = tl.load(best + source * RANKS + tl.load(fields + 1))
        if NAMED:
            token = tl.load(target_ids + token)
        guess = tl.load(fields + 2)
        tl.store(drafted + sequence * guesses + guess, token)
        row = tl.load(fields + 4)
        if row >= 0:
            row += sequence * width
            end = tl.load(root_positions + sequence)
            tl.store(row_tokens + row, token)
            tl.store(row_positions + row, end + depth + 1)
            tl.store(places + row, end + 1 + guess)
            tl.store(bases + row, end + 1)
            tl.store(masks + row, tl.load(fields + 3))
            tl.store(noise_at + 2 * row, tl.load(seeds + sequence))
            tl.store(noise_at + 2 * row + 1, end + depth + 2)
            tl.store(row_temperatures + row, tl.load(temperatures + sequence))
            _copy_row(row_states + row * SIZE, hidden + source * SIZE, SIZE, BLOCK)


@triton.jit
def _count_up(level, PDL: tl.constexpr):
    """A separate launch, because all programs of the previous one read the level."""
    start_next(PDL)
    wait_for_previous(PDL)
    tl.store(level, tl.load(level) + 1)


def join_states(
    token_ids: torch.Tensor, embedding: torch.Tensor, states: States, norms: Norms | None
) -> torch.Tensor:
    """:func:`pd.kernels.drafting.join_states`."""
    rows, size = len(token_ids), embedding.shape[1]
    out = torch.empty(rows, 2 * size, dtype=embedding.dtype, device=embedding.device)
    if rows == 0:
        return out
    weights = (embedding, embedding) if norms is None else (norms.embedding, norms.state)
    block = triton.next_power_of_2(size)
    launch_kernel(
        _join_states,
        (rows,),
        out.device,
        *(token_ids, embedding, states.first, states.second),
        *(token_ids if states.places is None else states.places, *weights, out),
        *(len(states.first), 0.0 if norms is None else norms.eps),
        SIZE=size,
        BLOCK=block,
        NORMED=norms is not None,
        GATHERED=states.places is not None,
        num_warps=_choose_num_warps(block),
    )
    return out


def carry_states(
    carried: torch.Tensor,
    rows: torch.Tensor,
    fused: torch.Tensor,
    roots: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """:func:`pd.kernels.drafting.carry_states`."""
    size = carried.shape[1]
    block = triton.next_power_of_2(size)
    launch_kernel(
        _carry_states,
        (len(rows),),
        carried.device,
        *(carried, rows, fused, roots, last),
        SIZE=size,
        BLOCK=block,
        num_warps=_choose_num_warps(block),
    )


def start_rows(
    roots: DraftRoots,
    rows: DraftRows,
    tables: DraftTables,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    carried: torch.Tensor,
) -> None:
    """:func:`pd.kernels.drafting.start_rows`."""
    size = carried.shape[1]
    block = triton.next_power_of_2(size)
    launch_kernel(
        _start_rows,
        (len(rows.tokens),),
        carried.device,
        *(*roots, *rows, tables.levels, tables.level, tokens, positions, carried),
        SIZE=size,
        BLOCK=block,
        num_warps=_choose_num_warps(block),
    )


def branch_rows(
    roots: DraftRoots,
    rows: DraftRows,
    tables: DraftTables,
    best: torch.Tensor,
    target_ids: torch.Tensor | None,
    hidden: torch.Tensor,
) -> None:
    """:func:`pd.kernels.drafting.branch_rows`."""
    size, (count, ranks) = hidden.shape[1], best.shape
    block = triton.next_power_of_2(size)
    launch_kernel(
        _branch_rows,
        (count * ranks,),
        hidden.device,
        *(roots.number, roots.seeds, roots.temperatures, roots.positions, *rows, *tables, best),
        *(best if target_ids is None else target_ids, hidden),
        *(count, tables.drafted.shape[1], tables.levels.shape[1]),
        RANKS=ranks,
        HEAD=LEVEL_HEAD,
        FIELDS=CHILD_FIELDS,
        NAMED=target_ids is not None,
        SIZE=size,
        BLOCK=block,
        num_warps=_choose_num_warps(block),
    )
    launch_kernel(_count_up, (1,), hidden.device, tables.level, num_warps=1)


def _choose_num_warps(block: int) -> int:
    return max(1, min(16, block // 512))
