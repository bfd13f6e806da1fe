"""Attention by our Triton kernel in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
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
from pd.kernels.attention.page_tables import (
    PageTables,
    extend_array,
    make_padded_tables,
    pad_decode,
)
from pd.kernels.attention.trees import MAX_TREE, pack_trees
from pd.kernels.attention.triton_kernel import FIELDS, locate_tokens
from pd.kernels.attention.triton_work import AttentionWork, Tiles
from pd.kernels.paging import count_needed_pages
from pd.kernels.staging import count_packed_bytes
from pd.kernels.triton_launch import launch_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.kernels.attention.base import BoolArray, IntArray, PagedKV, UnreadStarts
    from pd.kernels.attention.triton_kernels import AttentionKernel, TritonKernels
    from pd.kernels.staging import Array

# Rows that each program of ``locate_tokens`` looks up.
_LOCATED = 128


def fill_slots(
    pool: PagedKV,
    slots: torch.Tensor,
    places: torch.Tensor,
    limits: torch.Tensor,
    firsts: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Fill ``slots``; arguments as of :func:`pd.kernels.attention.triton_kernel.locate_tokens`."""
    rows = len(slots)
    launch_kernel(
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
    """Kernels over buffers of a fixed size, in memory that the graphs of a backend share, into one
    result.

    Grids are large enough for the work of any plan. Programs without a work item end at once.
    """

    def __init__(
        self,
        backend: TritonKernels,
        kernels: Sequence[tuple[AttentionKernel, int]],
        rows: int,
        sequences: int,
        max_context: int,
        row_dtypes: Sequence[type[np.generic]],
    ) -> None:
        """Allocate the buffers.

        Args:
            kernels: each with the maximum number of its tiles.
            rows: rows of the step.
            sequences: maximum number of page tables.
            row_dtypes: dtypes of the arrays ``[rows]`` that every plan uploads in addition to its
                work.
        """
        self._backend = backend
        self._kernels = [kernel for kernel, _ in kernels]
        kinds = backend.windows.kinds
        self._capacities = [tiles + kernel.policy.max_slots for kernel, tiles in kernels]
        self._capacities *= len(kinds)
        num_pages = sequences * count_needed_pages(max_context, backend.pool.page_size)
        largest = self._lay_out_arrays(
            [np.empty(rows, dtype) for dtype in row_dtypes],
            [np.empty((0, FIELDS), np.int32) for _ in self._capacities],
            np.empty(num_pages, np.int32),
        )
        self._memory = backend.graph_memory(count_packed_bytes(largest))

    def plan_work(
        self,
        row_arrays: Sequence[Array],
        cut_tiles: Callable[[int], Sequence[Tiles]],
        tables: PageTables,
    ) -> list[torch.Tensor]:
        """Upload the work, and return ``row_arrays`` on the device.

        Args:
            cut_tiles: returns the tiles of each kernel for layers of a window.
        """
        works = [
            kernel.policy.split_tiles(part)
            for window in self._backend.windows.kinds
            for kernel, part in zip(self._kernels, cut_tiles(window), strict=True)
        ]
        arrays = self._lay_out_arrays(row_arrays, works, tables.flat)
        assert count_packed_bytes(arrays) <= len(self._memory), "more pages than max_context has"
        *uploaded, self.tables = self._backend.staging.upload_arrays(arrays, self._memory)
        on_device, uploaded = uploaded[: len(row_arrays)], uploaded[len(row_arrays) :]
        parts = zip(uploaded[::2], uploaded[1::2], self._capacities, strict=True)
        self.works = [AttentionWork(*part) for part in parts]
        return on_device

    def attend_layer(
        self,
        layer: int,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
        masks: torch.Tensor | None = None,
        bases: torch.Tensor | None = None,
        token_positions: torch.Tensor | None = None,
        *,
        fills: bool = False,
    ) -> torch.Tensor:
        """Do the planned work; ``sinks``, ``masks``, ``bases`` and ``token_positions`` as in
        :func:`~pd.kernels.attention.triton_kernel.paged_attention`. Rows without work are 0 if
        ``fills``, else undefined."""
        out = self._kernels[0].allocate_result(q)
        if fills:
            out.zero_()
        windows, count = self._backend.windows, len(self._kernels)
        window = windows.of_layer(layer)
        first = windows.kinds.index(window) * count
        for kernel, work in zip(self._kernels, self.works[first : first + count], strict=True):
            kernel.launch_work(
                *(layer, q, out, work, self.tables, masks, bases, token_positions),
                window=window,
                sinks=sinks,
            )
        return out

    def _lay_out_arrays(
        self, row_arrays: Sequence[Array], works: Sequence[IntArray], tables: IntArray
    ) -> list[Array]:
        """List the arrays to upload. All except the last have the same size in every plan."""
        arrays = list(row_arrays)
        for work, capacity in zip(works, self._capacities, strict=True):
            items = np.zeros((capacity, FIELDS), np.int32)
            items[: len(work)] = work
            arrays += [np.array([len(work)], np.int32), items]
        return [*arrays, tables]


class TritonDecode(DecodeAttention):
    """The kernel for decode steps."""

    def __init__(self, backend: TritonKernels, rows: int, max_context: int) -> None:
        self.pool, self._rows = backend.pool, rows
        kernels = [(backend.get_decode_kernel(rows), rows)]
        self._launch = _FixedLaunches(backend, kernels, rows, rows, max_context, [np.int64])
        self.plan(np.empty(0, np.int64), [])

    def plan(self, starts: Int64Array, pages: Sequence[IntArray]) -> None:
        starts, tables = pad_decode(self.pool, self._rows, starts, pages)
        slots = tables.find_slots(np.arange(self._rows), starts, np.ones(self._rows, np.int64))

        def cut_tiles(window: int) -> list[Tiles]:
            return [Tiles.make_single(starts, tables.offsets, starts + 1, window)]

        (self.slots,) = self._launch.plan_work([slots], cut_tiles, tables)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._launch.attend_layer(layer, q, sinks)


class TritonVerify(VerifyAttention):
    """The kernel for trees, even if all sequences have chains. It reads the starts of sequences
    when it runs."""

    takes_unread = True

    def __init__(self, backend: TritonKernels, rows: int, max_context: int) -> None:
        self.pool, self._rows = backend.pool, rows
        self._kernel = backend.get_tree_kernel(rows)
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
        starts, lengths = extend_array(starts, missing, 0), extend_array(lengths, missing, 1)
        later = np.zeros(len(starts), np.int64)
        if unread is not None:
            later[: len(unread.limits)] = unread.limits
        ends = starts + lengths + later
        tables = make_padded_tables(self.pool, pages, ends)
        slots = tables.find_slots(np.arange(len(starts)), starts, lengths)
        rows = np.cumsum(lengths) - lengths
        size = self._kernel.tile_tokens

        def cut_tiles(window: int) -> list[Tiles]:
            each = rows, starts, lengths, tables.offsets, size
            return [Tiles.cut_chunks(*each, trees=True, limits=later, window=window)]

        bases = np.repeat(starts, lengths)
        places = bases + np.arange(len(bases)) - np.repeat(rows, lengths)
        arrays = [
            *(slots, pack_trees(lengths, trees), bases, places),
            *(np.repeat(each, lengths).astype(np.int32) for each in (ends, tables.offsets)),
        ]
        self.slots, self._masks, self._bases, self._places, limits, firsts = self._launch.plan_work(
            arrays, cut_tiles, tables
        )
        if unread is not None:
            self._bases.add_(unread.by_row)
            self._places.add_(unread.by_row)
            fill_slots(self.pool, self.slots, self._places, limits, firsts, self._launch.tables)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        seen = self._masks, self._bases, self._places
        return self._launch.attend_layer(layer, q, sinks, *seen)


class TritonMixed(MixedAttention):
    """The kernels for decode steps and for chunks."""

    def __init__(
        self, backend: TritonKernels, tokens: int, singles: int, chunks: int, max_context: int
    ) -> None:
        self.pool, self._tokens = backend.pool, tokens
        self._chunk_tokens = backend.chunk_kernel.tile_tokens
        kernels = [
            (backend.get_decode_kernel(singles), singles),
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
        tables = make_padded_tables(pool, pages, extend_array(starts + lengths, 1, 1))
        slots = tables.find_slots(np.arange(len(starts)), starts, lengths)
        rows = np.cumsum(lengths) - lengths

        def cut_tiles(window: int) -> list[Tiles]:
            tiles = []
            for members, size in ((lengths == 1, 1), (lengths > 1, self._chunk_tokens)):
                chosen = np.flatnonzero(members)
                each = rows[chosen], starts[chosen], lengths[chosen], tables.offsets[chosen]
                tiles.append(Tiles.cut_chunks(*each, size, window=window))
            return tiles

        slots = extend_array(slots, missing, pool.num_pages * pool.page_size)
        (self.slots,) = self._launch.plan_work([slots], cut_tiles, tables)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Padding must stay finite, because routers of experts choose by it.
        return self._launch.attend_layer(layer, q, sinks, fills=True)


class TritonDraft(DraftAttention):
    """The kernel for decode steps. It reads bases and masks when it runs."""

    def __init__(
        self, backend: TritonKernels, rows: int, max_context: int, first_key: int = 0
    ) -> None:
        self.pool, self._rows, self._first_key = backend.pool, rows, first_key
        self.slots, self.places, self.bases, self.masks = (
            torch.zeros(rows, dtype=torch.int64, device=backend.device) for _ in range(4)
        )
        dtypes = [np.int32, np.int32]
        kernels = [(backend.get_decode_kernel(rows), rows)]
        self._launch = _FixedLaunches(backend, kernels, rows, rows, max_context, dtypes)
        self.plan(np.empty(0, np.int64), [])

    def plan(self, limits: Int64Array, pages: Sequence[IntArray]) -> None:
        missing = self._rows - len(limits)
        assert missing >= 0, "more sequences than the graph has rows"
        ends = extend_array(limits, missing, 1)
        tables = make_padded_tables(self.pool, pages, ends)

        def cut_tiles(window: int) -> list[Tiles]:
            # Only the device knows where the window begins.
            tiles = Tiles.make_single(ends, tables.offsets, ends)
            # Padding has a single key.
            return [replace(tiles, begins=np.minimum(self._first_key, ends - 1))]

        arrays = [ends.astype(np.int32), tables.offsets.astype(np.int32)]
        self._limits, self._firsts = self._launch.plan_work(arrays, cut_tiles, tables)

    def locate_slots(self) -> None:
        tables = self._launch.tables
        fill_slots(self.pool, self.slots, self.places, self._limits, self._firsts, tables)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._launch.attend_layer(layer, q, sinks, self.masks, self.bases)
