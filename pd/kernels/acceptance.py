"""Acceptance of drafted tokens on the device.

A draft is a tree whose root is the last known token (:class:`pd.speculative.draft.Draft`). The
model samples a token after the root and after each guess. A guess is accepted if its parent is, and
if it equals the token sampled after its parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd.kernels.dispatch import uses_triton
from pd.kernels.draft_tensors import Accepted, Trees

if TYPE_CHECKING:
    from collections.abc import Iterable


def accept_drafts(sampled: torch.Tensor, trees: Trees, width: int = 0) -> Accepted:
    """Find the accepted guesses of every draft. On a GPU this is only queued.

    Args:
        sampled: int64 ``[rows]``, the tokens that the step sampled.
        width: maximum length of a path, or 0 for no paths. Longer paths are cut.
    """
    if uses_triton(sampled):
        from pd.kernels import acceptance_triton

        return Accepted(*acceptance_triton.accept_drafts(sampled, trees, width))
    last, counts = torch.full_like(trees.rows, -1), torch.zeros_like(trees.rows)
    path = torch.full((len(last), width), -1, dtype=torch.int64, device=last.device)
    drawn, guessed, parents = sampled.tolist(), trees.tokens.tolist(), trees.parents.tolist()
    for work, (row, first, count, forced) in enumerate(_rows(trees)):
        found, at = list(range(max(forced, 0))), -1
        for guess in range(0 if forced >= 0 else count):
            place = first + guess
            if parents[place] == at and guessed[place] == drawn[row + at + 1]:
                at = guess
                found.append(guess)
        last[work], counts[work] = found[-1] if found else -1, len(found)
        if width:
            path[work, : len(found)] = torch.tensor(found[:width], dtype=torch.int64)
    tokens = sampled[trees.rows + last + 1]
    return Accepted(last, counts, tokens, trees.stops + counts, path)


def _rows(trees: Trees) -> Iterable[tuple[int, ...]]:
    columns = (trees.rows, trees.firsts, trees.counts, trees.forced)
    return zip(*(column.tolist() for column in columns), strict=True)
