"""Attention by our Triton kernel in CUDA graphs, for :mod:`pd.kernels.attention.triton_backend`.

Buffers have a fixed size. The grid is as large as the work of any plan; programs without a work
item end at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.attention.base import DecodeAttention, DraftAttention, Int64Array, VerifyAttention
from pd.kernels.attention.page_tables import extended, padded_decode, padded_tables
from pd.kernels.attention.trees import MAX_TREE, tree_masks
from pd.kernels.attention.triton_kernel import FIELDS, locate_tokens
from pd.kernels.attention.triton_work import Tiles, Work
from pd.kernels.paging import page_count
from pd.kernels.staging import packed_bytes
from pd.kernels.triton_launch import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import BoolArray, IntArray
    from pd.kernels.attention.triton_backend import TritonAttention
    from pd.kernels.staging import Array

# Rows that one program of the kernel that computes slots looks up.
_LOCATED = 128
_NONE = np.empty((0, FIELDS), np.int32)


class TritonDecode(DecodeAttention):
    """The decode kernel over buffers of a fixed size.

    The grid is as large as the work of any plan; programs without a work item end at once.
    """

    def __init__(self, backend: TritonAttention, rows: int, max_context: int) -> None:
        self.pool = backend.pool
        self._backend, self._rows = backend, rows
        self._kernel = backend.decode_kernel(rows)
        self._capacity = rows + self._kernel.policy.max_slots
        num_pages = rows * page_count(max_context, self.pool.page_size)
        largest = self._layout(
            np.empty(rows, np.int64), np.empty((0, FIELDS), np.int32), np.empty(num_pages, np.int32)
        )
        self._memory = backend.graph_memory(packed_bytes(largest))
        self.plan(np.empty(0, np.int64), [])

    def plan(self, starts: Int64Array, pages: Sequence[IntArray]) -> None:
        starts, tables = padded_decode(self.pool, self._rows, starts, pages)
        everyone, ones = np.arange(self._rows), np.ones(self._rows, np.int64)
        work = self._kernel.policy.work(Tiles.single(starts, tables.offsets, starts + 1))
        arrays = self._layout(tables.slots(everyone, starts, ones), work, tables.flat)
        assert packed_bytes(arrays) <= len(self._memory), "more pages than max_context has"
        views = self._backend.staging.upload(arrays, self._memory)
        self.slots, num_items, items, self._tables = views
        self._work = Work(num_items, items, self._capacity)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._kernel.launch(layer, q, out, self._work, self._tables)
        return out

    def _layout(self, slots: Int64Array, work: IntArray, tables: IntArray) -> list[Array]:
        """List the arrays to upload; all but the last have the same size in every plan."""
        items = np.zeros((self._capacity, FIELDS), np.int32)
        items[: len(work)] = work
        return [slots, np.array([len(work)], np.int32), items, tables]


class TritonVerify(VerifyAttention):
    """The kernel for trees, also where all sequences have chains."""

    def __init__(self, backend: TritonAttention, rows: int, max_context: int) -> None:
        self.pool = backend.pool
        self._backend, self._rows = backend, rows
        self._kernel = backend.tree_kernel(rows)
        self._capacity = rows + self._kernel.policy.max_slots
        zeros = np.zeros(rows, np.int64)
        num_pages = rows * page_count(max_context, self.pool.page_size)
        largest = [
            zeros,
            zeros,
            *_padded_work(_NONE, self._capacity),
            np.zeros(num_pages, np.int32),
        ]
        self._memory = backend.graph_memory(packed_bytes(largest))
        none = np.empty(0, np.int64)
        self.plan(none, none, [])

    def plan(
        self,
        starts: Int64Array,
        lengths: Int64Array,
        pages: Sequence[IntArray],
        trees: Sequence[BoolArray | None] | None = None,
    ) -> None:
        assert (lengths <= MAX_TREE).all(), f"more than {MAX_TREE} new tokens of a sequence"
        missing = self._rows - int(lengths.sum())
        assert missing >= 0, "more tokens than the graph has rows"
        starts, lengths = extended(starts, missing, 0), extended(lengths, missing, 1)
        tables = padded_tables(self.pool, pages, starts + lengths)
        firsts = np.cumsum(lengths) - lengths
        tiles = Tiles.cut(
            firsts, starts, lengths, tables.offsets, self._kernel.tile_tokens, trees=True
        )
        work = self._kernel.policy.work(tiles)
        masks = tree_masks(lengths, None if trees is None else [*trees, *[None] * missing])
        arrays = [
            tables.slots(np.arange(len(starts)), starts, lengths),
            masks,
            *_padded_work(work, self._capacity),
            tables.flat,
        ]
        assert packed_bytes(arrays) <= len(self._memory), "more pages than max_context has"
        views = self._backend.staging.upload(arrays, self._memory)
        self.slots, seen, num_items, items, self._tables = views
        self._work = Work(num_items, items, self._capacity, seen)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._kernel.launch(layer, q, out, self._work, self._tables)
        return out


class TritonDraft(DraftAttention):
    """The decode kernel with bases and masks that are read when it runs."""

    def __init__(self, backend: TritonAttention, rows: int, max_context: int) -> None:
        self.pool = backend.pool
        self._backend, self._rows = backend, rows
        self._kernel = backend.decode_kernel(rows)
        self._capacity = rows + self._kernel.policy.max_slots
        self.slots, self.places, self.bases, self.masks = (
            torch.zeros(rows, dtype=torch.int64, device=backend.device) for _ in range(4)
        )
        limits = np.zeros(rows, np.int32)
        num_pages = rows * page_count(max_context, self.pool.page_size)
        largest = [
            limits,
            limits,
            *_padded_work(_NONE, self._capacity),
            np.zeros(num_pages, np.int32),
        ]
        self._memory = backend.graph_memory(packed_bytes(largest))
        self.plan(np.empty(0, np.int64), [])

    def plan(self, limits: Int64Array, pages: Sequence[IntArray]) -> None:
        missing = self._rows - len(limits)
        assert missing >= 0, "more sequences than the graph has rows"
        ends = extended(limits, missing, 1)
        tables = padded_tables(self.pool, pages, ends)
        work = self._kernel.policy.work(Tiles.single(ends, tables.offsets, ends))
        arrays = [
            extended(limits, missing, 0).astype(np.int32),
            tables.offsets.astype(np.int32),
            *_padded_work(work, self._capacity),
            tables.flat,
        ]
        assert packed_bytes(arrays) <= len(self._memory), "more pages than max_context has"
        views = self._backend.staging.upload(arrays, self._memory)
        self._limits, self._firsts, num_items, items, self._tables = views
        self._work = Work(num_items, items, self._capacity, self.masks, self.bases)

    def locate(self) -> None:
        launch(
            locate_tokens,
            (-(-self._rows // _LOCATED),),
            self.slots.device,
            self.slots,
            self.places,
            self._limits,
            self._firsts,
            self._tables,
            self._rows,
            self.pool.num_pages * self.pool.page_size,
            PAGE_SIZE=self.pool.page_size,
            BLOCK=_LOCATED,
        )

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._kernel.launch(layer, q, out, self._work, self._tables)
        return out


def _padded_work(work: IntArray, capacity: int) -> list[Array]:
    """Return the number of work items, int32 ``[1]``, and the items, ``[capacity, FIELDS]``."""
    items = np.zeros((capacity, FIELDS), np.int32)
    items[: len(work)] = work
    return [np.array([len(work)], np.int32), items]
