"""The shape of a draft: the parent of each guessed token."""

from __future__ import annotations

import functools
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class DraftTree:
    """A tree of guesses. Its root is the last known token of a sequence. Trees are immutable, so
    drafts of the same shape share one.

    Attributes:
        parents: index of the parent of each guess, or -1 for the root; int32 ``[size]``. Parents
            come before their children.
        size: number of guesses.
        is_chain: whether each guess follows the one before it.
    """

    def __init__(self, parents: IntArray) -> None:
        self.parents = parents
        self.size = len(parents)
        self.is_chain = bool((parents == np.arange(-1, self.size - 1)).all())

    @cached_property
    def depths(self) -> Int64Array:
        """Distance of each guess from the root, at least 1; int64 ``[size]``."""
        found = np.zeros(self.size, np.int64)
        for index, parent in enumerate(self.parents.tolist()):
            found[index] = 1 if parent < 0 else found[parent] + 1
        return found

    @cached_property
    def depth(self) -> int:
        """Number of guesses in the longest branch."""
        return int(self.depths.max())

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of guesses at each depth, starting with depth 1."""
        return tuple(np.bincount(self.depths)[1:].tolist())

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """For each guess, the guesses from the root to it, itself included."""
        found: list[tuple[int, ...]] = []
        for index, parent in enumerate(self.parents.tolist()):
            found.append((index,) if parent < 0 else (*found[parent], index))
        return found

    @cached_property
    def first_guesses(self) -> list[bool]:
        """For each guess, whether it is the first child of its parent."""
        first: dict[int, int] = {}
        for guess, parent in enumerate(self.parents.tolist()):
            first.setdefault(parent, guess)
        chosen = set(first.values())
        return [guess in chosen for guess in range(self.size)]

    @cached_property
    def has_followers(self) -> list[bool]:
        """Whether the root has children, then the same for each guess."""
        parents = set(self.parents.tolist())
        return [guess in parents for guess in range(-1, self.size)]

    @cached_property
    def attention_mask(self) -> BoolArray:
        """Attention mask among the root and the guesses: bool ``[1 + size, 1 + size]``, in the form
        of :class:`pd.kernels.attention.AttentionBatch`."""
        seen = np.eye(1 + self.size, dtype=np.bool_)
        for index, parent in enumerate(self.parents.tolist(), 1):
            seen[index] |= seen[parent + 1]
        return seen

    def take_first(self, count: int) -> DraftTree:
        """Return the tree of the first ``count`` guesses, at least one."""
        return self if count >= self.size else _cut_tree(self, count)


@functools.lru_cache(maxsize=1024)
def _cut_tree(tree: DraftTree, count: int) -> DraftTree:
    return DraftTree(tree.parents[:count])


@functools.lru_cache(maxsize=256)
def make_chain(length: int) -> DraftTree:
    """Return the tree in which each guess follows the one before it."""
    return DraftTree(np.arange(-1, length - 1, dtype=np.int32))
