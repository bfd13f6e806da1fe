"""The reference for :class:`pd.kernels.attention.base.DraftAttention`, in plain PyTorch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.attention.base import DraftAttention, Int64Array, LatentShape, PagedKV
from pd.kernels.attention.page_tables import extend_array, make_padded_tables
from pd.kernels.attention.sinks import attend_with_sinks
from pd.kernels.attention.trees import MAX_TREE
from pd.kernels.attention.windows import ALL_KEYS, LayerWindows, keep_last
from pd.kernels.kv_store import read_pages, scale_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import IntArray


class TorchDraft(DraftAttention):
    """One padded batch of all rows, whatever their lengths.

    It works on every device, but a CUDA graph would not see a new plan.
    """

    def __init__(
        self,
        pool: PagedKV,
        rows: int,
        latent: LatentShape | None = None,
        windows: LayerWindows = ALL_KEYS,
        first_key: int = 0,
    ) -> None:
        self.pool, self._latent, self._windows = pool, latent, windows
        self._rows, self._first_key = rows, first_key
        self._device = pool.get_keys(0).device
        self.slots, self.places, self.bases, self.masks = (
            torch.zeros(rows, dtype=torch.int64, device=self._device) for _ in range(4)
        )
        self.plan(np.empty(0, np.int64), [])

    def plan(self, limits: Int64Array, pages: Sequence[IntArray]) -> None:
        missing = self._rows - len(limits)
        assert missing >= 0, "more sequences than the graph has rows"
        limits = extend_array(limits, missing, 1)
        tables = make_padded_tables(self.pool, pages, limits)
        self._pages = torch.from_numpy(tables.pad_tables(np.arange(self._rows))).to(self._device)
        self._limits = torch.from_numpy(limits).to(self._device)

    def locate_slots(self) -> None:
        size = self.pool.page_size
        inside = (self.places >= 0) & (self.places < self._limits)
        places = torch.where(inside, self.places, 0)
        pages = self._pages.gather(1, (places // size)[:, None])[:, 0]
        pages = torch.where(inside, pages, self.pool.num_pages)
        self.slots.copy_(pages * size + places % size)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv_heads, head_dim = k.shape[1:]
        visible = keep_last(self._find_visible(), self._windows.of_layer(layer))
        keys, values = (
            read_pages(x, self._pages.view(-1), self.pool.page_size, q.dtype)
            .view(self._rows, -1, kv_heads, head_dim)
            # A weight of zero does not hide NaN.
            .masked_fill(~visible[:, :, None, None], 0)
            .transpose(1, 2)
            for x in (self.pool.get_keys(layer), self.pool.get_values(layer))
        )
        scales, scale = self.pool.get_scales(layer), 1 / math.sqrt(head_dim)
        if self._latent is not None:
            values, scale = keys[..., : self._latent.value_dim], self._latent.scale
        grouped = q.view(self._rows, kv_heads, -1, head_dim)
        mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        if sinks is not None:
            sinks = sinks.view(kv_heads, -1, 1)
        mask = mask[:, None, None, :]
        out = attend_with_sinks(grouped, keys, values, mask, scale * scales.key, sinks)
        out = out.masked_fill(~visible.any(dim=1)[:, None, None, None], 0)
        return scale_result(out.reshape(*q.shape[:2], -1), scales)

    def _find_visible(self) -> torch.Tensor:
        """Find the keys that each row sees: bool ``[rows, keys]``."""
        positions = torch.arange(self._pages.shape[1] * self.pool.page_size, device=self._device)
        offsets = positions - self.bases[:, None]
        bits = (self.masks[:, None] >> offsets.clamp(0, MAX_TREE - 1)) & 1
        in_mask = (offsets < MAX_TREE) & (bits == 1)
        # Padding has a single key.
        first = torch.where(self._limits > self._first_key, self._first_key, 0)
        inside = (positions >= first[:, None]) & (positions < self._limits[:, None])
        return ((offsets < 0) | in_mask) & inside
