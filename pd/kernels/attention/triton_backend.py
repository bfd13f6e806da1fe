"""Attention by our own Triton kernel: every dtype, head size and group size."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

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
from pd.kernels.attention.trees import branching, tree_masks
from pd.kernels.attention.triton_graphs import (
    TritonDecode,
    TritonDraft,
    TritonMixed,
    TritonVerify,
)
from pd.kernels.attention.triton_kernel import FIELDS, paged_attention
from pd.kernels.attention.triton_work import AttentionWork, SplitPolicy, Tiles
from pd.kernels.linear_triton import MAX_ROWS
from pd.kernels.staging import GraphMemory, PinnedStaging
from pd.kernels.triton_launch import launch

if TYPE_CHECKING:
    from pd.kernels.staging import Array


@dataclass(frozen=True)
class TileShape:
    """The amount of work of a program, and its launch.

    Attributes:
        rows: least rows of the query tile; a power of two.
        keys: keys of a K or V tile.
        num_warps, num_stages: see Triton.
        programs: work items per multiprocessor and KV head when keys are split.
        min_tiles: K tiles of the smallest split.
        merge_rows: rows whose splits are merged at a time; a power of two.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    min_tiles: int = 1
    merge_rows: int = 4


# More sequences than these decode with the shape for many.
_FEW = 32


def decode_shape(dtype: torch.dtype, head_dim: int, num_sequences: int) -> TileShape:
    """Return the shape for one query token of each sequence, whose time is that of reading K and V.

    With few sequences, the time until a program has its keys decides; with many, the number of
    programs that a multiprocessor has room for.
    """
    if head_dim * dtype.itemsize > 256:
        return TileShape(16, 32, 4, 2, programs=4, min_tiles=2)
    if num_sequences <= _FEW:
        return TileShape(16, 64, 4, 1, programs=4, min_tiles=2)
    return TileShape(16, 32, 4, 2, programs=8, min_tiles=4)


def tree_shape(dtype: torch.dtype, head_dim: int, num_tiles: int) -> TileShape:
    """Return the shape for trees of a few tokens, the same work as that for decoding but for the
    results: a full tile of 16 rows has several times as many to merge."""
    shape = decode_shape(dtype, head_dim, num_tiles)
    return dataclasses.replace(shape, merge_rows=8) if num_tiles <= _FEW else shape


def chunk_shape(dtype: torch.dtype, head_dim: int, shared_memory: int) -> TileShape:
    """Return the shape for many query tokens, whose time is that of arithmetic. float32 has no
    tensor cores here.

    ``shared_memory``: bytes that a program may have.
    """
    if dtype == torch.float32:
        return TileShape(32, 32, 4, 1, programs=2, min_tiles=4)
    if head_dim > 128:
        return TileShape(64, 32, 4, 2, programs=2, min_tiles=4)
    if shared_memory > 225 << 10:
        return TileShape(128, 128, 8, 5, programs=1, min_tiles=4, merge_rows=8)
    return TileShape(128, 64, 8, 3, programs=1, min_tiles=4, merge_rows=8)


