"""The attention kernel with its tile shapes, and the kernels that one pool needs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from pd.kernels.attention.expanded import ExpandedKV
from pd.kernels.attention.triton_kernel import FIELDS, paged_attention
from pd.kernels.attention.triton_work import AttentionWork, SplitPolicy
from pd.kernels.attention.windows import ALL_KEYS, LayerWindows
from pd.kernels.fp8 import FP8
from pd.kernels.linear_triton import MAX_ROWS
from pd.kernels.staging import GraphMemory, PinnedStaging
from pd.kernels.triton_launch import launch_kernel

if TYPE_CHECKING:
    from pd.kernels.attention.base import LatentShape, PagedKV


@dataclass(frozen=True)
class TileShape:
    """The amount of work of a program, and its launch.

    Attributes:
        rows: minimum number of rows of the query tile; a power of two.
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


# With more sequences than this, we decode with the shape for many.
_FEW = 32


def choose_decode_shape(
    dtype: torch.dtype, head_dim: int, num_sequences: int, *, is_fp8: bool = False
) -> TileShape:
    """Choose the shape for one query token of each sequence. The time is that of reading K and V.

    With few sequences, the time until a program has its keys matters most. With many, it is the
    number of programs that fit on a multiprocessor.

    Args:
        is_fp8: whether the pool is in fp8, where ``dtype`` is that of queries.
    """
    if is_fp8 and dtype != torch.float32 and head_dim <= 128:
        if num_sequences <= _FEW:
            return TileShape(16, 64, 4, 1, programs=4, min_tiles=2)
        return TileShape(16, 64, 4, 1, programs=8, min_tiles=2)
    if head_dim * dtype.itemsize > 256:
        return TileShape(16, 32, 4, 2, programs=4, min_tiles=2)
    if num_sequences <= _FEW:
        return TileShape(16, 64, 4, 1, programs=4, min_tiles=2)
    return TileShape(16, 32, 4, 2, programs=8, min_tiles=4)


def choose_tree_shape(
    dtype: torch.dtype, head_dim: int, num_tiles: int, *, is_fp8: bool = False
) -> TileShape:
    """Choose the shape for trees of a few tokens. The work is that of decoding, except for the
    results: a full tile of 16 rows has several times as many to merge."""
    shape = choose_decode_shape(dtype, head_dim, num_tiles, is_fp8=is_fp8)
    return dataclasses.replace(shape, merge_rows=8) if num_tiles <= _FEW else shape


def choose_chunk_shape(dtype: torch.dtype, head_dim: int, shared_memory: int) -> TileShape:
    """Choose the shape for many query tokens. The time is that of arithmetic. float32 does not use
    tensor cores here.

    Args:
        shared_memory: bytes that a program may use.
    """
    if dtype == torch.float32:
        return TileShape(32, 32, 4, 1, programs=2, min_tiles=4)
    if head_dim > 128:
        return TileShape(64, 32, 4, 2, programs=2, min_tiles=4)
    if shared_memory > 225 << 10:
        return TileShape(128, 128, 8, 5, programs=1, min_tiles=4, merge_rows=8)
    return TileShape(128, 64, 8, 3, programs=1, min_tiles=4, merge_rows=8)


def choose_latent_shape(dtype: torch.dtype, num_heads: int, *, one_token: bool) -> TileShape:
    """Choose the shape for rows of latents, which all heads share. With one token of each sequence,
    the time is that of reading the rows, so a tile has as many heads as possible; otherwise it is
    that of arithmetic."""
    if dtype == torch.float32:
        return TileShape(16, 16, 4, 1, programs=2, min_tiles=4)
    if one_token and num_heads <= 16:
        return TileShape(16, 32, 4, 2, programs=3, min_tiles=2)
    if one_token and num_heads <= 32:
        return TileShape(32, 32, 4, 2, programs=2, min_tiles=2)
    return TileShape(64, 32, 8, 2, programs=1, min_tiles=2)


