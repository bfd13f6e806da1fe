"""Divides a step into work items for :mod:`pd.kernels.attention.triton_kernel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from pd.kernels.attention.base import Int64Array, IntArray


@dataclass(frozen=True)
class Tiles:
    """Queries that are attended together: consecutive new tokens of one sequence.

    Attributes (int64 ``[tiles]`` each):
        rows: the first token's row among the step's tokens.
        tokens: number of tokens.
        positions: the first token's position in its sequence, or that of the first token of its
            tree.
        tables: start of the sequence's page table.
        begins, ends: range of the keys that the tile's tokens may see, not empty.
    """

    rows: Int64Array
    tokens: Int64Array
    positions: Int64Array
    tables: Int64Array
    begins: Int64Array
    ends: Int64Array

    @classmethod
    def cut_chunks(
        cls,
        rows: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        tables: Int64Array,
        size: int,
        *,
        trees: bool = False,
        limits: Int64Array | None = None,
        window: int = 0,
    ) -> Tiles:
        """Cut chunks of ``lengths`` tokens, or ``trees`` of them, into tiles of ``size``.

        Args:
            limits: maximum number of positions by which each may start later.
            window: number of keys that a token sees; 0 for all.
        """
        counts = -(-lengths // size)
        chunk = np.repeat(np.arange(len(lengths)), counts)
        offsets = (np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
        tokens = np.minimum(lengths[chunk] - offsets, size)
        positions = starts[chunk] + offsets
        firsts = starts[chunk] if trees else positions
        return cls(
            rows[chunk] + offsets,
            tokens,
            firsts,
            tables[chunk],
            _find_begins(firsts, window),
            positions + tokens + (0 if limits is None else limits[chunk]),
        )

    @classmethod
    def make_single(
        cls, positions: Int64Array, tables: Int64Array, ends: Int64Array, window: int = 0
    ) -> Tiles:
        """Make a tile of every row of a step; ``window`` as in :meth:`cut_chunks`."""
        rows = np.arange(len(ends))
        begins = _find_begins(positions, window)
        return cls(rows, np.ones_like(rows), positions, tables, begins, ends)


def _find_begins(positions: Int64Array, window: int) -> Int64Array:
    """Find the first key that a token at each position sees."""
    return np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)


@dataclass(frozen=True)
class SplitPolicy:
    """Divides a step's keys into splits.

    Attributes:
        items: number of work items that keeps the device busy.
        granule: keys of the smallest split. Splits are multiples of it.
    """

    items: int
    granule: int

    @property
    def max_slots(self) -> int:
        """Maximum number of partial results of any step. A tile in s > 1 splits has at least s -
        1/2 shares of ``items``, so all together have at most 4/3 of them."""
        return -(-4 * self.items // 3)

    def split_tiles(self, tiles: Tiles) -> IntArray:
        """Make work items, int32 ``[n, FIELDS]``, the longest first. There are at most
        ``max_slots`` more items than tiles.

        All splits of a step have about the same length, whatever the sequences' lengths: one
        ``items``-th of all keys. So the splits of a sequence, and with them the last bits of its
        result, depend on the whole step.
        """
        spans = tiles.ends - tiles.begins
        share = max(self.granule, -(-int(spans.sum()) // self.items))
        splits = np.maximum(1, (2 * spans + share) // (2 * share))
        sizes = -(-spans // (splits * self.granule)) * self.granule
        splits = -(-spans // sizes)
        tile = np.repeat(np.arange(len(spans)), splits)
        index = np.arange(len(tile)) - np.repeat(np.cumsum(splits) - splits, splits)
        begins = tiles.begins[tile] + index * sizes[tile]
        stops = np.minimum(begins + sizes[tile], tiles.ends[tile])
        slots = np.where(splits > 1, splits, 0)
        first_slots = (np.cumsum(slots) - slots)[tile]
        fields = (
            tiles.rows[tile],
            tiles.tokens[tile],
            tiles.positions[tile],
            tiles.tables[tile],
            begins,
            stops,
            first_slots + index,
            first_slots,
            splits[tile],
        )
        order = np.argsort(begins - stops, kind="stable")
        return np.stack(fields, axis=1)[order].astype(np.int32)


@dataclass(frozen=True)
class AttentionWork:
    """Work items on the device, at most ``capacity``."""

    num_items: torch.Tensor
    items: torch.Tensor
    capacity: int
