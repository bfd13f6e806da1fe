"""The tree of guesses drafted by a head, and the order of its passes."""

from __future__ import annotations

import functools
import heapq
import itertools
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pd.engine.draft_tree import DraftTree, make_chain

Int64Array = npt.NDArray[np.int64]

# Assumed chances of a right token by its rank among the tokens drafted at one place. Each rank gets
# a share of the chance left by the ranks before it. Heads that are right more often at the first
# rank should draft chains.
_FIRST, _NEXT = 0.6, 0.4


def rank_chances(ranks: int, first: float = _FIRST) -> list[float]:
    """Return the chance of each rank to be the model's token, starting with ``first``."""
    chances, left = [first], 1.0 - first
    for _ in range(ranks - 1):
        chances.append(left * _NEXT)
        left -= chances[-1]
    return chances


class DraftShape:
    """A tree of guesses, ordered by their chance of acceptance.

    Its first guesses therefore always form the best tree of their number.

    Attributes:
        tree: parents of the guesses.
        ranks: rank of each guess among the tokens drafted at its place, 0 for the likeliest.
        topk: maximum number of tokens to draft at one place.
    """

    def __init__(self, tree: DraftTree, ranks: tuple[int, ...], topk: int) -> None:
        self.tree, self.ranks, self.topk = tree, ranks, topk

    @classmethod
    def build_best(cls, size: int, topk: int) -> DraftShape:
        """Build the best tree of ``size`` guesses, with at most ``topk`` guesses after a token.

        For ``topk`` 1 this is a chain.
        """
        if topk == 1:
            return cls(make_chain(size), (0,) * size, 1)
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

    def take_first(self, size: int) -> DraftShape:
        """Return the shape of the first ``size`` guesses."""
        return self if size >= self.tree.size else _take_first(self, size)

    @property
    def depth(self) -> int:
        """Number of passes of the head to draft it."""
        return int(self.tree.depths.max())

    @property
    def width(self) -> int:
        """Number of rows of one sequence in the widest of these passes."""
        return max(len(rows) for rows in self._rows)

    @cached_property
    def _rows(self) -> list[list[int]]:
        """The rows of each pass: the guesses with other guesses after them, -1 for the root."""
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
def _take_first(shape: DraftShape, size: int) -> DraftShape:
    return DraftShape(shape.tree.take_first(size), shape.ranks[:size], shape.topk)
