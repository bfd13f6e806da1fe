"""Attention of a model whose sequences have several page tables: one for layers that see all keys,
and others for layers with sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pd.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    ChunkAttention,
    DecodeAttention,
    MixedAttention,
    PlannedAttention,
    VerifyAttention,
)
from pd.kernels.attention.trees import MAX_TREE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pd.kernels.attention.base import (
        BoolArray,
        Int64Array,
        IntArray,
        PagedKV,
        UnreadStarts,
    )
    from pd.kernels.latent import LatentHeads


@dataclass(frozen=True)
class TablePart:
    """The layers of one page table.

    Attributes:
        table: number of the page table.
        window: number of keys that a token sees in these layers; 0 for all.
        backend: attention over the planes of these layers.
    """

    table: int
    window: int
    backend: AttentionBackend

    def cut_tables(
        self, starts: Int64Array, pages: Sequence[IntArray], page_size: int
    ) -> tuple[Int64Array, list[IntArray]]:
        """Take this part's page tables without the pages before the window of the first new token.

        Attention depends only on distances between tokens, so the backend may count positions from
        the first page that is left. It therefore never meets freed pages.

        Args:
            starts: int64 ``[n]``, number of tokens of each sequence in the pool.
            pages: int32 ``[tables, pages]`` each.

        Returns:
            ``starts`` without the tokens of pages left out, and the tables.
        """
        tables = [each[self.table] for each in pages]
        if not self.window:
            return starts, tables
        firsts = np.maximum(starts - self.window + 1, 0) // page_size
        cut = [each[first:] for each, first in zip(tables, firsts.tolist(), strict=True)]
        return starts - firsts * page_size, cut

    def limit_context(self, max_context: int, tokens: int, page_size: int) -> int:
        """Return the longest sequence that the backend meets after :meth:`cut_tables`.

        Args:
            max_context: longest sequence.
            tokens: most new tokens of a sequence.
        """
        if not self.window:
            return max_context
        return min(max_context, self.window + tokens + page_size)


class _Parts(PlannedAttention):
    """Planned attention of each part. Layers have the numbers of the whole model."""

    def __init__(
        self,
        pool: PagedKV,
        parts: Sequence[TablePart],
        planned: Sequence[PlannedAttention],
        layers: Sequence[tuple[int, int]],
    ) -> None:
        self.pool, self._parts, self._planned, self._layers = pool, parts, planned, layers

    # The base class has an attribute.
    @property
    def slots(self) -> torch.Tensor:  # type: ignore[override]
        """Slots of the new tokens in the first page table."""
        return self._planned[0].slots

    def get_slots(self, layer: int) -> torch.Tensor:
        return self._planned[self._layers[layer][0]].slots

    def list_slots(self) -> list[torch.Tensor]:
        return [planned.slots for planned in self._planned]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        part, layer = self._layers[layer]
        return self._planned[part].attend(layer, q, k, v, sinks)

    def attend_latents(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, heads: LatentHeads
    ) -> torch.Tensor:
        part, layer = self._layers[layer]
        return self._planned[part].attend_latents(layer, q, rows, heads)


class _TablesDecode(_Parts, DecodeAttention):
    def plan(self, starts: Int64Array, pages: Sequence[IntArray]) -> None:
        for part, planned in zip(self._parts, self._planned, strict=True):
            assert isinstance(planned, DecodeAttention)
            planned.plan(*part.cut_tables(starts, pages, self.pool.page_size))


class _TablesChunk(_Parts, ChunkAttention):
    def plan(self, start: int, length: int, pages: IntArray) -> None:
        for part, planned in zip(self._parts, self._planned, strict=True):
            assert isinstance(planned, ChunkAttention)
            starts, (table,) = part.cut_tables(np.array([start]), [pages], self.pool.page_size)
            planned.plan(int(starts[0]), length, table)


class _TablesVerify(_Parts, VerifyAttention):
    @property
    def takes_unread(self) -> bool:  # type: ignore[override]  # the base class has an attribute
        return all(
            isinstance(each, VerifyAttention) and each.takes_unread for each in self._planned
        )

    def plan(
        self,
        starts: Int64Array,
        lengths: Int64Array,
        pages: Sequence[IntArray],
        trees: Sequence[BoolArray | None] | None = None,
        unread: UnreadStarts | None = None,
    ) -> None:
        for part, planned in zip(self._parts, self._planned, strict=True):
            assert isinstance(planned, VerifyAttention)
            cut, tables = part.cut_tables(starts, pages, self.pool.page_size)
            planned.plan(cut, lengths, tables, trees, unread)


class _TablesMixed(_Parts, MixedAttention):
    def plan(self, starts: Int64Array, lengths: Int64Array, pages: Sequence[IntArray]) -> None:
        for part, planned in zip(self._parts, self._planned, strict=True):
            assert isinstance(planned, MixedAttention)
            cut, tables = part.cut_tables(starts, pages, self.pool.page_size)
            planned.plan(cut, lengths, tables)


class TablesAttention(_Parts, AttentionBackend):
    """Attention with a backend for each page table.

    Args:
        pool: the layers of the model in its own order.
        parts: one for each page table, in their order.
        layers: for each layer of the model its part, and its number in that part.
    """

    def __init__(
        self, pool: PagedKV, parts: Sequence[TablePart], layers: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(pool, parts, [part.backend for part in parts], layers)
        self.name = parts[0].backend.name
        self.scratch_bytes = sum(part.backend.scratch_bytes for part in parts)

    def plan(self, batch: AttentionBatch) -> None:
        for part in self._parts:
            starts, tables = part.cut_tables(batch.starts, batch.pages, self.pool.page_size)
            part.backend.plan(AttentionBatch(starts, batch.lengths, tables, batch.trees))

    def make_decode_graph(self, rows: int, max_context: int) -> DecodeAttention | None:
        made = self._make_each(
            max_context, 1, lambda backend, limit: backend.make_decode_graph(rows, limit)
        )
        return _TablesDecode(self.pool, self._parts, made, self._layers) if made else None

    def make_chunk_graph(self, tokens: int, max_context: int) -> ChunkAttention | None:
        made = self._make_each(
            max_context, tokens, lambda backend, limit: backend.make_chunk_graph(tokens, limit)
        )
        return _TablesChunk(self.pool, self._parts, made, self._layers) if made else None

    def make_verify_graph(self, rows: int, max_context: int) -> VerifyAttention | None:
        made = self._make_each(
            max_context, 2 * MAX_TREE, lambda backend, limit: backend.make_verify_graph(rows, limit)
        )
        return _TablesVerify(self.pool, self._parts, made, self._layers) if made else None

    def make_mixed_graph(
        self, tokens: int, singles: int, chunks: int, max_context: int
    ) -> MixedAttention | None:
        made = self._make_each(
            max_context,
            tokens,
            lambda backend, limit: backend.make_mixed_graph(tokens, singles, chunks, limit),
        )
        return _TablesMixed(self.pool, self._parts, made, self._layers) if made else None

    def _make_each(
        self,
        max_context: int,
        tokens: int,
        make: Callable[[AttentionBackend, int], PlannedAttention | None],
    ) -> list[PlannedAttention]:
        """Make a graph of each part, given the longest sequence it meets. Returns nothing if some
        backend has none."""
        page_size = self.pool.page_size
        made = [
            make(part.backend, part.limit_context(max_context, tokens, page_size))
            for part in self._parts
        ]
        return [each for each in made if each is not None] if None not in made else []