def choose_expanded_shape(dtype: torch.dtype, key_dim: int) -> TileShape:
    """Choose the shape for prompts whose latents were expanded to K and V of every head."""
    if dtype == torch.float32:
        return TileShape(32, 32, 4, 1, programs=2, min_tiles=4)
    if key_dim > 192:
        return TileShape(128, 64, 8, 2, programs=1, min_tiles=4)
    return TileShape(128, 128, 8, 2, programs=1, min_tiles=4)


class AttentionKernel:
    """:func:`paged_attention` with one tile shape, and the memory for partial results of splits."""

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        shape: TileShape,
        latent: LatentShape | None = None,
        *,
        one_token: bool = False,
        overlaps: bool = False,
    ) -> None:
        """``one_token``: whether a tile holds one token. ``overlaps``: whether later kernels may
        begin before this one ends if the step is small."""
        sample = pool.get_keys(0)
        device, (_, kv_heads, head_dim) = sample.device, sample.shape
        self._pool, self._shape, self._overlaps = pool, shape, overlaps
        self._is_latent = latent is not None and not isinstance(pool, ExpandedKV)
        self._scale = 1 / math.sqrt(head_dim) if latent is None else latent.scale
        self._main_dim, self._value_dim = head_dim, pool.get_values(0).shape[-1]
        if self._is_latent:
            assert latent is not None
            self._main_dim = self._value_dim = latent.value_dim
            # All heads share the rows. Groups of them are tiles of their own, as large as fit.
            kv_heads = -(-num_heads // shape.rows)
            while num_heads % kv_heads:
                kv_heads += 1
        elif latent is not None:
            self._main_dim = 1 << (head_dim.bit_length() - 1)
        self._group, self._kv_heads, self._head_dim = num_heads // kv_heads, kv_heads, head_dim
        self._block_m = max(shape.rows, triton.next_power_of_2(self._group))
        self.tile_tokens = 1 if one_token else self._block_m // self._group
        self._rows = self.tile_tokens * self._group
        items = -(-_count_multiprocessors(device) * shape.programs // kv_heads)
        self.policy = SplitPolicy(items, shape.keys * shape.min_tiles)
        slots = self.policy.max_slots
        partial = (slots, kv_heads, self._rows)
        self._partials = torch.empty(
            (*partial, self._value_dim), dtype=torch.float32, device=device
        )
        self._partial_lse = torch.empty(partial, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros((slots, kv_heads), dtype=torch.int32, device=device)

    def allocate_result(self, q: torch.Tensor) -> torch.Tensor:
        """Allocate the result of queries ``[tokens, heads, head_dim]``."""
        return q.new_empty(*q.shape[:2], self._value_dim)

    def launch_work(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        work: AttentionWork,
        tables: torch.Tensor,
        masks: torch.Tensor | None = None,
        bases: torch.Tensor | None = None,
        token_positions: torch.Tensor | None = None,
        *,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend ``work``'s rows of ``q`` into the same rows of ``out``; ``masks``, ``bases``,
        ``token_positions``, ``window`` and ``sinks`` as in :func:`paged_attention`."""
        precision = "ieee" if q.dtype == torch.float32 else "tf32"
        scales, keys = self._pool.get_scales(layer), self._pool.get_keys(layer)
        launch_kernel(
            paged_attention,
            (work.capacity * self._kv_heads,),
            q.device,
            out,
            q,
            keys,
            self._pool.get_values(layer),
            work.num_items,
            work.items,
            tables,
            self._partials,
            self._partial_lse,
            self._arrivals,
            q.stride(0),
            math.log2(math.e) * self._scale * scales.key,
            scales.value,
            masks,
            bases,
            token_positions,
            sinks,
            KV_HEADS=self._kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            MAIN_DIM=self._main_dim,
            VALUE_DIM=self._value_dim,
            IS_LATENT=self._is_latent,
            PAGE_SIZE=self._pool.page_size,
            NUM_FIELDS=FIELDS,
            ROWS=self._rows,
            MERGE_ROWS=min(triton.next_power_of_2(self._rows), self._shape.merge_rows),
            MERGE_SPLITS=8,
            BLOCK_M=self._block_m,
            BLOCK_N=self._shape.keys,
            BLOCK_MAIN=max(16, triton.next_power_of_2(self._main_dim)),
            BLOCK_REST=max(16, triton.next_power_of_2(self._head_dim - self._main_dim)),
            BLOCK_D=max(16, triton.next_power_of_2(self._value_dim)),
            IN_HALF=keys.dtype == FP8 and q.dtype == torch.bfloat16,
            WINDOW=window,
            PRECISION=precision,
            num_warps=self._shape.num_warps,
            num_stages=self._shape.num_stages,
            # An overlap helps if the product after it overlaps, too.
            overlaps=self._overlaps and len(q) <= MAX_ROWS,
        )


class TritonKernels:
    """The kernels over one pool, and the staging that their inputs share. The backend and its
    graphs use them."""

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        latent: LatentShape | None = None,
        decode: TileShape | None = None,
        chunk: TileShape | None = None,
        tree: TileShape | None = None,
        windows: LayerWindows = ALL_KEYS,
    ) -> None:
        """Set up the kernels for single tokens and chunks. Those for trees follow on first use.

        Args:
            decode, chunk, tree: tile shapes; by default those for dtype and head size.
        """
        self.pool, self.windows = pool, windows
        self._num_heads, self._tree, self._latent = num_heads, tree, latent
        sample = pool.get_keys(0)
        self._is_fp8 = sample.dtype == FP8
        self.device, dtype, head_dim = sample.device, pool.dtype, sample.shape[-1]
        if latent is not None:
            decode = decode or choose_latent_shape(dtype, num_heads, one_token=True)
            chunk = chunk or choose_latent_shape(dtype, num_heads, one_token=False)
            self._tree = tree or decode
        self._few_kernel, self._many_kernel = (
            AttentionKernel(
                pool,
                num_heads,
                decode or choose_decode_shape(dtype, head_dim, n, is_fp8=self._is_fp8),
                latent,
                one_token=True,
                overlaps=True,
            )
            for n in (_FEW, _FEW + 1)
        )
        self.chunk_kernel = AttentionKernel(
            pool,
            num_heads,
            chunk or choose_chunk_shape(dtype, head_dim, _find_shared_memory(self.device)),
            latent,
        )
        self.expanded = None
        if latent is not None:
            self.expanded = ExpandedKV(pool, num_heads, latent)
        self.staging = PinnedStaging(self.device)
        self.graph_memory = GraphMemory(self.device)
        # Made on first use, because their partial results take memory.
        self._tree_kernels: dict[bool, AttentionKernel] = {}
        self._expanded_kernel: AttentionKernel | None = None

    def get_decode_kernel(self, num_sequences: int) -> AttentionKernel:
        """Return the kernel for one query token of each sequence."""
        return self._few_kernel if num_sequences <= _FEW else self._many_kernel

    def get_expanded_kernel(self) -> AttentionKernel:
        """Return the kernel for chunks whose latents are expanded."""
        assert self.expanded is not None
        if self._expanded_kernel is None:
            key_dim = self.expanded.get_keys(0).shape[-1]
            shape = choose_expanded_shape(self.pool.dtype, key_dim)
            self._expanded_kernel = AttentionKernel(
                self.expanded, self._num_heads, shape, self._latent
            )
        return self._expanded_kernel

    def get_tree_kernel(self, num_tokens: int) -> AttentionKernel:
        """Return the kernel for trees with this many tokens in total."""
        sample = self.pool.get_keys(0)
        group = self._num_heads // sample.shape[1]
        # Assuming that sequences fill their tiles.
        num_tiles = num_tokens // max(1, 16 // group)
        is_few = num_tiles <= _FEW
        if is_few not in self._tree_kernels:
            shape = self._tree or choose_tree_shape(
                self.pool.dtype, sample.shape[-1], num_tiles, is_fp8=self._is_fp8
            )
            self._tree_kernels[is_few] = AttentionKernel(
                self.pool, self._num_heads, shape, self._latent, overlaps=True
            )
        return self._tree_kernels[is_few]


def _find_shared_memory(device: torch.device) -> int:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # torch's own annotations lack this attribute.
        return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return 0  # interpreted


def _count_multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 8  # interpreted
