"""The reference: paged attention in plain PyTorch, on any device and in any dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from pd.kernels.attention.base import AttentionBackend, AttentionBatch, LatentShape, PagedKV
from pd.kernels.attention.page_tables import PageTables
from pd.kernels.attention.sinks import attend_with_sinks
from pd.kernels.attention.torch_draft import TorchDraft
from pd.kernels.attention.trees import find_trees, pack_trees
from pd.kernels.attention.windows import LayerWindows, keep_last
from pd.kernels.kv_store import clear_rows, read_pages, scale_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.kernels.attention.base import DraftAttention, Int64Array

# Number of queries of a chunk to attend at a time. This limits the memory of the mask and skips
# most of the keys hidden by causality.
QUERY_BLOCK = 256
# Sequences share a padded decode batch while the longest is within this factor (and slack) of the
# shortest. So one long sequence does not pad all.
BUCKET_FACTOR = 1.5
BUCKET_SLACK = 128


@dataclass
class _DecodeBucket:
    """Sequences with one new token each, attended as one padded batch.

    Attributes:
        rows: their rows among the step's tokens, or None if they are all of them in order.
        pages: int64 ``[sequences * pages per sequence]``.
        masks: for each window, additive ``[sequences, 1, 1, padded length]``, or None if nothing is
            hidden.
    """

    rows: torch.Tensor | None
    pages: torch.Tensor
    masks: dict[int, torch.Tensor | None]
    size: int


@dataclass
class _Chunk:
    """Several new tokens of one sequence: rows ``[first, stop)``, context ``start``.

    Attributes:
        trees: additive masks ``[tokens, start + tokens]`` of a tree, for each window; None for a
            chain.
    """

    first: int
    stop: int
    start: int
    pages: torch.Tensor
    trees: dict[int, torch.Tensor] | None = None


class TorchAttention(AttentionBackend):
    """Gathers pages and calls ``scaled_dot_product_attention``.

    Decode steps of similar length form one padded batch. Each chunk of several tokens is attended
    alone, so its rows do not depend on the rest of the step.
    """

    name = "torch"

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        latent: LatentShape | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        self.pool, self._latent = pool, latent
        self._windows = LayerWindows(windows)
        sample = pool.get_keys(0)
        self._scale = 1 / math.sqrt(sample.shape[-1]) if latent is None else latent.scale
        self._device, self._dtype = sample.device, pool.dtype
        self._is_widened = sample.dtype != pool.dtype
        self.slots = torch.empty(0, dtype=torch.int64)
        self._stale: torch.Tensor | None = None
        self._buckets: list[_DecodeBucket] = []
        self._chunks: list[_Chunk] = []
        # Causal masks, for each window.
        self._causal: dict[int, torch.Tensor] = {}

    def plan(self, batch: AttentionBatch) -> None:
        totals = batch.starts + batch.lengths
        tables = PageTables(batch.pages, totals, self.pool.page_size)
        firsts = np.cumsum(batch.lengths) - batch.lengths
        everyone = np.arange(len(totals))
        self.slots = self._to_tensor(tables.find_slots(everyone, batch.starts, batch.lengths))
        single = batch.lengths == 1
        decode = np.flatnonzero(single)
        # The mask hides the rest of a last page. But values of an earlier owner there may be
        # infinite or NaN, and a weight of zero does not hide those.
        stale = tables.find_slots(decode, totals[decode], -totals[decode] % tables.page_size)
        self._stale = self._to_tensor(stale) if len(stale) else None
        self._buckets = [
            self._make_bucket(members, totals, firsts, tables, int(batch.lengths.sum()))
            for members in _split_buckets(decode[np.argsort(totals[decode], kind="stable")], totals)
        ]
        self._chunks = []
        tree, masks = find_trees(batch.lengths, batch.trees), np.empty(0, np.int64)
        if tree.any():
            masks = pack_trees(batch.lengths, batch.trees)
        for i in np.flatnonzero(~single):
            first, start, length = int(firsts[i]), int(batch.starts[i]), int(batch.lengths[i])
            pages = self._to_tensor(tables.get_table(i))
            stop = first + length
            trees = self._make_tree_masks(start, masks[first:stop]) if tree[i] else None
            self._chunks.append(_Chunk(first, stop, start, pages, trees))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        window = self._windows.of_layer(layer)
        keys, values = self.pool.get_keys(layer), self.pool.get_values(layer)
        if self._stale is not None:
            clear_rows(keys, self._stale)
            clear_rows(values, self._stale)
        scales = self.pool.get_scales(layer)
        # Scales are factors of all scores and of all results, so we need not scale keys and values.
        scale = self._scale * scales.key
        if len(self._buckets) == 1 and self._buckets[0].rows is None:
            out = self._attend_bucket(self._buckets[0], window, scale, q, keys, values, sinks)
            return scale_result(out, scales)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for bucket in self._buckets:
            assert bucket.rows is not None
            some = q.index_select(0, bucket.rows)
            attended = self._attend_bucket(bucket, window, scale, some, keys, values, sinks)
            out.index_copy_(0, bucket.rows, attended)
        for chunk in self._chunks:
            self._attend_chunk(chunk, window, scale, q, k, v, keys, values, sinks, out)
        return scale_result(out, scales)

    def make_draft_graph(self, rows: int, max_context: int, first_key: int = 0) -> DraftAttention:
        return TorchDraft(self.pool, rows, self._latent, self._windows, first_key)

    def _make_bucket(
        self,
        members: Int64Array,
        totals: Int64Array,
        firsts: Int64Array,
        tables: PageTables,
        num_tokens: int,
    ) -> _DecodeBucket:
        lengths, rows = totals[members], firsts[members]
        pages = tables.pad_tables(members)
        columns = np.arange(pages.shape[1] * tables.page_size)
        masks: dict[int, torch.Tensor | None] = {}
        for window in self._windows.kinds:
            hidden = columns >= lengths[:, None]
            if window:
                hidden |= columns < lengths[:, None] - window
            masks[window] = None
            if hidden.any():
                mask = _make_additive_mask(self._to_tensor(hidden), self._dtype)
                masks[window] = mask[:, None, None, :]
        in_order = len(rows) == num_tokens and bool((rows[1:] > rows[:-1]).all())
        return _DecodeBucket(
            None if in_order else self._to_tensor(rows),
            self._to_tensor(pages.ravel()),
            masks,
            len(rows),
        )

    def _attend_bucket(
        self,
        bucket: _DecodeBucket,
        window: int,
        scale: float,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend a bucket; ``q`` is ``[sequences, heads, head_dim]``. We use the heads of a group
        as SDPA's query dimension: with one token per sequence they all see the same keys, and K and
        V need no repetition."""
        kv_heads, head_dim = keys.shape[1:]
        grouped = q.view(bucket.size, kv_heads, -1, head_dim)
        k, v = (
            x.view(bucket.size, -1, *x.shape[1:]).transpose(1, 2)
            for x in self._gather_kv(keys, values, bucket.pages)
        )
        if sinks is not None:
            sinks = sinks.view(kv_heads, -1, 1)
        out = attend_with_sinks(grouped, k, v, bucket.masks[window], scale, sinks)
        return out.reshape(*q.shape[:2], -1)

    def _attend_chunk(
        self,
        chunk: _Chunk,
        window: int,
        scale: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Attend a chunk, and write its rows of ``out``."""
        rows, length = slice(chunk.first, chunk.stop), chunk.stop - chunk.first
        kv_heads = keys.shape[1]
        group = q.shape[1] // kv_heads
        query = q[rows].view(-1, kv_heads, group, q.shape[2]).permute(1, 2, 0, 3)
        result = out[rows].view(-1, kv_heads, group, out.shape[2]).permute(1, 2, 0, 3)
        if sinks is not None:
            sinks = sinks.view(kv_heads, group, 1, 1)
        hides = sinks is not None or 0 < window < length
        if chunk.start == 0 and chunk.trees is None and not hides and not self._is_widened:
            k, v = _repeat_heads(k[rows], group), _repeat_heads(v[rows], group)
            result.copy_(scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale))
            return
        k, v = (_repeat_heads(x, group) for x in self._gather_kv(keys, values, chunk.pages))
        if chunk.trees is not None:
            seen = chunk.start + length
            k, v = k[:, :, :seen], v[:, :, :seen]
            mask = chunk.trees[window]
            result.copy_(attend_with_sinks(query, k, v, mask, scale, sinks))
            return
        for first in range(0, length, QUERY_BLOCK):
            stop = min(first + QUERY_BLOCK, length)
            begin, end = chunk.start + first, chunk.start + stop
            low = max(0, begin - window + 1) if window else 0
            causal = self._get_causal_mask(window, QUERY_BLOCK + begin - low)
            # In the shared mask, the last column that row i may see is i + width - QUERY_BLOCK.
            left = causal.shape[1] - QUERY_BLOCK - begin
            mask = causal[: stop - first, left + low : left + end]
            if mask.is_cuda:  # CUDA's kernels need a mask that begins at a multiple of 16 bytes
                mask = mask.clone(memory_format=torch.contiguous_format)
            part = slice(low, end)
            result[:, :, first:stop] = attend_with_sinks(
                query[:, :, first:stop], k[:, :, part], v[:, :, part], mask, scale, sinks
            )

    def _make_tree_masks(self, start: int, masks: Int64Array) -> dict[int, torch.Tensor]:
        """Make the additive masks of a tree for each window; ``masks`` are those of its tokens."""
        tree = masks[:, None] >> np.arange(len(masks)) & 1
        history = np.ones((len(masks), start), np.bool_)
        seen = self._to_tensor(np.concatenate([history, tree == 1], axis=1))
        return {
            window: _make_additive_mask(~keep_last(seen, window), self._dtype)
            for window in self._windows.kinds
        }

    def _get_causal_mask(self, window: int, width: int) -> torch.Tensor:
        """Return the additive mask ``[QUERY_BLOCK, width or more]`` of a window. The mask of every
        block is a slice of it."""
        mask = self._causal.get(window)
        if mask is None or mask.shape[1] < width:
            width = -(-width // 4096) * 4096
            shape = QUERY_BLOCK, width
            mask = torch.full(shape, float("-inf"), dtype=self._dtype, device=self._device)
            mask.triu_(width - QUERY_BLOCK + 1)
            if window:
                before = torch.full_like(mask, float("-inf"))
                mask += before.tril_(width - QUERY_BLOCK - window)
            self._causal[window] = mask
        return mask

    def _gather_kv(
        self, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather K and V, see :func:`pd.kernels.kv_store.read_pages`."""
        k = self._gather_pages(keys, pages)
        if self._latent is not None:
            return k, k[..., : self._latent.value_dim]
        return k, self._gather_pages(values, pages)

    def _gather_pages(self, layer: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return read_pages(layer, pages, self.pool.page_size, self._dtype)

    def _to_tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _make_additive_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make a mask for ``scaled_dot_product_attention`` that hides keys."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _repeat_heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """View ``[tokens, kv_heads, head_dim]`` as ``[kv_heads, group, tokens, head_dim]``."""
    return x.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


def _split_buckets(ordered: Int64Array, totals: Int64Array) -> list[Int64Array]:
    """Split sequences, ordered by length, where the next one would pad the first too much.

    Each bucket is in the order of the step, so its rows often need no reordering.
    """
    buckets: list[Int64Array] = []
    begin = 0
    for i in range(1, len(ordered) + 1):
        limit = totals[ordered[begin]] * BUCKET_FACTOR + BUCKET_SLACK
        if i == len(ordered) or totals[ordered[i]] > limit:
            buckets.append(np.sort(ordered[begin:i]))
            begin = i
    return buckets
