"""Attention by FlashInfer in CUDA graphs, for :mod:`pd.kernels.attention.flashinfer_backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

from pd.kernels.attention.base import ChunkAttention, DecodeAttention, Int64Array
from pd.kernels.attention.page_tables import padded_decode
from pd.kernels.paging import page_count, token_slots
from pd.kernels.staging import packed_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import IntArray
    from pd.kernels.attention.flashinfer_backend import FlashInferAttention
    from pd.kernels.staging import Array

# From this many query heads per KV head on, decoding on tensor cores is faster than without.
_TENSOR_CORE_GROUP = 4
WORKSPACE = 128 << 20


class FlashInferDecode(DecodeAttention):
    """FlashInfer's decode wrapper in its CUDA-graph mode, its page tables uploaded by us."""

    def __init__(self, backend: FlashInferAttention, rows: int, max_context: int) -> None:
        self.pool = backend.pool
        self._backend, self._rows = backend, rows
        num_pages = rows * page_count(max_context, self.pool.page_size)
        indptr, last = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)
        largest: list[Array] = [
            np.zeros(rows, np.int64),
            indptr,
            last,
            np.zeros(num_pages, np.int32),
        ]
        self._memory = backend.graph_memory(packed_bytes(largest))
        _, self._indptr, last_page_len, self._indices = backend.staging.upload(
            largest, self._memory
        )
        heads, kv_heads, head_dim = backend.heads
        group = heads // kv_heads
        # Partial results of fa2's tiles: 16 rows of queries each, or 64.
        tiles = max(264 // kv_heads, rows) * (16 if group <= 16 else 64)
        workspace = backend.workspace(max(WORKSPACE, 5 * heads * tiles * head_dim))
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            use_cuda_graph=True,
            use_tensor_cores=group >= _TENSOR_CORE_GROUP,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        self._wrapper.reset_workspace_buffer(workspace, backend.graph_int_workspace)
        self._copied = torch.cuda.Event()
        self._settings: dict[str, object] = {
            "num_qo_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "page_size": self.pool.page_size,
            "q_data_type": backend.dtype,
            "kv_data_type": backend.dtype,
        }
        ones = np.ones(rows, np.int64)
        # The first plan finds the kernels; later ones only compute.
        self._wrapper.plan(
            offsets(ones),
            torch.full((rows,), self.pool.num_pages, dtype=torch.int32),
            torch.ones(rows, dtype=torch.int32),
            **self._settings,
        )
        self._copied.record(torch.cuda.current_stream(backend.device))
        self.plan(np.empty(0, np.int64), [])

    def plan(self, starts: Int64Array, pages: Sequence[IntArray]) -> None:
        starts, tables = padded_decode(self.pool, self._rows, starts, pages)
        assert len(tables.flat) <= len(self._indices), "more pages than max_context has"
        indptr = offsets(tables.counts)
        last_page_len = last_page_lengths(starts + 1, tables.page_size)
        slots = tables.slots(np.arange(self._rows), starts, np.ones(self._rows, np.int64))
        arrays = [slots, indptr.numpy(), last_page_len.numpy(), tables.flat]
        self.slots, *_ = self._backend.staging.upload(arrays, self._memory)
        self._copied.synchronize()
        fast_decode_plan(
            self._wrapper,
            self._indptr,
            self._indices[: len(tables.flat)],
            last_page_len,
            global_override_indptr_cpu=indptr,
            **self._settings,
        )
        self._copied.record(torch.cuda.current_stream(self._backend.device))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, self._backend.paged(layer), out=out)
        return out


class FlashInferChunk(ChunkAttention):
    """fa2's prefill wrapper in its CUDA-graph mode, over one sequence."""

    def __init__(self, backend: FlashInferAttention, tokens: int, max_context: int) -> None:
        self.pool = backend.pool
        self._backend, self._tokens = backend, tokens
        num_pages = page_count(max(max_context, tokens), self.pool.page_size)
        largest: list[Array] = [np.zeros(tokens, np.int64), np.zeros(num_pages, np.int32)]
        self._memory = backend.graph_memory(packed_bytes(largest))
        self.slots, self._indices = backend.staging.upload(largest, self._memory)
        heads, kv_heads, head_dim = backend.heads
        # Partial results of fa2's tiles of 128 rows of queries.
        tiles = max(264 // kv_heads, tokens * heads // kv_heads // 128 + 1) * 128
        workspace = backend.workspace(max(WORKSPACE, 5 * heads * tiles * head_dim))
        ends = torch.zeros(5, dtype=torch.int32, device=backend.device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            use_cuda_graph=True,
            qo_indptr_buf=ends[:2],
            paged_kv_indptr_buf=ends[2:4],
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=ends[4:],
            backend="fa2",
        )
        self._wrapper.reset_workspace_buffer(workspace, backend.graph_int_workspace)
        self._copied = torch.cuda.Event()
        # The first plan fixes how many tokens there are at most.
        extra = np.full(page_count(tokens, self.pool.page_size), self.pool.num_pages, np.int32)
        self.plan(0, tokens, extra)

    def plan(self, start: int, length: int, pages: IntArray) -> None:
        page_size, total = self.pool.page_size, start + length
        pages = pages[: page_count(total, page_size)]
        slots = np.full(self._tokens, self.pool.num_pages * page_size, np.int64)
        slots[:length] = token_slots(pages, np.arange(start, total), page_size)
        self._backend.staging.upload([slots, pages], self._memory)
        self._copied.synchronize()
        one = np.ones(1, np.int64)
        self._wrapper.plan(
            offsets(one * length),
            offsets(one * len(pages)),
            self._indices[: len(pages)],
            last_page_lengths(one * total, page_size),
            *self._backend.heads,
            page_size,
            causal=True,
            seq_lens=pinned(one * total),
            q_data_type=self._backend.dtype,
            kv_data_type=self._backend.dtype,
        )
        self._copied.record(torch.cuda.current_stream(self._backend.device))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, self._backend.paged(layer), out=out)
        return out


def offsets(counts: Int64Array) -> torch.Tensor:
    """Return where each of ``n`` adjacent runs of ``counts[i]`` begins, and the end of the last:
    int32 ``[n + 1]`` in pinned memory."""
    return pinned(np.concatenate(([0], np.cumsum(counts))))


def last_page_lengths(totals: Int64Array, page_size: int) -> torch.Tensor:
    """Return the tokens in each sequence's last page, int32 in pinned memory."""
    return pinned((totals - 1) % page_size + 1)


def pinned(values: Int64Array) -> torch.Tensor:
    """Copy to int32 in pinned memory, which torch keeps until copies from it are done."""
    return torch.from_numpy(values.astype(np.int32)).pin_memory()
