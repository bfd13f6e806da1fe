"""Attention by FlashInfer (Ye et al., 2025), written for version 0.6.14.

FlashInfer compiles kernels when a dtype and head size are first used, and keeps them in its cache.
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
    LatentShape,
    PagedKV,
)
from pd.kernels.attention.flashinfer_graphs import (
    WORKSPACE,
    FlashInferChunk,
    FlashInferDecode,
    FlashInferResources,
    compute_last_page_lengths,
    compute_offsets,
    pin_array,
)
from pd.kernels.attention.page_tables import PageTables
from pd.kernels.attention.trees import find_trees
from pd.kernels.attention.triton_backend import TritonAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.kernels.attention.base import BoolArray, VerifyAttention

logger = logging.getLogger(__name__)


# Longer chunks are worth fa3. It is faster but cannot split keys: a tile of 128 queries attends to
# all of them in one program.
_SHORT = 128
# Limit for the K and V of a layer that a step may gather: a context of 131,072 tokens with 8 KV
# heads.
_MAX_GATHERED = 512 << 20


class FlashInferAttention(AttentionBackend):
    """Single tokens and short chunks use fa2, which splits keys among programs. Long chunks use fa3
    on a Hopper GPU. Its tensor memory accelerator loads contiguous rows faster than it finds pages
    one by one, so we gather K and V from their pages before each layer unless the pages are
    adjacent. Gathering costs a hundredth of the attention of a chunk of 8,192 tokens, and an eighth
    for 512. Sequences use fa2 if a step has no memory left to gather them. Graphs of steps with
    drafts use our Triton kernels, because FlashInfer's plans of trees cannot be replayed.

    FlashInfer copies its own plan from one pinned buffer per wrapper. The next plan waits for that
    copy, which is over soon after the previous step began. We keep the other inputs in pinned
    memory, because copies from other memory would wait for the whole previous step.
    """

    name = "flashinfer"

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        latent: LatentShape | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        assert latent is None and not windows, "the table of backends says so"
        self.pool = pool
        self._resources = resources = FlashInferResources(pool, num_heads)
        _, kv_heads, head_dim = resources.heads
        hopper = torch.cuda.get_device_capability(resources.device)[0] == 9
        self._token_bytes = 2 * kv_heads * head_dim * resources.dtype.itemsize
        self.scratch_bytes = _MAX_GATHERED if hopper else 0
        # Partial results of fa2's tiles of 128 query rows, if it splits keys.
        partial = 5 * num_heads * max(1, 264 // kv_heads) * 128 * head_dim
        self._partials = memory = resources.workspace(max(WORKSPACE, partial))
        self._short = _Prefill(
            resources, BatchPrefillWithPagedKVCacheWrapper(memory, backend="fa2")
        )
        # Made on first use, because FlashInfer takes more memory for each wrapper.
        self._trees: _Trees | None = None
        self._long: _Prefill | _Contiguous = self._short
        if hopper:
            self._long = _Contiguous(
                resources, BatchPrefillWithRaggedKVCacheWrapper(memory, backend="fa3")
            )
        self._parts: list[_Part] = []
        self._compile_kernels()

    def plan(self, batch: AttentionBatch) -> None:
        tables = PageTables(batch.pages, batch.starts + batch.lengths, self.pool.page_size)
        everyone = np.arange(len(batch.starts))
        slots = tables.find_slots(everyone, batch.starts, batch.lengths)
        short, tree = self._choose_fa2(batch, tables), find_trees(batch.lengths, batch.trees)
        parts = [(self._short, short & ~tree), (self._long, ~short & ~tree)]
        if tree.any():
            parts.append((self._make_tree_prefill(), tree))
        chosen = [(prefill, np.flatnonzero(members)) for prefill, members in parts if members.any()]
        rows = [_find_rows(batch.lengths, members) for _, members in chosen]
        pages = [tables.flat[_join_ranges(tables.offsets, tables.counts, m)] for _, m in chosen]
        scattered = [r for r in rows if not isinstance(r, slice)]
        views = self._resources.staging.upload_arrays([slots, *pages, *scattered])
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

    def _choose_fa2(self, batch: AttentionBatch, tables: PageTables) -> npt.NDArray[np.bool_]:
        """Choose the sequences for fa2: short chunks, and long ones whose prefixes a step has no
        memory left to gather."""
        short = (batch.lengths <= _SHORT) | (self._long is self._short)
        long = np.flatnonzero(~short)
        totals = (batch.starts + batch.lengths)[long]
        enough = totals.sum() * self._token_bytes <= self.scratch_bytes
        if enough or not batch.starts[long].any() or _are_adjacent(tables, long, totals):
            return short
        smallest = np.argsort(totals, kind="stable")
        fits = np.cumsum(totals[smallest]) * self._token_bytes <= self.scratch_bytes
        short[long[smallest[~fits]]] = True
        return short

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "the table of backends says so"
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

    def make_decode_graph(self, rows: int, max_context: int) -> DecodeAttention:
        return FlashInferDecode(self._resources, rows, max_context)

    def make_chunk_graph(self, tokens: int, max_context: int) -> ChunkAttention:
        return FlashInferChunk(self._resources, tokens, max_context)

    def make_verify_graph(self, rows: int, max_context: int) -> VerifyAttention:
        return self._verify_backend.make_verify_graph(rows, max_context)

    @cached_property
    def _verify_backend(self) -> TritonAttention:
        """Our Triton kernels over the same pool, made on first use for drafts."""
        num_heads, _, _ = self._resources.heads
        return TritonAttention(self.pool, num_heads)

    def _make_tree_prefill(self) -> _Trees:
        if self._trees is None:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._partials, backend="fa2")
            self._trees = _Trees(self._resources, wrapper)
        return self._trees

    def _compile_kernels(self) -> None:
        logger.info("FlashInfer: loading kernels; the first start compiles them, a minute or two")
        one = np.ones(1, np.int64)
        page = [np.array([self.pool.num_pages], np.int32)]
        batch = AttentionBatch(one * 0, one, page)
        table = PageTables(page, one, self.pool.page_size)
        index = torch.from_numpy(table.flat).to(self._resources.device)
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
    """A wrapper, and the event after which its pinned workspace may be overwritten."""

    def __init__(
        self, resources: FlashInferResources, wrapper: BatchPrefillWithPagedKVCacheWrapper
    ) -> None:
        self.wrapper = wrapper
        self._resources = resources
        self._copied = torch.cuda.Event()

    def plan(
        self, batch: AttentionBatch, members: Int64Array, tables: PageTables, indices: torch.Tensor
    ) -> None:
        """Plan for some sequences of a batch. Their pages are ``indices``."""
        self._plan_masked(batch, members, tables, indices, None)

    def _plan_masked(
        self,
        batch: AttentionBatch,
        members: Int64Array,
        tables: PageTables,
        indices: torch.Tensor,
        masks: torch.Tensor | None,
    ) -> None:
        """Plan attention of some sequences of a batch. With ``masks``, in FlashInfer's packing,
        these say which keys tokens see; without, tokens see everything before them."""
        self._copied.synchronize()
        totals = (batch.starts + batch.lengths)[members]
        self.wrapper.plan(
            compute_offsets(batch.lengths[members]),
            compute_offsets(tables.counts[members]),
            indices,
            compute_last_page_lengths(totals, tables.page_size),
            *self._resources.heads,
            tables.page_size,
            packed_custom_mask=masks,
            causal=masks is None,
            seq_lens=pin_array(totals),
            q_data_type=self._resources.dtype,
            kv_data_type=self._resources.dtype,
        )
        self._copied.record(torch.cuda.current_stream(self._resources.device))

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend with ``q`` and ``out`` of the planned sequences."""
        self.wrapper.run(q, self._resources.view_pages(layer), out=out)