class Kernel:
    """:func:`paged_attention` with one tile shape, and the memory for partial results of splits."""

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        shape: TileShape,
        *,
        one_token: bool = False,
        overlaps: bool = False,
    ) -> None:
        """``one_token``: a tile holds one token. ``overlaps``: kernels after this one may begin
        before it ends if the step is small."""
        sample = pool.key(0)
        device, (_, kv_heads, head_dim) = sample.device, sample.shape
        self._pool, self._shape, self._overlaps = pool, shape, overlaps
        self._group, self._kv_heads, self._head_dim = num_heads // kv_heads, kv_heads, head_dim
        self._block_m = max(shape.rows, triton.next_power_of_2(self._group))
        self.tile_tokens = 1 if one_token else self._block_m // self._group
        self._rows = self.tile_tokens * self._group
        items = -(-_multiprocessors(device) * shape.programs // kv_heads)
        self.policy = SplitPolicy(items, shape.keys * shape.min_tiles)
        slots = self.policy.max_slots
        partial = (slots, kv_heads, self._rows)
        self._partials = torch.empty((*partial, head_dim), dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(partial, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros((slots, kv_heads), dtype=torch.int32, device=device)

    def launch(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        work: AttentionWork,
        tables: torch.Tensor,
        masks: torch.Tensor | None = None,
        bases: torch.Tensor | None = None,
        token_positions: torch.Tensor | None = None,
    ) -> None:
        """Attend ``work``'s rows of ``q`` into the same rows of ``out``; ``masks``, ``bases`` and
        ``token_positions`` as in :func:`paged_attention`."""
        precision = "ieee" if q.dtype == torch.float32 else "tf32"
        seen = {"masks": masks, "bases": bases, "token_positions": token_positions}
        given = [tensor for tensor in seen.values() if tensor is not None]
        missing = {name: None for name, tensor in seen.items() if tensor is None}
        launch(
            paged_attention,
            (work.capacity * self._kv_heads,),
            q.device,
            out,
            q,
            self._pool.key(layer),
            self._pool.value(layer),
            work.num_items,
            work.items,
            tables,
            self._partials,
            self._partial_lse,
            self._arrivals,
            q.stride(0),
            math.log2(math.e) / math.sqrt(self._head_dim),
            *given,
            **missing,
            KV_HEADS=self._kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            PAGE_SIZE=self._pool.page_size,
            NUM_FIELDS=FIELDS,
            ROWS=self._rows,
            MERGE_ROWS=min(triton.next_power_of_2(self._rows), self._shape.merge_rows),
            MERGE_SPLITS=8,
            BLOCK_M=self._block_m,
            BLOCK_N=self._shape.keys,
            BLOCK_D=max(16, triton.next_power_of_2(self._head_dim)),
            PRECISION=precision,
            num_warps=self._shape.num_warps,
            num_stages=self._shape.num_stages,
            # An overlap helps where the product that follows overlaps too.
            overlaps=self._overlaps and len(q) <= MAX_ROWS,
        )


class TritonAttention(AttentionBackend):
    """Needs nothing but Triton; float32 is IEEE float32.

    Single tokens, chunks and trees are three launches into one result. On a CPU it works with
    ``TRITON_INTERPRET=1``, for tests.
    """

    name = "triton"

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        *,
        decode: TileShape | None = None,
        chunk: TileShape | None = None,
        tree: TileShape | None = None,
    ) -> None:
        """``decode``, ``chunk``, ``tree``: tile shapes to measure; by default those for dtype and
        head size."""
        self.pool = pool
        self._num_heads, self._tree = num_heads, tree
        sample = pool.key(0)
        self.device, dtype, head_dim = sample.device, sample.dtype, sample.shape[-1]
        self._few_kernel, self._many_kernel = (
            Kernel(
                pool,
                num_heads,
                decode or decode_shape(dtype, head_dim, n),
                one_token=True,
                overlaps=True,
            )
            for n in (_FEW, _FEW + 1)
        )
        self.chunk_kernel = Kernel(
            pool, num_heads, chunk or chunk_shape(dtype, head_dim, _shared_memory(self.device))
        )
        self.staging = PinnedStaging(self.device)
        self.graph_memory = GraphMemory(self.device)
        # Made when they are needed, since their partial results take memory.
        self._tree_kernels: dict[bool, Kernel] = {}
        self._launches: list[tuple[Kernel, AttentionWork, torch.Tensor | None]] = []

    def plan(self, batch: AttentionBatch) -> None:
        lengths = batch.lengths
        tables = PageTables(batch.pages, batch.starts + lengths, self.pool.page_size)
        rows = np.cumsum(lengths) - lengths
        single, tree = lengths == 1, branching(lengths, batch.trees)
        parts = [
            (self.decode_kernel(int(single.sum())), single, False),
            (self.chunk_kernel, ~single & ~tree, False),
        ]
        masks = np.empty(0, np.int64)
        if tree.any():
            parts.append((self.tree_kernel(int(lengths[tree].sum())), tree, True))
            masks = tree_masks(lengths, batch.trees)
        slots = tables.slots(np.arange(len(rows)), batch.starts, lengths)
        arrays: list[Array] = [slots, tables.flat, masks]
        kernels = []
        for kernel, members, trees in parts:
            chosen = np.flatnonzero(members)
            if len(chosen):
                tiles = Tiles.cut(
                    rows[chosen],
                    batch.starts[chosen],
                    lengths[chosen],
                    tables.offsets[chosen],
                    kernel.tile_tokens,
                    trees=trees,
                )
                work = kernel.policy.work(tiles)
                kernels.append((kernel, trees))
                arrays += [np.array([len(work)], np.int32), work]
        self.slots, self._tables, seen, *uploaded = self.staging.upload(arrays)
        works = zip(kernels, uploaded[::2], uploaded[1::2], strict=True)
        self._launches = [
            (kernel, AttentionWork(number, items, len(items)), seen if trees else None)
            for (kernel, trees), number, items in works
        ]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for kernel, work, masks in self._launches:
            kernel.launch(layer, q, out, work, self._tables, masks)
        return out

    def decode_graph(self, rows: int, max_context: int) -> DecodeAttention:
        return TritonDecode(self, rows, max_context)

    def verify_graph(self, rows: int, max_context: int) -> VerifyAttention:
        return TritonVerify(self, rows, max_context)

    def mixed_graph(
        self, tokens: int, singles: int, chunks: int, max_context: int
    ) -> MixedAttention:
        return TritonMixed(self, tokens, singles, chunks, max_context)

    def draft_graph(self, rows: int, max_context: int) -> DraftAttention:
        return TritonDraft(self, rows, max_context)

    def decode_kernel(self, num_sequences: int) -> Kernel:
        return self._few_kernel if num_sequences <= _FEW else self._many_kernel

    def tree_kernel(self, num_tokens: int) -> Kernel:
        """Return the kernel for trees of so many tokens in all."""
        sample = self.pool.key(0)
        group = self._num_heads // sample.shape[1]
        # If sequences fill their tiles.
        num_tiles = num_tokens // max(1, 16 // group)
        is_few = num_tiles <= _FEW
        if is_few not in self._tree_kernels:
            shape = self._tree or tree_shape(sample.dtype, sample.shape[-1], num_tiles)
            self._tree_kernels[is_few] = Kernel(self.pool, self._num_heads, shape, overlaps=True)
        return self._tree_kernels[is_few]


def _shared_memory(device: torch.device) -> int:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # torch's own annotations lack this attribute.
        return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return 0  # interpreted


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 8  # interpreted
