"""Which drafted tokens a step accepts, found on the device.

A draft is a tree whose root is the last known token (:class:`pd.speculative.draft.Draft`). The
model samples a token after the root and after each guess. A guess is accepted if it equals the
token that was sampled after its parent, and its parent is accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pd.kernels.dispatch import use_triton

if TYPE_CHECKING:
    from collections.abc import Iterable


class Trees(NamedTuple):
    """Drafts of a step; int64 tensors on the device, ``[works]`` each but the first two.

    Attributes:
        tokens: drafted tokens, ``[n]``.
        parents: for each of them the index of its parent inside its draft, or -1; ``[n]``.
        rows: row of the samples that was sampled after each root; those after guesses follow.
        firsts: where each draft begins in ``tokens``.
        counts: number of its guesses, which may be 0.
        forced: number of leading guesses that count as accepted whatever was sampled, or -1.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    forced: torch.Tensor


class Accepted(NamedTuple):
    """The accepted end of each draft; int64 tensors on the device, ``[works]`` each.

    Attributes:
        last: index of the last accepted guess inside its draft, -1 for none.
        depth: number of accepted guesses.
        tokens: the model's own token after the last accepted one.
    """

    last: torch.Tensor
    depth: torch.Tensor
    tokens: torch.Tensor


def accept(sampled: torch.Tensor, trees: Trees) -> Accepted:
    """Follow the accepted guesses of every draft; on a GPU this is only queued.

    Args:
        sampled: int64 ``[rows]``, the tokens that the step sampled.
    """
    if use_triton(sampled):
        from pd.kernels import acceptance_triton

        return acceptance_triton.accept(sampled, trees)
    last, depth = torch.full_like(trees.rows, -1), torch.zeros_like(trees.rows)
    drawn, guessed, parents = sampled.tolist(), trees.tokens.tolist(), trees.parents.tolist()
    for work, (row, first, count, forced) in enumerate(_rows(trees)):
        if forced >= 0:
            last[work], depth[work] = forced - 1, forced
            continue
        at = -1
        for guess in range(count):
            place = first + guess
            if parents[place] == at and guessed[place] == drawn[row + at + 1]:
                at = guess
                depth[work] += 1
        last[work] = at
    return Accepted(last, depth, sampled[trees.rows + last + 1])


def _rows(trees: Trees) -> Iterable[tuple[int, ...]]:
    columns = (trees.rows, trees.firsts, trees.counts, trees.forced)
    return zip(*(column.tolist() for column in columns), strict=True)
