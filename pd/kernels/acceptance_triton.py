"""The kernel for :func:`pd.kernels.acceptance.accept_drafts`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

if TYPE_CHECKING:
    from pd.kernels.draft_tensors import Trees


@triton.jit
def _accept_draft(
    sampled,
    guesses,
    parents,
    rows,
    firsts,
    counts,
    forced,
    stops,
    last,
    counted,
    tokens,
    positions,
    path,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One draft per program. A guess comes after its parent, so one pass is enough."""
    start_next(PDL)
    wait_for_previous(PDL)
    work = tl.program_id(0)
    row, first = tl.load(rows + work), tl.load(firsts + work)
    count, fixed = tl.load(counts + work).to(tl.int32), tl.load(forced + work)
    at, accepted = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
    wanted = tl.load(sampled + row)
    for place in range(WIDTH):
        tl.store(path + work * WIDTH + place, tl.full((), -1, tl.int64))
    if fixed >= 0:
        for guess in range(fixed.to(tl.int32)):
            if guess < WIDTH:
                tl.store(path + work * WIDTH + guess, tl.full((), 0, tl.int64) + guess)
        at = fixed - 1
        accepted = fixed
    else:
        for guess in range(count):
            parent = tl.load(parents + first + guess)
            token = tl.load(guesses + first + guess)
            if (parent == at) & (token == wanted):
                at = tl.full((), 0, tl.int64) + guess
                if accepted < WIDTH:
                    tl.store(path + work * WIDTH + accepted, at)
                accepted += 1
                wanted = tl.load(sampled + row + at + 1)
    tl.store(last + work, at)
    tl.store(counted + work, accepted)
    tl.store(positions + work, tl.load(stops + work) + accepted)
    tl.store(tokens + work, tl.load(sampled + row + at + 1))


def accept_drafts(sampled: torch.Tensor, trees: Trees, width: int) -> tuple[torch.Tensor, ...]:
    """Return the fields of the result of :func:`pd.kernels.acceptance.accept_drafts`."""
    works = len(trees.rows)
    made = [torch.empty_like(trees.rows) for _ in range(4)]
    found = (*made, trees.rows.new_empty(works, width))
    if works:
        launch_kernel(
            _accept_draft,
            (works,),
            sampled.device,
            *(sampled, trees.tokens, trees.parents, trees.rows, trees.firsts, trees.counts),
            *(trees.forced, trees.stops, *found),
            WIDTH=width,
            num_warps=1,
        )
    return found
