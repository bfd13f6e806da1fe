"""The tree of guesses that a head drafts, and the order in which it computes them."""

from __future__ import annotations

import functools
import heapq
import itertools
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pd.engine.draft_tree import DraftTree, chain

Int64Array = npt.NDArray[np.int64]

# What is taken for the chance that a token is right by its rank among those drafted at one place:
# each rank's is a part of what the ranks before it leave over. Heads that are right more often than
# this at the first rank are better off with chains.
_FIRST, _NEXT = 0.6, 0.4


def rank_chances(ranks: int, first: float = _FIRST) -> list[float]:
    """Chances that the model draws the token of each rank, if that of the first is ``first``."""
    chances, left = [first], 1.0 - first
    for _ in range(ranks - 1):
        chances.append(left * _NEXT)
        left -= chances[-1]
    return chances


class DraftShape:
    """A tree whose guesses are ordered by their chance to be accepted, so that its first guesses
    are the best tree of their number.

    Attributes:
        tree: parents of the guesses.
        ranks: for each guess its rank among the tokens drafted at its place, 0 for the likeliest.
        topk: tokens that are drafted at one place, at most.
    """

    def __init__(self, tree: DraftTree, ranks: tuple[int, ...], topk: int) -> None:
        self.tree, self.ranks, self.topk = tree, ranks, topk

    @classmethod
    def best(cls, size: int, topk: int) -> DraftShape:
        """The tree of ``size`` guesses that are likeliest to be accepted, with up to ``topk``
        guesses after each token; for ``topk`` 1 a chain."""
        if topk == 1:
            return cls(chain(size), (0,) * size, 1)
        chances = rank_chances(topk)
        parents, ranks = list[int](), list[int]()
        number = itertools.count()
        # Candidates: chance, order of arrival, parent, chance of the parent, rank.
        heap = [(-chances[0], next(number), -1, 1.0, 0)]
        while len(parents) < size:
            chance, _, parent, above, rank = heapq.heappop(heap)
            guess = len(parents)
            parents.append(parent)
            ranks.append(rank)
            if rank + 1 < topk:
                other = -above * chances[rank + 1]
                heapq.heappush(heap, (other, next(number), parent, above, rank + 1))
            heapq.heappush(heap, (chance * chances[0], next(number), guess, -chance, 0))
        return cls(DraftTree(np.array(parents, np.int32)), tuple(ranks), topk)

    def first(self, size: int) -> DraftShape:
        """The shape without the guesses after the first ``size``."""
        return self if size >= self.tree.size else _beginning(self, size)

    @property
    def depth(self) -> int:
        """Passes of the head that draft it."""
        return int(self.tree.depths.max())

    @property
    def width(self) -> int:
        """Rows of one sequence in the widest of these passes."""
        return max(len(rows) for rows in self._rows)

    @cached_property
    def _rows(self) -> list[list[int]]:
        """For each pass the guesses that are its rows, -1 for the last known token: those that have
        guesses behind them."""
        followed = sorted(set(self.tree.parents.tolist()))
        depths = [0, *self.tree.depths.tolist()]
        return [
            [guess for guess in followed if depths[guess + 1] == depth]
            for depth in range(self.depth + 1)
        ]

    @cached_property
    def levels(self) -> Int64Array:
        """``DraftTables.levels`` of :mod:`pd.kernels.drafting`."""
        parents, tables = self.tree.parents.tolist(), []
        for depth in range(self.depth):
            above, below = self._rows[depth], self._rows[depth + 1]
            guesses = np.flatnonzero(self.tree.depths == depth + 1).tolist()
            fields = [self.width, len(guesses), len(below)]
            for guess in guesses:
                mask = sum(1 << seen for seen in self.tree.paths[guess])
                # As the signed number with these bits.
                mask -= (mask >> 63) << 64
                row = below.index(guess) if guess in below else -1
                fields += [above.index(parents[guess]), self.ranks[guess], guess, mask, row]
            tables.append(fields)
        columns = max(len(fields) for fields in tables)
        return np.array([fields + [0] * (columns - len(fields)) for fields in tables], np.int64)


@functools.lru_cache(maxsize=256)
def _beginning(shape: DraftShape, size: int) -> DraftShape:
    return DraftShape(shape.tree.first(size), shape.ranks[:size], shape.topk)