class _Trees(_Prefill):
    """A wrapper with masks."""

    def plan(
        self, batch: AttentionBatch, members: Int64Array, tables: PageTables, indices: torch.Tensor
    ) -> None:
        assert batch.trees is not None
        packed = [_pack_mask(int(batch.starts[i]), batch.trees[i]) for i in members]
        sizes = np.array([len(mask) for mask in packed])
        firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        masks, on_device = self._resources.staging.upload_arrays([np.concatenate(packed), firsts])
        self._plan_masked(batch, members, tables, indices, masks)
        # NOTE: FlashInfer computes the starts of packed masks in bits, but its kernel expects bytes
        # (flashinfer-ai/flashinfer pull request 2201).
        self.wrapper._mask_indptr_buf = on_device


class _Contiguous:
    """A ragged wrapper over contiguous K and V: of the new tokens, of adjacent pages, or
    gathered."""

    def __init__(
        self, resources: FlashInferResources, wrapper: BatchPrefillWithRaggedKVCacheWrapper
    ) -> None:
        self._wrapper = wrapper
        self._resources = resources
        self._copied = torch.cuda.Event()
        # Slots of all tokens; None if all tokens are new.
        self._slots: torch.Tensor | slice | None = None

    def plan(
        self, batch: AttentionBatch, members: Int64Array, tables: PageTables, indices: torch.Tensor
    ) -> None:
        """Plan for some sequences of a batch."""
        totals = (batch.starts + batch.lengths)[members]
        self._slots = None
        if batch.starts[members].any():
            slots = _find_all_slots(tables, members, totals)
            if (np.diff(slots) == 1).all():
                self._slots = slice(int(slots[0]), int(slots[-1]) + 1)
            else:
                (self._slots,) = self._resources.staging.upload_arrays([slots])
        self._copied.synchronize()
        self._wrapper.plan(
            compute_offsets(batch.lengths[members]),
            compute_offsets(totals),
            *self._resources.heads,
            causal=True,
            q_data_type=self._resources.dtype,
            kv_data_type=self._resources.dtype,
        )
        self._copied.record(torch.cuda.current_stream(self._resources.device))

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend with ``q``, ``k``, ``v`` and ``out`` of the planned sequences' new tokens."""
        if self._slots is not None:
            pool = self._resources.pool
            k, v = (
                _select_rows(x, self._slots) for x in (pool.get_keys(layer), pool.get_values(layer))
            )
        self._wrapper.run(q, k, v, out=out)


