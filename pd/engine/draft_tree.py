"""The shape of a draft: which guessed token follows which."""

from __future__ import annotations

import functools
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class DraftTree:
    """A tree of guesses whose root is a sequence's last known token. It never changes, so drafts of
    the same shape share one.

    Attributes:
        parents: for each guess the index of the one that it follows, which comes before it, or -1
            for the root; int32 ``[size]``.
        size: number of guesses.
        is_chain: whether each follows the one before it.
    """

    def __init__(self, parents: IntArray) -> None:
        self.parents = parents
        self.size = len(parents)
        self.is_chain = bool((parents == np.arange(-1, self.size - 1)).all())

    @cached_property
    def depths(self) -> Int64Array:
        """Number of guesses from the root to each guess, itself included; int64 ``[size]``."""
        found = np.zeros(self.size, np.int64)
        for index, parent in enumerate(self.parents.tolist()):
            found[index] = 1 if parent < 0 else found[parent] + 1
        return found

    @cached_property
    def depth(self) -> int:
        """Guesses of the longest branch."""
        return int(self.depths.max())

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of guesses at each depth, from that of the root's next token on."""
        return tuple(np.bincount(self.depths)[1:].tolist())

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """Guesses from the root to each guess, itself included."""
        found: list[tuple[int, ...]] = []
        for index, parent in enumerate(self.parents.tolist()):
            found.append((index,) if parent < 0 else (*found[parent], index))
        return found

    @cached_property
    def first_guesses(self) -> list[bool]:
        """Whether each guess is the first of those that follow the same token."""
        first: dict[int, int] = {}
        for guess, parent in enumerate(self.parents.tolist()):
            first.setdefault(parent, guess)
        chosen = set(first.values())
        return [guess in chosen for guess in range(self.size)]

    @cached_property
    def followed(self) -> list[bool]:
        """Whether a guess follows the root, and then each guess."""
        parents = set(self.parents.tolist())
        return [guess in parents for guess in range(-1, self.size)]

    @cached_property
    def visible(self) -> BoolArray:
        """Mask of attention among the root and then the guesses: bool ``[1 + size, 1 + size]``, as
        :class:`pd.kernels.attention.AttentionBatch` wants it."""
        seen = np.eye(1 + self.size, dtype=np.bool_)
        for index, parent in enumerate(self.parents.tolist(), 1):
            seen[index] |= seen[parent + 1]
        return seen

    def first(self, count: int) -> DraftTree:
        """The tree without the guesses after the first ``count``, which may not be 0."""
        return self if count >= self.size else _beginning(self, count)


@functools.lru_cache(maxsize=1024)
def _beginning(tree: DraftTree, count: int) -> DraftTree:
    return DraftTree(tree.parents[:count])


@functools.lru_cache(maxsize=256)
def chain(length: int) -> DraftTree:
    """The tree of guesses that follow one another."""
    return DraftTree(np.arange(-1, length - 1, dtype=np.int32))
