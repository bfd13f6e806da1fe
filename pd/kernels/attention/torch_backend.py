"""The reference: paged attention in plain PyTorch, on any device and in any dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from pd.kernels.attention.base import AttentionBackend, AttentionBatch, LatentShape, PagedKV
from pd.kernels.attention.page_tables import PageTables
from pd.kernels.attention.torch_draft import TorchDraft
from pd.kernels.attention.trees import find_trees, pack_trees

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
        mask: additive ``[sequences, 1, 1, padded length]``, or None if nothing is padded.
    """

    rows: torch.Tensor | None
    pages: torch.Tensor
    mask: torch.Tensor | None
    size: int


@dataclass
class _Chunk:
    """Several new tokens of one sequence: rows ``[first, stop)``, context ``start``.

    Attributes:
        tree: additive mask ``[tokens, start + tokens]`` of a tree.
    """

    first: int
    stop: int
    start: int
    pages: torch.Tensor
    tree: torch.Tensor | None = None


class TorchAttention(AttentionBackend):
    """Gathers pages and calls ``scaled_dot_product_attention``.

    Decode steps of similar length form one padded batch. Each chunk of several tokens is attended
    alone, so its rows do not depend on the rest of the step.
    """

    name = "torch"

    def __init__(self, pool: PagedKV, num_heads: int, latent: LatentShape | None = None) -> None:
        self.pool, self._latent = pool, latent
        self._scale = None if latent is None else latent.scale
        sample = pool.get_keys(0)
        self._device, self._dtype = sample.device, sample.dtype
        self.slots = torch.empty(0, dtype=torch.int64)
        self._stale: torch.Tensor | None = None
        self._buckets: list[_DecodeBucket] = []
        self._chunks: list[_Chunk] = []
        self._causal: torch.Tensor | None = None

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
            mask = self._make_tree_mask(start, masks[first:stop]) if tree[i] else None
            self._chunks.append(_Chunk(first, stop, start, pages, mask))
        self._causal = self._make_causal_mask(
            [chunk for chunk in self._chunks if chunk.start and chunk.tree is None]
        )

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.pool.get_keys(layer), self.pool.get_values(layer)
        if self._stale is not None:
            keys.index_fill_(0, self._stale, 0)
            values.index_fill_(0, self._stale, 0)
        if len(self._buckets) == 1 and self._buckets[0].rows is None:
            return self._attend_bucket(self._buckets[0], q, keys, values)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for bucket in self._buckets:
            assert bucket.rows is not None
            attended = self._attend_bucket(bucket, q.index_select(0, bucket.rows), keys, values)
            out.index_copy_(0, bucket.rows, attended)
        for chunk in self._chunks:
            self._attend_chunk(chunk, q, k, v, keys, values, out)
        return out

    def make_draft_graph(self, rows: int, max_context: int) -> DraftAttention:
        return TorchDraft(self.pool, rows, self._latent)

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
        mask = None
        width = pages.shape[1] * tables.page_size
        if int(lengths.min()) < width:
            hidden = self._to_tensor(np.arange(width) >= lengths[:, None])
            mask = _make_additive_mask(hidden, self._dtype)[:, None, None, :]
        in_order = len(rows) == num_tokens and bool((rows[1:] > rows[:-1]).all())
        return _DecodeBucket(
            None if in_order else self._to_tensor(rows),
            self._to_tensor(pages.ravel()),
            mask,
            len(rows),
        )

    def _attend_bucket(
        self, bucket: _DecodeBucket, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
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
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=bucket.mask, scale=self._scale)
        return out.reshape(*q.shape[:2], -1)

    def _attend_chunk(
        self,
        chunk: _Chunk,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        kv_heads, head_dim = k.shape[1:]
        group = q.shape[1] // kv_heads
        rows = slice(chunk.first, chunk.stop)
        # [kv heads, group, tokens, head_dim]. The K and V of a group are views of the same memory.
        query = q[rows].view(-1, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        result = out[rows].view(-1, kv_heads, group, out.shape[2]).permute(1, 2, 0, 3)
        if chunk.start == 0 and chunk.tree is None:
            k, v = _repeat_heads(k[rows], group), _repeat_heads(v[rows], group)
            result.copy_(
                scaled_dot_product_attention(query, k, v, is_causal=True, scale=self._scale)
            )
            return
        k, v = (_repeat_heads(x, group) for x in self._gather_kv(keys, values, chunk.pages))
        length = chunk.stop - chunk.first
        if chunk.tree is not None:
            seen = chunk.start + length
            result.copy_(
                scaled_dot_product_attention(
                    query,
                    k[:, :, :seen],
                    v[:, :, :seen],
                    attn_mask=chunk.tree,
                    scale=self._scale,
                )
            )
            return
        assert self._causal is not None
        for first in range(0, length, QUERY_BLOCK):
            stop = min(first + QUERY_BLOCK, length)
            seen = chunk.start + stop
            # In the shared mask, the last column that row i may see is i + width - QUERY_BLOCK.
            left = self._causal.shape[1] - QUERY_BLOCK - chunk.start - first
            mask = self._causal[: stop - first, left : left + seen]
            if mask.is_cuda:  # CUDA's kernels need a mask that begins at a multiple of 16 bytes
                mask = mask.clone(memory_format=torch.contiguous_format)
            result[:, :, first:stop] = scaled_dot_product_attention(
                query[:, :, first:stop],
                k[:, :, :seen],
                v[:, :, :seen],
                attn_mask=mask,
                scale=self._scale,
            )

    def _make_tree_mask(self, start: int, masks: Int64Array) -> torch.Tensor:
        """Make the additive mask of a tree; ``masks`` are those of its tokens."""
        tree = masks[:, None] >> np.arange(len(masks)) & 1
        hidden = np.concatenate([np.zeros((len(masks), start), np.int64), 1 - tree], axis=1)
        return _make_additive_mask(self._to_tensor(hidden == 1), self._dtype)

    def _make_causal_mask(self, chunks: Sequence[_Chunk]) -> torch.Tensor | None:
        """Make one additive mask ``[QUERY_BLOCK, width]``. The mask of every block is a slice of
        it."""
        if not chunks:
            return None
        blocks = [-(-(chunk.stop - chunk.first) // QUERY_BLOCK) for chunk in chunks]
        width = max(c.start + QUERY_BLOCK * n for c, n in zip(chunks, blocks, strict=True))
        if self._causal is not None and self._causal.shape[1] >= width:
            return self._causal
        width = -(-width // 4096) * 4096
        mask = torch.full(
            (QUERY_BLOCK, width), float("-inf"), dtype=self._dtype, device=self._device
        )
        return mask.triu_(width - QUERY_BLOCK + 1)

    def _gather_kv(
        self, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather K and V, see :meth:`_gather_pages`."""
        k = self._gather_pages(keys, pages)
        if self._latent is not None:
            return k, k[..., : self._latent.value_dim]
        return k, self._gather_pages(values, pages)

    def _gather_pages(self, layer: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Gather ``[pages * page_size, kv_heads, head_dim]``. Each page is one contiguous copy."""
        paged = layer.view(-1, self.pool.page_size * layer.shape[1] * layer.shape[2])
        return paged.index_select(0, pages).view(-1, *layer.shape[1:])

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