@dataclass(frozen=True)
class _Part:
    """Sequences of a step for one wrapper, and their rows among the step's tokens."""

    prefill: _Prefill | _Contiguous
    rows: slice | torch.Tensor


def _pack_mask(start: int, tree: BoolArray | None) -> npt.NDArray[np.uint8]:
    """Pack the visibility of each token of a tree, row by row, the first key in the lowest bit."""
    assert tree is not None
    seen = np.ones((len(tree), start + len(tree)), np.bool_)
    seen[:, start:] = tree
    return np.packbits(seen, bitorder="little")


def _find_all_slots(tables: PageTables, members: Int64Array, totals: Int64Array) -> Int64Array:
    """Return the slots of the members' tokens, one sequence after another."""
    return tables.find_slots(members, np.zeros(len(members), np.int64), totals)


def _are_adjacent(tables: PageTables, members: Int64Array, totals: Int64Array) -> bool:
    return bool((np.diff(_find_all_slots(tables, members, totals)) == 1).all())


def _join_ranges(firsts: Int64Array, counts: Int64Array, members: Int64Array) -> Int64Array:
    """Return the members' ranges ``[first, first + count)``, one after another."""
    counts = counts[members]
    skipped = np.cumsum(counts) - counts
    indices: Int64Array = np.arange(counts.sum()) + np.repeat(firsts[members] - skipped, counts)
    return indices


def _select_rows(x: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _find_rows(lengths: Int64Array, members: Int64Array) -> slice | Int64Array:
    """Return the members' rows among the step's tokens, as a slice if they are adjacent."""
    firsts = np.cumsum(lengths) - lengths
    rows = _join_ranges(firsts, lengths, members)
    together = rows[-1] - rows[0] + 1 == len(rows)
    return slice(int(rows[0]), int(rows[-1]) + 1) if together else rows
