"""Latents expanded to K and V of every head, for long chunks of prompts.

The absorbed form (:mod:`pd.kernels.latent`) reads the least, but with DeepSeek's sizes its products
are 3.4 times as large. A step of many tokens spends its time on products, so for these we expand
the rows that they see, layer by layer, and attend to the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.kv_store import UNSCALED, KVScales

if TYPE_CHECKING:
    from pd.kernels.attention.base import BoolArray, Int64Array, LatentShape, PagedKV
    from pd.kernels.attention.page_tables import PageTables
    from pd.kernels.latent import LatentHeads

# New tokens of a sequence from which expanding its rows takes less time than it saves.
LEAST_TOKENS = 256
# Share of a GPU's memory that K and V of a layer may take at most. Steps that would need more stay
# absorbed.
_MEMORY_SHARE = 1 / 128


class ExpandedKV:
    """K and V of all heads for the rows that some sequences see in one layer, in the form of a pool
    (:class:`pd.kernels.attention.base.PagedKV`): pages of one sequence after the other.

    Attributes:
        rows: rows of the pool that are expanded, int64 on its device; set it before
            :meth:`expand_layer`.
    """

    page_size = 64

    def __init__(self, pool: PagedKV, num_heads: int, latent: LatentShape) -> None:
        self.dtype, self.num_pages = pool.dtype, 0
        self._pool = pool
        device = pool.get_keys(0).device
        self.rows = torch.empty(0, dtype=torch.int64, device=device)
        self._keys, self._values = (
            torch.empty(0, num_heads, size, dtype=pool.dtype, device=device)
            for size in (latent.key_dim, latent.head_value_dim)
        )
        self._max_bytes = 64 << 20
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            self._max_bytes = int(memory * _MEMORY_SHARE)
        self._token_bytes = (
            num_heads * (latent.key_dim + latent.head_value_dim) * pool.dtype.itemsize
        )

    def choose_sequences(self, starts: Int64Array, lengths: Int64Array) -> BoolArray:
        """Choose the sequences of a step to expand."""
        chosen = lengths >= LEAST_TOKENS
        pages = -(-(starts + lengths)[chosen] // self.page_size)
        if int(pages.sum()) * self.page_size * self._token_bytes > self._max_bytes:
            chosen[:] = False
        return chosen

    def list_rows(self, tables: PageTables, chosen: Int64Array, totals: Int64Array) -> Int64Array:
        """List the slots of the first ``totals[i]`` tokens of sequences ``chosen[i]``. Each
        sequence begins a page, and the rest of its last page repeats a slot of its own."""
        pages = -(-totals // self.page_size)
        padded = pages * self.page_size
        rows = np.repeat(
            tables.find_slots(chosen, np.zeros_like(totals), np.ones_like(totals)), padded
        )
        ends = np.cumsum(padded)
        places = np.arange(int(totals.sum())) + np.repeat(
            ends - padded - (np.cumsum(totals) - totals), totals
        )
        rows[places] = tables.find_slots(chosen, np.zeros_like(totals), totals)
        return rows

    def expand_layer(self, layer: int, heads: LatentHeads) -> None:
        """Expand :attr:`rows` of a layer."""
        stored = self._pool.get_keys(layer)
        latents = read_rows(stored, self.rows, self.dtype, self._pool.get_scales(layer).key)
        self._keys, self._values = heads.expand_rows(latents)

    def get_keys(self, layer: int) -> torch.Tensor:
        """Return the keys of the layer that was expanded last, ``[rows, heads, key_dim]``."""
        return self._keys

    def get_values(self, layer: int) -> torch.Tensor:
        """Return the values of that layer, ``[rows, heads, value_dim]``."""
        return self._values

    def get_scales(self, layer: int) -> KVScales:
        """Return no scales, because expanding multiplies by them."""
        return UNSCALED


def read_rows(
    layer: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """Copy rows of latents, ``[rows, row_dim]``, from a layer ``[slots, 1, row_dim]``."""
    if layer.dtype == dtype:
        return layer[:, 0].index_select(0, slots)
    # torch has no index_select for fp8.
    stored = layer.view(torch.uint8)[:, 0].index_select(0, slots).view(layer.dtype)
    return stored.to(dtype).mul_(scale)
