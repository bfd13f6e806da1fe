"""Acceptance of drafted tokens, found on the device.

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
        stops: position of the token after each root.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    forced: torch.Tensor
    stops: torch.Tensor


class Accepted(NamedTuple):
    """The accepted end of each draft; int64 tensors on the device, ``[works]`` each but the last.

    Attributes:
        last: index of the last accepted guess inside its draft, -1 for none.
        counts: number of accepted guesses.
        tokens: the model's own token after the last accepted one; ``positions`` are those of these
            tokens.
        path: int64 ``[works, width]``, the accepted guesses from the root on, then -1.
    """

    last: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    path: torch.Tensor

    def sampled(self, samples: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The tokens that came out of each work, int64 ``[works, 1 + width]``: what was sampled
        after the root, and after each guess of ``path``; then -1.

        Args:
            samples: int64, the tokens that the step sampled.
            rows: int64 ``[works]``, as :attr:`Trees.rows`.
        """
        most = len(samples) - 1
        after = samples[(rows[:, None] + 1 + self.path.clamp(min=0)).clamp(max=most)]
        after = torch.where(self.path >= 0, after, -1)
        return torch.cat((samples[rows.clamp(max=most)][:, None], after), dim=1)


def accept(sampled: torch.Tensor, trees: Trees, width: int = 0) -> Accepted:
    """Follow the accepted guesses of every draft; on a GPU this is only queued.

    Args:
        sampled: int64 ``[rows]``, the tokens that the step sampled.
        width: most guesses of a path, or 0 for no paths; what is longer is cut.
    """
    if use_triton(sampled):
        from pd.kernels import acceptance_triton

        return Accepted(*acceptance_triton.accept(sampled, trees, width))
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
