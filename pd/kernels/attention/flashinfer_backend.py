"""Attention by FlashInfer (Ye et al., 2025), written for version 0.6.14.

Kernels are compiled when a dtype and head size are first used, and kept in FlashInfer's cache.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

from pd.core.errors import SetupError
from pd.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    ChunkAttention,
    DecodeAttention,
    Int64Array,
    PagedKV,
)
from pd.kernels.attention.flashinfer_graphs import (
    WORKSPACE,
    FlashInferChunk,
    FlashInferDecode,
    last_page_lengths,
    offsets,
    pinned,
)
from pd.kernels.attention.page_tables import PageTables
from pd.kernels.attention.trees import branching
from pd.kernels.attention.triton_backend import TritonAttention
from pd.kernels.staging import GraphMemory, PinnedStaging

if TYPE_CHECKING:
    import numpy.typing as npt

    from pd.kernels.attention.base import BoolArray, VerifyAttention

logger = logging.getLogger(__name__)


# Chunks of more tokens than this are worth fa3, which is faster but cannot split keys: a tile of
# 128 queries attends to all of them in one program.
_SHORT = 128
# K and V of a layer that a step may gather: a context of 131,072 tokens with 8 KV heads.
_MAX_GATHERED = 512 << 20
_GRAPH_INT_WORKSPACE = 1 << 20


class FlashInferAttention(AttentionBackend):
    """Single tokens and short chunks go through fa2, which splits keys among programs; long chunks
    through fa3 where the GPU is a Hopper, with K and V gathered from their pages before each layer
    unless the pages are adjacent: fa3 loads contiguous rows by the tensor memory accelerator,
    faster than it finds pages one by one. Gathering costs a hundredth of the attention of a chunk
    of 8,192 tokens, an eighth of that of 512. Sequences for which a step has no memory left to
    gather go through fa2. Graphs of steps with drafts are of our Triton kernels, since FlashInfer's
    plans of trees cannot be replayed.

    FlashInfer's own plan is copied from one pinned buffer per wrapper: the next plan waits for the
    copy of the last, which is over soon after the step before it began. Its other inputs are in
    pinned memory, since copies from other memory wait for the whole step before.
    """

    name = "flashinfer"

    def __init__(self, pool: PagedKV, num_heads: int) -> None:
        self.pool = pool
        sample = pool.key(0)
        self.device, self.dtype = sample.device, sample.dtype
        _, kv_heads, head_dim = sample.shape
        self.heads = (num_heads, kv_heads, head_dim)
        self.staging = PinnedStaging(self.device)
        self.workspace = GraphMemory(self.device)
        self.graph_memory = GraphMemory(self.device)
        self.graph_int_workspace = torch.zeros(
            _GRAPH_INT_WORKSPACE, dtype=torch.uint8, device=self.device
        )
        hopper = torch.cuda.get_device_capability(self.device)[0] == 9
        self._token_bytes = 2 * kv_heads * head_dim * sample.element_size()
        self.scratch_bytes = _MAX_GATHERED if hopper else 0
        # Partial results of fa2's tiles of 128 rows of queries where it splits keys.
        partial = 5 * num_heads * max(1, 264 // kv_heads) * 128 * head_dim
        self._partials = memory = self.workspace(max(WORKSPACE, partial))
        self._short = _Prefill(self, BatchPrefillWithPagedKVCacheWrapper(memory, backend="fa2"))
        # Made when there are trees, since FlashInfer takes more memory for each wrapper.
        self._trees: _Trees | None = None
        self._long: _Prefill | _Contiguous = self._short
        if hopper:
            self._long = _Contiguous(
                self, BatchPrefillWithRaggedKVCacheWrapper(memory, backend="fa3")
            )
        self._parts: list[_Part] = []
        self._compile()

    def plan(self, batch: AttentionBatch) -> None:
        tables = PageTables(batch.pages, batch.starts + batch.lengths, self.pool.page_size)
        everyone = np.arange(len(batch.starts))
        slots = tables.slots(everyone, batch.starts, batch.lengths)
        short, tree = self._through_fa2(batch, tables), branching(batch.lengths, batch.trees)
        parts = [(self._short, short & ~tree), (self._long, ~short & ~tree)]
        if tree.any():
            parts.append((self._tree_prefill(), tree))
        chosen = [(prefill, np.flatnonzero(members)) for prefill, members in parts if members.any()]
        rows = [_rows(batch.lengths, members) for _, members in chosen]
        pages = [tables.flat[_ranges(tables.offsets, tables.counts, m)] for _, m in chosen]
        scattered = [r for r in rows if not isinstance(r, slice)]
        views = self.staging.upload([slots, *pages, *scattered])
        self.slots, indices, on_device = (
            views[0],
            views[1 : len(pages) + 1],
            views[len(pages) + 1 :],
        )
        at = iter(on_device)
        self._parts = []
        for (prefill, members), where, index in zip(chosen, rows, indices, strict=True):
            prefill.plan(batch, members, tables, index)
            self._parts.append(_Part(prefill, where if isinstance(where, slice) else next(at)))

    def _through_fa2(self, batch: AttentionBatch, tables: PageTables) -> npt.NDArray[np.bool_]:
        """Choose the sequences for fa2: short chunks, and long ones with prefixes for which a step
        has no memory left to gather."""
        short = (batch.lengths <= _SHORT) | (self._long is self._short)
        long = np.flatnonzero(~short)
        totals = (batch.starts + batch.lengths)[long]
        enough = totals.sum() * self._token_bytes <= self.scratch_bytes
        if enough or not batch.starts[long].any() or _adjacent(tables, long, totals):
            return short
        smallest = np.argsort(totals, kind="stable")
        fits = np.cumsum(totals[smallest]) * self._token_bytes <= self.scratch_bytes
        short[long[smallest[~fits]]] = True
        return short

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            rows = part.rows
            if isinstance(rows, slice):
                part.prefill.run(layer, q[rows], k[rows], v[rows], out[rows])
            else:
                mine, mine_k, mine_v = (x.index_select(0, rows) for x in (q, k, v))
                attended = torch.empty_like(mine)
                part.prefill.run(layer, mine, mine_k, mine_v, attended)
                out.index_copy_(0, rows, attended)
        return out

    def decode_graph(self, rows: int, max_context: int) -> DecodeAttention:
        return FlashInferDecode(self, rows, max_context)

    def chunk_graph(self, tokens: int, max_context: int) -> ChunkAttention:
        return FlashInferChunk(self, tokens, max_context)

    def verify_graph(self, rows: int, max_context: int) -> VerifyAttention:
        return self._verifying.verify_graph(rows, max_context)

    @cached_property
    def _verifying(self) -> TritonAttention:
        """Our Triton kernels over the same pool, made where there are drafts."""
        num_heads, _, _ = self.heads
        return TritonAttention(self.pool, num_heads)

    def _tree_prefill(self) -> _Trees:
        if self._trees is None:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._partials, backend="fa2")
            self._trees = _Trees(self, wrapper)
        return self._trees

    def paged(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer as ``[pages, page_size, kv_heads, head_dim]``."""
        _, kv_heads, head_dim = self.heads
        shape = (-1, self.pool.page_size, kv_heads, head_dim)
        return self.pool.key(layer).view(shape), self.pool.value(layer).view(shape)

    def _compile(self) -> None:
        logger.info("FlashInfer: loading kernels; the first start compiles them, a minute or two")
        one = np.ones(1, np.int64)
        page = [np.array([self.pool.num_pages], np.int32)]
        batch = AttentionBatch(one * 0, one, page)
        table = PageTables(page, one, self.pool.page_size)
        index = torch.from_numpy(table.flat).to(self.device)
        try:
            for prefill in (self._short, self._long):
                prefill.plan(batch, np.zeros(1, np.int64), table, index)
        except (RuntimeError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SetupError(
                f"FlashInfer cannot compile its kernels here ({reason}); use another "
                "--attention-backend, such as triton"
            ) from error


class _Prefill:
    """A wrapper, and the event before which its pinned workspace may not be overwritten."""

    def __init__(
        self, backend: FlashInferAttention, wrapper: BatchPrefillWithPagedKVCacheWrapper
    ) -> None:
        self.wrapper = wrapper
        self._backend = backend
        self._copied = torch.cuda.Event()

    def plan(
        self, batch: AttentionBatch, members: Int64Array, tables: PageTables, indices: torch.Tensor
    ) -> None:
        """Plan for some sequences of a batch, whose pages are ``indices``."""
        self._plan(batch, members, tables, indices, None)

    def _plan(
        self,
        batch: AttentionBatch,
        members: Int64Array,
        tables: PageTables,
        indices: torch.Tensor,
        masks: torch.Tensor | None,
    ) -> None:
        """Plan attention of some sequences of a batch. With ``masks``, packed as FlashInfer has
        them, tokens see what these say; without, everything before them."""
        self._copied.synchronize()
        totals = (batch.starts + batch.lengths)[members]
        self.wrapper.plan(
            offsets(batch.lengths[members]),
            offsets(tables.counts[members]),
            indices,
            last_page_lengths(totals, tables.page_size),
            *self._backend.heads,
            tables.page_size,
            packed_custom_mask=masks,
            causal=masks is None,
            seq_lens=pinned(totals),
            q_data_type=self._backend.dtype,
            kv_data_type=self._backend.dtype,
        )
        self._copied.record(torch.cuda.current_stream(self._backend.device))

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend with ``q`` and ``out`` of the planned sequences."""
        self.wrapper.run(q, self._backend.paged(layer), out=out)


class _Trees(_Prefill):
    """A wrapper with masks."""

    def plan(
        self, batch: AttentionBatch, members: Int64Array, tables: PageTables, indices: torch.Tensor
    ) -> None:
        assert batch.trees is not None
        packed = [_packed_mask(int(batch.starts[i]), batch.trees[i]) for i in members]
        sizes = np.array([len(mask) for mask in packed])
        firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        masks, on_device = self._backend.staging.upload([np.concatenate(packed), firsts])
        self._plan(batch, members, tables, indices, masks)
        # NOTE: FlashInfer computes where packed masks begin in bits, and its kernel takes that for
        # bytes (flashinfer-ai/flashinfer pull request 2201).
        self.wrapper._mask_indptr_buf = on_device


class _Contiguous:
    """A ragged wrapper over contiguous K and V: those of the new tokens, of adjacent pages, or
    gathered."""

    def __init__(
        self, backend: FlashInferAttention, wrapper: BatchPrefillWithRaggedKVCacheWrapper
    ) -> None:
        self._wrapper = wrapper
        self._backend = backend
        self._copied = torch.cuda.Event()
        # Slots of all tokens; None where all tokens are new.
        self._slots: torch.Tensor | slice | None = None

    def plan(
        self, batch: AttentionBatch, members: Int64Array, tables: PageTables, indices: torch.Tensor
    ) -> None:
        """Plan for some sequences of a batch."""
        totals = (batch.starts + batch.lengths)[members]
        self._slots = None
        if batch.starts[members].any():
            slots = _all_slots(tables, members, totals)
            if (np.diff(slots) == 1).all():
                self._slots = slice(int(slots[0]), int(slots[-1]) + 1)
            else:
                (self._slots,) = self._backend.staging.upload([slots])
        self._copied.synchronize()
        self._wrapper.plan(
            offsets(batch.lengths[members]),
            offsets(totals),
            *self._backend.heads,
            causal=True,
            q_data_type=self._backend.dtype,
            kv_data_type=self._backend.dtype,
        )
        self._copied.record(torch.cuda.current_stream(self._backend.device))

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend with ``q``, ``k``, ``v`` and ``out`` of the planned sequences' new tokens."""
        if self._slots is not None:
            pool = self._backend.pool
            k, v = (_rows_of(x, self._slots) for x in (pool.key(layer), pool.value(layer)))
        self._wrapper.run(q, k, v, out=out)


@dataclass(frozen=True)
class _Part:
    """Sequences of a step that one wrapper attends, and their rows among the step's tokens."""

    prefill: _Prefill | _Contiguous
    rows: slice | torch.Tensor


def _packed_mask(start: int, tree: BoolArray | None) -> npt.NDArray[np.uint8]:
    """Pack what each token of a tree sees, row by row, the first key in the lowest bit."""
    assert tree is not None
    seen = np.ones((len(tree), start + len(tree)), np.bool_)
    seen[:, start:] = tree
    return np.packbits(seen, bitorder="little")


def _all_slots(tables: PageTables, members: Int64Array, totals: Int64Array) -> Int64Array:
    """Return the slots of the members' tokens, one sequence after another."""
    return tables.slots(members, np.zeros(len(members), np.int64), totals)


def _adjacent(tables: PageTables, members: Int64Array, totals: Int64Array) -> bool:
    return bool((np.diff(_all_slots(tables, members, totals)) == 1).all())


def _ranges(firsts: Int64Array, counts: Int64Array, members: Int64Array) -> Int64Array:
    """Return the members' ranges ``[first, first + count)``, one after another."""
    counts = counts[members]
    skipped = np.cumsum(counts) - counts
    indices: Int64Array = np.arange(counts.sum()) + np.repeat(firsts[members] - skipped, counts)
    return indices


def _rows_of(x: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _rows(lengths: Int64Array, members: Int64Array) -> slice | Int64Array:
    """Return the members' rows among the step's tokens, as a slice if they are adjacent."""
    firsts = np.cumsum(lengths) - lengths
    rows = _ranges(firsts, lengths, members)
    together = rows[-1] - rows[0] + 1 == len(rows)
    return slice(int(rows[0]), int(rows[-1]) + 1) if together else rows
