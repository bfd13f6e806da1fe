"""Attention by our own Triton kernel: every dtype, head size and group size."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    DecodeAttention,
    DraftAttention,
    MixedAttention,
    PagedKV,
    VerifyAttention,
)
from pd.kernels.attention.page_tables import PageTables
from pd.kernels.attention.trees import find_trees, pack_trees
from pd.kernels.attention.triton_graphs import (
    TritonDecode,
    TritonDraft,
    TritonMixed,
    TritonVerify,
)
from pd.kernels.attention.triton_kernels import AttentionKernel, TileShape, TritonKernels
from pd.kernels.attention.triton_work import AttentionWork, Tiles
from pd.kernels.attention.windows import LayerWindows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pd.kernels.attention.base import Int64Array, LatentShape
    from pd.kernels.latent import LatentHeads
    from pd.kernels.staging import Array


class _Launch(NamedTuple):
    """The work of one kernel in layers of one window; ``masks`` of trees."""

    kernel: AttentionKernel
    window: int
    work: AttentionWork
    masks: torch.Tensor | None


class TritonAttention(AttentionBackend):
    """Attention with nothing but Triton. float32 is IEEE float32.

    Single tokens, chunks and trees are three launches into one result. Layers of another window
    have other work. On a CPU it works with
    ``TRITON_INTERPRET=1``, for tests.
    """

    name = "triton"

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        latent: LatentShape | None = None,
        windows: Sequence[int] = (),
        *,
        decode: TileShape | None = None,
        chunk: TileShape | None = None,
        tree: TileShape | None = None,
    ) -> None:
        """``decode``, ``chunk``, ``tree``: tile shapes to measure; by default those for dtype and
        head size."""
        self.pool = pool
        self._windows = LayerWindows(windows)
        self.kernels = TritonKernels(pool, num_heads, latent, decode, chunk, tree, self._windows)
        self._launches: list[_Launch] = []
        self._expanded: tuple[AttentionWork, torch.Tensor] | None = None

    def plan(self, batch: AttentionBatch) -> None:
        lengths = batch.lengths
        tables = PageTables(batch.pages, batch.starts + lengths, self.pool.page_size)
        rows = np.cumsum(lengths) - lengths
        single, tree = lengths == 1, find_trees(lengths, batch.trees)
        is_expanded = np.zeros_like(single)
        if self.kernels.expanded is not None:
            is_expanded = self.kernels.expanded.choose_sequences(
                batch.starts, np.where(tree, 0, lengths)
            )
        parts = [
            (self.kernels.get_decode_kernel(int(single.sum())), single, False),
            (self.kernels.chunk_kernel, ~single & ~tree & ~is_expanded, False),
        ]
        masks = np.empty(0, np.int64)
        if tree.any():
            parts.append((self.kernels.get_tree_kernel(int(lengths[tree].sum())), tree, True))
            masks = pack_trees(lengths, batch.trees)
        slots = tables.find_slots(np.arange(len(rows)), batch.starts, lengths)
        arrays: list[Array] = [slots, tables.flat, masks]
        kernels = []
        for (kernel, members, trees), window in product(parts, self._windows.kinds):
            chosen = np.flatnonzero(members)
            if len(chosen):
                tiles = Tiles.cut_chunks(
                    rows[chosen],
                    batch.starts[chosen],
                    lengths[chosen],
                    tables.offsets[chosen],
                    kernel.tile_tokens,
                    trees=trees,
                    window=window,
                )
                work = kernel.policy.split_tiles(tiles)
                kernels.append((kernel, window, trees))
                arrays += [np.array([len(work)], np.int32), work]
        expanded = np.flatnonzero(is_expanded)
        if len(expanded):
            arrays += self._plan_expanded(tables, rows, batch, expanded)
        self.slots, self._tables, seen, *uploaded = self.kernels.staging.upload_arrays(arrays)
        self._expanded = None
        if len(expanded):
            assert self.kernels.expanded is not None
            *uploaded, number, items, own_tables, read = uploaded
            self.kernels.expanded.rows = read
            self._expanded = AttentionWork(number, items, len(items)), own_tables
        works = zip(kernels, uploaded[::2], uploaded[1::2], strict=True)
        self._launches = [
            _Launch(
                kernel, window, AttentionWork(number, items, len(items)), seen if trees else None
            )
            for (kernel, window, trees), number, items in works
        ]

    def _plan_expanded(
        self,
        tables: PageTables,
        rows: Int64Array,
        batch: AttentionBatch,
        chosen: Int64Array,
    ) -> list[Array]:
        """Return the arrays to upload for sequences whose rows are expanded: the number of work
        items, these, page tables of the expanded rows, and their slots."""
        expanded, kernel = self.kernels.expanded, self.kernels.get_expanded_kernel()
        assert expanded is not None
        lengths = batch.lengths[chosen]
        totals = batch.starts[chosen] + lengths
        pages = -(-totals // expanded.page_size)
        tiles = Tiles.cut_chunks(
            rows[chosen],
            batch.starts[chosen],
            lengths,
            np.cumsum(pages) - pages,
            kernel.tile_tokens,
        )
        work = kernel.policy.split_tiles(tiles)
        own_tables = np.arange(int(pages.sum()), dtype=np.int32)
        slots = expanded.list_rows(tables, chosen, totals)
        return [np.array([len(work)], np.int32), work, own_tables, slots]

    def attend_latents(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, heads: LatentHeads
    ) -> torch.Tensor:
        if self._expanded is None:
            return super().attend_latents(layer, q, rows, heads)
        work, tables = self._expanded
        expanded, kernel = self.kernels.expanded, self.kernels.get_expanded_kernel()
        assert expanded is not None
        expanded.expand_layer(layer, heads)
        if self._launches:
            latents = self._launch_all(layer, heads.absorb_queries(q))
            out = heads.expand_values(latents).contiguous()
        else:
            out = kernel.allocate_result(q)
        kernel.launch_work(layer, q, out, work, tables)
        return out

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._expanded is None, "a step of expanded latents is attended by attend_latents"
        return self._launch_all(layer, q, sinks)

    def _launch_all(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend the rows that have launches of their own. Others stay undefined."""
        out = self.kernels.chunk_kernel.allocate_result(q)
        window = self._windows.of_layer(layer)
        for launch in self._launches:
            if launch.window == window:
                launch.kernel.launch_work(
                    *(layer, q, out, launch.work, self._tables, launch.masks),
                    window=window,
                    sinks=sinks,
                )
        return out

    def make_decode_graph(self, rows: int, max_context: int) -> DecodeAttention:
        return TritonDecode(self.kernels, rows, max_context)

    def make_verify_graph(self, rows: int, max_context: int) -> VerifyAttention:
        return TritonVerify(self.kernels, rows, max_context)

    def make_mixed_graph(
        self, tokens: int, singles: int, chunks: int, max_context: int
    ) -> MixedAttention:
        return TritonMixed(self.kernels, tokens, singles, chunks, max_context)

    def make_draft_graph(self, rows: int, max_context: int, first_key: int = 0) -> DraftAttention:
        return TritonDraft(self.kernels, rows, max_context, first_key)
