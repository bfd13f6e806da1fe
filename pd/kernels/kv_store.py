"""Writes a step's new keys and values into the paged pool, whose vectors may be in fp8.

A vector in fp8 is stored divided by its layer's scale. All queries read the stored vectors, even
those of the step that writes them. So tokens do not depend on the division of a prompt into chunks,
on cached prefixes or on the node that computed a page.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from pd.kernels.fp8 import FP8, convert_saturated


class KVScales(NamedTuple):
    """Scales of one layer's keys and values in fp8; 1 for other dtypes."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: KVScales = UNSCALED,
) -> None:
    """Write token i into slot ``slots[i]``.

    Args:
        keys, values: one layer of the pool, ``[slots, kv_heads, head_dim]``.
        slots: int64 ``[tokens]``. If one occurs twice, either token may win.
        k, v: ``[tokens, kv_heads, head_dim]``.
        scales: of the layer.
    """
    store_rows(keys, slots, k, scales.key)
    store_rows(values, slots, v, scales.value)


def store_rows(
    layer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float = 1.0
) -> None:
    """Write the keys, or the values, of :func:`store_kv`. Numbers beyond the range of fp8 become
    the largest ones."""
    if layer.dtype == FP8:
        rows = convert_saturated(rows.float() * invert_scale(scale)).view(torch.uint8)
        layer = layer.view(torch.uint8)  # torch has no index_copy_ for fp8
    layer.index_copy_(0, slots, rows)


@functools.cache
def invert_scale(scale: float) -> float:
    """Return the float32 by which vectors are multiplied before they are stored.

    The reference and the kernels multiply by the same number, so they store the same bits.
    """
    return float(np.float32(1.0) / np.float32(scale))


def scale_result(result: torch.Tensor, scales: KVScales) -> torch.Tensor:
    """Multiply the weighted mean of stored values by their scale, in place."""
    return result if scales.value == 1.0 else result.mul_(scales.value)


def read_pages(
    layer: torch.Tensor, pages: torch.Tensor, page_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Copy the keys, or the values, of some pages. Vectors in fp8 still have to be multiplied by
    the layer's scale.

    Args:
        layer: of the pool, ``[slots, kv_heads, head_dim]``.
        pages: int32 or int64 ``[n]``.
        dtype: of the result. It holds every number of fp8.

    Returns:
        ``[n * page_size, kv_heads, head_dim]``. Each page is one contiguous copy.
    """
    stored = layer.view(torch.uint8) if layer.dtype == FP8 else layer
    paged = stored.view(-1, page_size * layer.shape[1] * layer.shape[2])
    rows = paged.index_select(0, pages).view(-1, *layer.shape[1:])
    return rows if layer.dtype == dtype else rows.view(layer.dtype).to(dtype)


def clear_rows(layer: torch.Tensor, slots: torch.Tensor) -> None:
    """Set the vectors at some slots to zero."""
    (layer.view(torch.uint8) if layer.dtype == FP8 else layer).index_fill_(0, slots, 0)
