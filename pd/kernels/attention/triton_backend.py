"""Attention by our own Triton kernel: every dtype, head size and group size."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    import torch

    from pd.kernels.attention.base import LatentShape
    from pd.kernels.staging import Array


class TritonAttention(AttentionBackend):
    """Attention with nothing but Triton. float32 is IEEE float32.

    Single tokens, chunks and trees are three launches into one result. On a CPU it works with
    ``TRITON_INTERPRET=1``, for tests.
    """

    name = "triton"

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        latent: LatentShape | None = None,
        *,
        decode: TileShape | None = None,
        chunk: TileShape | None = None,
        tree: TileShape | None = None,
    ) -> None:
        """``decode``, ``chunk``, ``tree``: tile shapes to measure; by default those for dtype and
        head size."""
        self.pool = pool
        self.kernels = TritonKernels(pool, num_heads, latent, decode, chunk, tree)
        self._launches: list[tuple[AttentionKernel, AttentionWork, torch.Tensor | None]] = []

    def plan(self, batch: AttentionBatch) -> None:
        lengths = batch.lengths
        tables = PageTables(batch.pages, batch.starts + lengths, self.pool.page_size)
        rows = np.cumsum(lengths) - lengths
        single, tree = lengths == 1, find_trees(lengths, batch.trees)
        parts = [
            (self.kernels.get_decode_kernel(int(single.sum())), single, False),
            (self.kernels.chunk_kernel, ~single & ~tree, False),
        ]
        masks = np.empty(0, np.int64)
        if tree.any():
            parts.append((self.kernels.get_tree_kernel(int(lengths[tree].sum())), tree, True))
            masks = pack_trees(lengths, batch.trees)
        slots = tables.find_slots(np.arange(len(rows)), batch.starts, lengths)
        arrays: list[Array] = [slots, tables.flat, masks]
        kernels = []
        for kernel, members, trees in parts:
            chosen = np.flatnonzero(members)
            if len(chosen):
                tiles = Tiles.cut_chunks(
                    rows[chosen],
                    batch.starts[chosen],
                    lengths[chosen],
                    tables.offsets[chosen],
                    kernel.tile_tokens,
                    trees=trees,
                )
                work = kernel.policy.split_tiles(tiles)
                kernels.append((kernel, trees))
                arrays += [np.array([len(work)], np.int32), work]
        self.slots, self._tables, seen, *uploaded = self.kernels.staging.upload_arrays(arrays)
        works = zip(kernels, uploaded[::2], uploaded[1::2], strict=True)
        self._launches = [
            (kernel, AttentionWork(number, items, len(items)), seen if trees else None)
            for (kernel, trees), number, items in works
        ]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = self.kernels.chunk_kernel.allocate_result(q)
        for kernel, work, masks in self._launches:
            kernel.launch_work(layer, q, out, work, self._tables, masks)
        return out

    def make_decode_graph(self, rows: int, max_context: int) -> DecodeAttention:
        return TritonDecode(self.kernels, rows, max_context)

    def make_verify_graph(self, rows: int, max_context: int) -> VerifyAttention:
        return TritonVerify(self.kernels, rows, max_context)

    def make_mixed_graph(
        self, tokens: int, singles: int, chunks: int, max_context: int
    ) -> MixedAttention:
        return TritonMixed(self.kernels, tokens, singles, chunks, max_context)

    def make_draft_graph(self, rows: int, max_context: int) -> DraftAttention:
        return TritonDraft(self.kernels, rows, max_context)
