"""Writes a step's new keys and values into the paged pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Write token i into slot ``slots[i]``.

    Args:
        keys, values: one layer of the pool, ``[slots, kv_heads, head_dim]``.
        slots: int64 ``[tokens]``. If one occurs twice, either token may win.
        k, v: ``[tokens, kv_heads, head_dim]``.
    """
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)
