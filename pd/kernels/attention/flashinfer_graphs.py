"""Attention by FlashInfer in CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

from pd.kernels.attention.base import ChunkAttention, DecodeAttention, Int64Array
from pd.kernels.attention.page_tables import pad_decode
from pd.kernels.paging import count_needed_pages, find_token_slots
from pd.kernels.staging import GraphMemory, PinnedStaging, count_packed_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import IntArray, PagedKV
    from pd.kernels.staging import Array

# From this many query heads per KV head on, decoding is faster on tensor cores.
_TENSOR_CORE_GROUP = 4
WORKSPACE = 128 << 20
_GRAPH_INT_WORKSPACE = 1 << 20


class FlashInferResources:
    """The pool, and the memory that FlashInfer's wrappers share. The backend and its graphs use it.

    Attributes:
        heads: number of query heads, number of KV heads, and the size of a head.
    """

    def __init__(self, pool: PagedKV, num_heads: int) -> None:
        self.pool = pool
        sample = pool.get_keys(0)
        self.device, self.dtype = sample.device, sample.dtype
        _, kv_heads, head_dim = sample.shape
        self.heads = (num_heads, kv_heads, head_dim)
        self.staging = PinnedStaging(self.device)
        self.workspace = GraphMemory(self.device)
        self.graph_memory = GraphMemory(self.device)
        self.graph_int_workspace = torch.zeros(
            _GRAPH_INT_WORKSPACE, dtype=torch.uint8, device=self.device
        )

    def view_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer as ``[pages, page_size, kv_heads, head_dim]``."""
        _, kv_heads, head_dim = self.heads
        shape = (-1, self.pool.page_size, kv_heads, head_dim)
        return self.pool.get_keys(layer).view(shape), self.pool.get_values(layer).view(shape)

    def attend(
        self,
        wrapper: BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper,
        layer: int,
        q: torch.Tensor,
    ) -> torch.Tensor:
        """Attend with a planned wrapper to the pages of a layer."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        wrapper.run(q, self.view_pages(layer), out=out)
        return out


class FlashInferDecode(DecodeAttention):
    """FlashInfer's decode wrapper in its CUDA-graph mode. We upload its page tables ourselves."""

    def __init__(self, resources: FlashInferResources, rows: int, max_context: int) -> None:
        self.pool = resources.pool
        self._resources, self._rows = resources, rows
        num_pages = rows * count_needed_pages(max_context, self.pool.page_size)
        indptr, last = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)
        largest: list[Array] = [
            np.zeros(rows, np.int64),
            indptr,
            last,
            np.zeros(num_pages, np.int32),
        ]
        self._memory = resources.graph_memory(count_packed_bytes(largest))
        _, self._indptr, last_page_len, self._indices = resources.staging.upload_arrays(
            largest, self._memory
        )
        heads, kv_heads, head_dim = resources.heads
        group = heads // kv_heads
        # Partial results of fa2's tiles, with 16 or 64 query rows each.
        tiles = max(264 // kv_heads, rows) * (16 if group <= 16 else 64)
        workspace = resources.workspace(max(WORKSPACE, 5 * heads * tiles * head_dim))
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            use_cuda_graph=True,
            use_tensor_cores=group >= _TENSOR_CORE_GROUP,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        self._wrapper.reset_workspace_buffer(workspace, resources.graph_int_workspace)
        self._copied = torch.cuda.Event()
        self._settings: dict[str, object] = {
            "num_qo_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "page_size": self.pool.page_size,
            "q_data_type": resources.dtype,
            "kv_data_type": resources.dtype,
        }
        ones = np.ones(rows, np.int64)
        # The first plan finds the kernels. Later ones only compute.
        self._wrapper.plan(
            compute_offsets(ones),
            torch.full((rows,), self.pool.num_pages, dtype=torch.int32),
            torch.ones(rows, dtype=torch.int32),
            **self._settings,
        )
        self._copied.record(torch.cuda.current_stream(resources.device))
        self.plan(np.empty(0, np.int64), [])

    def plan(self, starts: Int64Array, pages: Sequence[IntArray]) -> None:
        starts, tables = pad_decode(self.pool, self._rows, starts, pages)
        assert len(tables.flat) <= len(self._indices), "more pages than max_context has"
        indptr = compute_offsets(tables.counts)
        last_page_len = compute_last_page_lengths(starts + 1, tables.page_size)
        slots = tables.find_slots(np.arange(self._rows), starts, np.ones(self._rows, np.int64))
        arrays = [slots, indptr.numpy(), last_page_len.numpy(), tables.flat]
        self.slots, *_ = self._resources.staging.upload_arrays(arrays, self._memory)
        self._copied.synchronize()
        fast_decode_plan(
            self._wrapper,
            self._indptr,
            self._indices[: len(tables.flat)],
            last_page_len,
            global_override_indptr_cpu=indptr,
            **self._settings,
        )
        self._copied.record(torch.cuda.current_stream(self._resources.device))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "the table of backends says so"
        return self._resources.attend(self._wrapper, layer, q)


class FlashInferChunk(ChunkAttention):
    """fa2's prefill wrapper in its CUDA-graph mode, over one sequence."""

    def __init__(self, resources: FlashInferResources, tokens: int, max_context: int) -> None:
        self.pool = resources.pool
        self._resources, self._tokens = resources, tokens
        num_pages = count_needed_pages(max(max_context, tokens), self.pool.page_size)
        largest: list[Array] = [np.zeros(tokens, np.int64), np.zeros(num_pages, np.int32)]
        self._memory = resources.graph_memory(count_packed_bytes(largest))
        self.slots, self._indices = resources.staging.upload_arrays(largest, self._memory)
        heads, kv_heads, head_dim = resources.heads
        # Partial results of fa2's tiles of 128 query rows.
        tiles = max(264 // kv_heads, tokens * heads // kv_heads // 128 + 1) * 128
        workspace = resources.workspace(max(WORKSPACE, 5 * heads * tiles * head_dim))
        ends = torch.zeros(5, dtype=torch.int32, device=resources.device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            use_cuda_graph=True,
            qo_indptr_buf=ends[:2],
            paged_kv_indptr_buf=ends[2:4],
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=ends[4:],
            backend="fa2",
        )
        self._wrapper.reset_workspace_buffer(workspace, resources.graph_int_workspace)
        self._copied = torch.cuda.Event()
        # The first plan fixes the maximum number of tokens.
        extra = np.full(
            count_needed_pages(tokens, self.pool.page_size), self.pool.num_pages, np.int32
        )
        self.plan(0, tokens, extra)

    def plan(self, start: int, length: int, pages: IntArray) -> None:
        page_size, total = self.pool.page_size, start + length
        pages = pages[: count_needed_pages(total, page_size)]
        slots = np.full(self._tokens, self.pool.num_pages * page_size, np.int64)
        slots[:length] = find_token_slots(pages, np.arange(start, total), page_size)
        self._resources.staging.upload_arrays([slots, pages], self._memory)
        self._copied.synchronize()
        one = np.ones(1, np.int64)
        self._wrapper.plan(
            compute_offsets(one * length),
            compute_offsets(one * len(pages)),
            self._indices[: len(pages)],
            compute_last_page_lengths(one * total, page_size),
            *self._resources.heads,
            page_size,
            causal=True,
            seq_lens=pin_array(one * total),
            q_data_type=self._resources.dtype,
            kv_data_type=self._resources.dtype,
        )
        self._copied.record(torch.cuda.current_stream(self._resources.device))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "the table of backends says so"
        return self._resources.attend(self._wrapper, layer, q)


def compute_offsets(counts: Int64Array) -> torch.Tensor:
    """Return the start of each of ``n`` adjacent runs of ``counts[i]``, and the end of the last:
    int32 ``[n + 1]`` in pinned memory."""
    return pin_array(np.concatenate(([0], np.cumsum(counts))))


def compute_last_page_lengths(totals: Int64Array, page_size: int) -> torch.Tensor:
    """Return the number of tokens in each sequence's last page, int32 in pinned memory."""
    return pin_array((totals - 1) % page_size + 1)


def pin_array(values: Int64Array) -> torch.Tensor:
    """Copy to int32 in pinned memory. Torch keeps it until copies from it are done."""
    return torch.from_numpy(values.astype(np.int32)).pin_memory()
