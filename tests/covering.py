"""Samples of matrices in which every two values of different columns occur together."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    Cell = tuple[Any, ...]

# Cells among which the one is taken that adds most.
_LOOKED_AT = 60


def every_two(
    cells: Sequence[Cell],
    seed: int,
    cost: Callable[[Cell], float] = lambda cell: 1.0,
    *,
    apart: Collection[tuple[int, int]] = (),
) -> list[Cell]:
    """Choose cheap ``cells`` so that any two values that occur together in some cell occur together
    in a chosen one. The same seed chooses the same cells. Values of two columns that are ``apart``
    (in ascending order) need not occur together."""

    def pairs(cell: Cell) -> set[tuple[int, Any, int, Any]]:
        both = itertools.combinations(enumerate(cell), 2)
        return {(i, a, j, b) for (i, a), (j, b) in both if (i, j) not in apart}

    rng, missing = random.Random(seed), set().union(*map(pairs, cells))
    found = []
    while missing:
        some = rng.sample(cells, min(_LOOKED_AT, len(cells)))
        best = max(some, key=lambda cell: len(pairs(cell) & missing) / cost(cell))
        if pairs(best) & missing:
            found.append(best)
            missing -= pairs(best)
    return found
