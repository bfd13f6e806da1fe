"""The kernel behind :func:`pd.kernels.acceptance.accept`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd.kernels.acceptance import Accepted, Trees
from pd.kernels.triton_launch import launch, start_next, wait_for_previous


@triton.jit
def _follow(
    sampled,
    guesses,
    parents,
    rows,
    firsts,
    counts,
    forced,
    last,
    depth,
    tokens,
    PDL: tl.constexpr,
):
    """One draft per program. A guess comes after its parent, so one pass over them is enough."""
    start_next(PDL)
    wait_for_previous(PDL)
    work = tl.program_id(0)
    row, first = tl.load(rows + work), tl.load(firsts + work)
    count, fixed = tl.load(counts + work).to(tl.int32), tl.load(forced + work)
    at, accepted = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
    wanted = tl.load(sampled + row)
    for guess in range(count):
        parent = tl.load(parents + first + guess)
        token = tl.load(guesses + first + guess)
        if (parent == at) & (token == wanted):
            at = tl.full((), 0, tl.int64) + guess
            accepted += 1
            wanted = tl.load(sampled + row + at + 1)
    if fixed >= 0:
        at = fixed - 1
        accepted = fixed
    tl.store(last + work, at)
    tl.store(depth + work, accepted)
    tl.store(tokens + work, tl.load(sampled + row + at + 1))


def accept(sampled: torch.Tensor, trees: Trees) -> Accepted:
    """:func:`pd.kernels.acceptance.accept`."""
    found = Accepted(*(torch.empty_like(trees.rows) for _ in range(3)))
    if len(trees.rows):
        launch(
            _follow,
            (len(trees.rows),),
            sampled.device,
            *(sampled, trees.tokens, trees.parents, trees.rows, trees.firsts, trees.counts),
            *(trees.forced, *found),
            num_warps=1,
        )
    return found
