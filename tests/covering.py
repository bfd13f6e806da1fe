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
    """Some of ``cells`` in which every two values that any of them has together occur together,
    the same for the same seed; few that cost much. Values of two columns, in ascending order, that
    are ``apart`` need not."""

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
