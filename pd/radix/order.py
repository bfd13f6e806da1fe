"""The unlocked leaves of a radix tree, always sorted by eviction key."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.radix.tree_node import TreeNode


class EvictionOrder:
    """A sorted map from distinct integer keys to nodes.

    The keys form a sorted sequence in chunks of at most ``chunk_size``. An operation bisects to a
    chunk and moves at most one chunk of pointers. We do not use a heap with lazy removal, because
    stale entries would pile up, and a single call would have to pay for all of them.
    """

    def __init__(self, chunk_size: int = 512) -> None:
        self._chunk_size = chunk_size
        self._nodes: dict[int, TreeNode] = {}
        self._chunks: list[list[int]] = []
        self._lasts: list[int] = []  # last key of each chunk, so one bisection finds the chunk

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[tuple[int, TreeNode]]:
        """Iterate over all entries in order. O(n), so only for checks and tests."""
        return ((key, self._nodes[key]) for chunk in self._chunks for key in chunk)

    def add_leaf(self, key: int, node: TreeNode) -> None:
        assert key not in self._nodes, f"eviction key {key} is taken"
        self._nodes[key] = node
        index = bisect_left(self._lasts, key)
        if index == len(self._lasts):
            self._append_key(key)
            return
        chunk = self._chunks[index]
        insort(chunk, key)
        if len(chunk) > self._chunk_size:
            half = len(chunk) // 2
            self._chunks.insert(index, chunk[:half])
            self._lasts.insert(index, chunk[half - 1])
            del chunk[:half]

    def remove_key(self, key: int) -> None:
        del self._nodes[key]
        index = bisect_left(self._lasts, key)
        chunk = self._chunks[index]
        del chunk[bisect_left(chunk, key)]
        if not chunk:
            del self._chunks[index], self._lasts[index]
            return
        self._lasts[index] = chunk[-1]
        if len(chunk) < self._chunk_size // 4:
            self._merge_chunk(index)

    def find_first(self) -> TreeNode | None:
        """Return the node with the smallest key, or None."""
        return self._nodes[self._chunks[0][0]] if self._chunks else None

    def find_first_from(self, floor: int) -> TreeNode | None:
        """Return the node with the smallest key of at least ``floor``, or None."""
        index = bisect_left(self._lasts, floor)
        if index == len(self._lasts):
            return None
        chunk = self._chunks[index]
        return self._nodes[chunk[bisect_left(chunk, floor)]]

    def _append_key(self, key: int) -> None:
        """Add a key above all others. Most keys are, because they hold the current time."""
        if self._chunks and len(self._chunks[-1]) < self._chunk_size:
            self._chunks[-1].append(key)
            self._lasts[-1] = key
        else:
            # A new chunk instead of two halves, so rising keys fill chunks completely.
            self._chunks.append([key])
            self._lasts.append(key)

    def _merge_chunk(self, index: int) -> None:
        """Merge a small chunk with a neighbour, if both fit into one."""
        for left in (index - 1, index):
            if 0 <= left < len(self._chunks) - 1:
                right = self._chunks[left + 1]
                if len(self._chunks[left]) + len(right) <= self._chunk_size:
                    self._chunks[left].extend(right)
                    self._lasts[left] = self._lasts[left + 1]
                    del self._chunks[left + 1], self._lasts[left + 1]
                    return
