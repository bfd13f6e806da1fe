"""Attention by our Triton kernel in CUDA graphs, for :mod:`pd.kernels.attention.triton_backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.attention.base import (
    DecodeAttention,
    DraftAttention,
    Int64Array,
    MixedAttention,
    VerifyAttention,
)
from pd.kernels.attention.page_tables import PageTables, extended, padded_decode, padded_tables
from pd.kernels.attention.trees import MAX_TREE, tree_masks
from pd.kernels.attention.triton_kernel import FIELDS, locate_tokens
from pd.kernels.attention.triton_work import AttentionWork, Tiles
from pd.kernels.paging import page_count
from pd.kernels.staging import packed_bytes
from pd.kernels.triton_launch import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import BoolArray, IntArray, PagedKV, UnreadStarts
    from pd.kernels.attention.triton_backend import Kernel, TritonAttention
    from pd.kernels.staging import Array

# Rows that one program of the kernel that computes slots looks up.
_LOCATED = 128


def locate(
    pool: PagedKV,
    slots: torch.Tensor,
    places: torch.Tensor,
    limits: torch.Tensor,
    firsts: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Fill ``slots``; arguments as of :func:`pd.kernels.attention.triton_kernel.locate_tokens`."""
    rows = len(slots)
    launch(
        locate_tokens,
        (-(-rows // _LOCATED),),
        slots.device,
        slots,
        places,
        limits,
        firsts,
        tables,
        rows,
        pool.num_pages * pool.page_size,
        PAGE_SIZE=pool.page_size,
        BLOCK=_LOCATED,
    )


class _FixedLaunches:
    """Kernels over buffers of a fixed size, in memory that the backend's graphs share, into one
    result.

    Grids are as large as the work of any plan; programs without a work item end at once.
    """

    def __init__(
        self,
        backend: TritonAttention,
        kernels: Sequence[tuple[Kernel, int]],
        rows: int,
        sequences: int,
        max_context: int,
        row_dtypes: Sequence[type[np.generic]],
    ) -> None:
        """
        Args:
            kernels: each with the most tiles that a plan has for it.
            rows: of the step.
            sequences: page tables of a plan, at most.
            row_dtypes: those of the arrays ``[rows]`` that every plan uploads beside its work.
        """
        self._backend = backend
        self._kernels = [kernel for kernel, _ in kernels]
        self._capacities = [tiles + kernel.policy.max_slots for kernel, tiles in kernels]
        num_pages = sequences * page_count(max_context, backend.pool.page_size)
        largest = self._layout(
            [np.empty(rows, dtype) for dtype in row_dtypes],
            [np.empty((0, FIELDS), np.int32) for _ in kernels],
            np.empty(num_pages, np.int32),
        )
        self._memory = backend.graph_memory(packed_bytes(largest))

    def plan(
        self, row_arrays: Sequence[Array], tiles: Sequence[Tiles], tables: PageTables
    ) -> list[torch.Tensor]:
        """Upload what each kernel's ``tiles`` have to do, and return ``row_arrays`` on the
        device."""
        works = [
            kernel.policy.work(part) for kernel, part in zip(self._kernels, tiles, strict=True)
        ]
        arrays = self._layout(row_arrays, works, tables.flat)
        assert packed_bytes(arrays) <= len(self._memory), "more pages than max_context has"
        *uploaded, self.tables = self._backend.staging.upload(arrays, self._memory)
        on_device, uploaded = uploaded[: len(row_arrays)], uploaded[len(row_arrays) :]
        parts = zip(uploaded[::2], uploaded[1::2], self._capacities, strict=True)
        self.works = [AttentionWork(*part) for part in parts]
        return on_device

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        masks: torch.Tensor | None = None,
        bases: torch.Tensor | None = None,
        token_positions: torch.Tensor | None = None,
        *,
        fills: bool = False,
    ) -> torch.Tensor:
        """Do the planned work; ``masks``, ``bases`` and ``token_positions`` as in
        :func:`~pd.kernels.attention.triton_kernel.paged_attention`. Rows without work are 0 if
        ``fills``, else undefined."""
        make = torch.zeros if fills else torch.empty
        out = make(q.shape, dtype=q.dtype, device=q.device)
        for kernel, work in zip(self._kernels, self.works, strict=True):
            kernel.launch(layer, q, out, work, self.tables, masks, bases, token_positions)
        return out

    def _layout(
        self, row_arrays: Sequence[Array], works: Sequence[IntArray], tables: IntArray
    ) -> list[Array]:
        """List the arrays to upload; all but the last have the same size in every plan."""
        arrays = list(row_arrays)
        for work, capacity in zip(works, self._capacities, strict=True):
            items = np.zeros((capacity, FIELDS), np.int32)
            items[: len(work)] = work
            arrays += [np.array([len(work)], np.int32), items]
        return [*arrays, tables]


class TritonDecode(DecodeAttention):
    """The kernel for decode steps."""

    def __init__(self, backend: TritonAttention, rows: int, max_context: int) -> None:
        self.pool, self._rows = backend.pool, rows
        kernels = [(backend.decode_kernel(rows), rows)]
        self._launch = _FixedLaunches(backend, kernels, rows, rows, max_context, [np.int64])
        self.plan(np.empty(0, np.int64), [])

    def plan(self, starts: Int64Array, pages: Sequence[IntArray]) -> None:
        starts, tables = padded_decode(self.pool, self._rows, starts, pages)
        slots = tables.slots(np.arange(self._rows), starts, np.ones(self._rows, np.int64))
        tiles = Tiles.single(starts, tables.offsets, starts + 1)
        (self.slots,) = self._launch.plan([slots], [tiles], tables)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._launch.attend(layer, q)


class TritonVerify(VerifyAttention):
    """The kernel for trees, also where all sequences have chains. It reads where sequences start
    when it runs."""

    takes_unread = True

    def __init__(self, backend: TritonAttention, rows: int, max_context: int) -> None:
        self.pool, self._rows = backend.pool, rows
        self._kernel = backend.tree_kernel(rows)
        dtypes = [np.int64] * 4 + [np.int32] * 2
        kernels = [(self._kernel, rows)]
        self._launch = _FixedLaunches(backend, kernels, rows, rows, max_context, dtypes)
        none = np.empty(0, np.int64)
        self.plan(none, none, [])

    def plan(
        self,
        starts: Int64Array,
        lengths: Int64Array,
        pages: Sequence[IntArray],
        trees: Sequence[BoolArray | None] | None = None,
        unread: UnreadStarts | None = None,
    ) -> None:
        assert (lengths <= MAX_TREE).all(), f"more than {MAX_TREE} new tokens of a sequence"
        missing = self._rows - int(lengths.sum())
        assert missing >= 0, "more tokens than the graph has rows"
        if trees is not None:
            trees = [*trees, *[None] * missing]
        starts, lengths = extended(starts, missing, 0), extended(lengths, missing, 1)
        most = np.zeros(len(starts), np.int64)
        if unread is not None:
            most[: len(unread.most)] = unread.most
        ends = starts + lengths + most
        tables = padded_tables(self.pool, pages, ends)
        slots = tables.slots(np.arange(len(starts)), starts, lengths)
        rows = np.cumsum(lengths) - lengths
        size = self._kernel.tile_tokens
        tiles = Tiles.cut(rows, starts, lengths, tables.offsets, size, trees=True, most=most)
        bases = np.repeat(starts, lengths)
        places = bases + np.arange(len(bases)) - np.repeat(rows, lengths)
        arrays = [
            *(slots, tree_masks(lengths, trees), bases, places),
            *(np.repeat(each, lengths).astype(np.int32) for each in (ends, tables.offsets)),
        ]
        self.slots, self._masks, self._bases, self._places, limits, firsts = self._launch.plan(
            arrays, [tiles], tables
        )
        if unread is not None:
            self._bases.add_(unread.by_row)
            self._places.add_(unread.by_row)
            locate(self.pool, self.slots, self._places, limits, firsts, self._launch.tables)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._launch.attend(layer, q, self._masks, self._bases, self._places)


class TritonMixed(MixedAttention):
    """The kernel for decode steps and that for chunks."""

    def __init__(
        self, backend: TritonAttention, tokens: int, singles: int, chunks: int, max_context: int
    ) -> None:
        self.pool, self._tokens = backend.pool, tokens
        self._chunk_tokens = backend.chunk_kernel.tile_tokens
        kernels = [
            (backend.decode_kernel(singles), singles),
            # Each chunk may leave one tile partly empty.
            (backend.chunk_kernel, tokens // self._chunk_tokens + chunks),
        ]
        # One more sequence is the padding.
        self._launch = _FixedLaunches(
            backend, kernels, tokens, singles + chunks + 1, max_context, [np.int64]
        )
        none = np.empty(0, np.int64)
        self.plan(none, none, [])

    def plan(self, starts: Int64Array, lengths: Int64Array, pages: Sequence[IntArray]) -> None:
        count, pool = int(lengths.sum()), self.pool
        missing = self._tokens - count
        assert missing >= 0, "more tokens than the graph has"
        tables = padded_tables(pool, pages, extended(starts + lengths, 1, 1))
        slots = tables.slots(np.arange(len(starts)), starts, lengths)
        rows = np.cumsum(lengths) - lengths
        tiles = []
        for members, size in ((lengths == 1, 1), (lengths > 1, self._chunk_tokens)):
            chosen = np.flatnonzero(members)
            offsets = tables.offsets[chosen]
            tiles.append(Tiles.cut(rows[chosen], starts[chosen], lengths[chosen], offsets, size))
        slots = extended(slots, missing, pool.num_pages * pool.page_size)
        (self.slots,) = self._launch.plan([slots], tiles, tables)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Padding must stay finite: routers of experts choose by it.
        return self._launch.attend(layer, q, fills=True)


class TritonDraft(DraftAttention):
    """The kernel for decode steps, which reads bases and masks when it runs."""

    def __init__(self, backend: TritonAttention, rows: int, max_context: int) -> None:
        self.pool, self._rows = backend.pool, rows
        self.slots, self.places, self.bases, self.masks = (
            torch.zeros(rows, dtype=torch.int64, device=backend.device) for _ in range(4)
        )
        dtypes = [np.int32, np.int32]
        kernels = [(backend.decode_kernel(rows), rows)]
        self._launch = _FixedLaunches(backend, kernels, rows, rows, max_context, dtypes)
        self.plan(np.empty(0, np.int64), [])

    def plan(self, limits: Int64Array, pages: Sequence[IntArray]) -> None:
        missing = self._rows - len(limits)
        assert missing >= 0, "more sequences than the graph has rows"
        ends = extended(limits, missing, 1)
        tables = padded_tables(self.pool, pages, ends)
        tiles = Tiles.single(ends, tables.offsets, ends)
        arrays = [ends.astype(np.int32), tables.offsets.astype(np.int32)]
        self._limits, self._firsts = self._launch.plan(arrays, [tiles], tables)

    def locate(self) -> None:
        tables = self._launch.tables
        locate(self.pool, self.slots, self.places, self._limits, self._firsts, tables)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._launch.attend(layer, q, self.masks, self.bases)
