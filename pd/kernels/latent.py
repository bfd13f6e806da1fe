"""Multi-head latent attention (MLA; DeepSeek-V2, 2024) around the attention itself.

The pool has one row per token and layer: the normed latent of K and V, then a rotated key that all
heads share. Weights expand the latent to K and V of every head. The **absorbed** form moves these
weights to the other side: it multiplies queries with the weights of K, attends to the rows
themselves as if they were one head, and multiplies the result with the weights of V. It reads the
least, so we decode with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pd.kernels.kv_store import store_rows
from pd.kernels.norm import rms_norm
from pd.kernels.rope import apply_rope


class LatentHeads:
    """The weights that expand latents to K and V of each head.

    Args:
        weight: ``[heads * (nope_dim + value_dim), kv_rank]``: the rows of each head, K's first.
        nope_dim: size of a head's part of K without positions.
        num_heads: heads of this rank.

    Attributes:
        kv_rank: width of a latent.
    """

    def __init__(self, weight: torch.Tensor, num_heads: int, nope_dim: int) -> None:
        self.kv_rank = weight.shape[1]
        self._weight = weight
        by_head = weight.view(num_heads, -1, self.kv_rank)
        self._keys, self._values = by_head[:, :nope_dim], by_head[:, nope_dim:]

    def absorb_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Turn queries of heads into queries of rows.

        Args:
            q: ``[tokens, heads, nope_dim + rope_dim]``, rotated.

        Returns:
            ``[tokens, heads, kv_rank + rope_dim]``, contiguous.
        """
        nope_dim, rank = self._keys.shape[1:]
        absorbed = q.new_empty(*q.shape[:2], rank + q.shape[2] - nope_dim)
        products = torch.bmm(q[..., :nope_dim].transpose(0, 1), self._keys)
        absorbed[..., :rank] = products.transpose(0, 1)
        absorbed[..., rank:] = q[..., nope_dim:]
        return absorbed

    def expand_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expand rows of latents to K and V of every head.

        Args:
            rows: ``[tokens, kv_rank + rope_dim]``.

        Returns:
            K ``[tokens, heads, nope_dim + rope_dim]`` and V ``[tokens, heads, value_dim]``, both
            contiguous.
        """
        num_heads, nope_dim, rank = self._keys.shape
        expanded = F.linear(rows[:, :rank], self._weight).view(len(rows), num_heads, -1)
        keys = rows.new_empty(len(rows), num_heads, nope_dim + rows.shape[1] - rank)
        keys[..., :nope_dim] = expanded[..., :nope_dim]
        keys[..., nope_dim:] = rows[:, None, rank:]
        return keys, expanded[..., nope_dim:].contiguous()

    def expand_values(self, latents: torch.Tensor) -> torch.Tensor:
        """Expand weighted means of latents, ``[tokens, heads, kv_rank]``, to ``[tokens, heads,
        value_dim]``."""
        products = torch.bmm(latents.transpose(0, 1), self._values.transpose(1, 2))
        return products.transpose(0, 1)


def rotate_and_store_latents(
    q: torch.Tensor,
    latents: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    """Do the work between the projections and attention: rotate the queries, norm the latents,
    rotate the key that all heads share, and write the rows into the pool.

    Args:
        q: ``[tokens, heads, nope_dim + rope_dim]``, the last dimension contiguous. The last
            ``rope_dim`` values of each head are rotated in place.
        latents: ``[tokens, kv_rank + rope_dim]``, the last dimension contiguous.
        weight: ``[kv_rank]``, of the norm; eps: its epsilon.
        cos_sin: from :func:`pd.kernels.rope.compute_rotations`, of ``rope_dim``.
        pool: a layer's pool, contiguous ``[slots, 1, kv_rank + rope_dim]``.
        slots: int64 ``[tokens]``, each inside the pool (not checked on a GPU).
        interleaved: whether the rotation turns neighbouring dimensions, see
            :func:`pd.kernels.rope.apply_rope`.
        scale: of the layer's pool, see :func:`pd.kernels.kv_store.store_rows`.

    Returns:
        The new rows, contiguous ``[tokens, 1, kv_rank + rope_dim]``.
    """
    rank = len(weight)
    rope_dim = latents.shape[1] - rank
    part = q[..., -rope_dim:]
    part.copy_(apply_rope(part, cos_sin, interleaved=interleaved))
    rows = latents.new_empty(len(latents), 1, rank + rope_dim)
    rows[:, 0, :rank] = rms_norm(latents[:, :rank], weight, eps)
    rows[..., rank:] = apply_rope(latents[:, None, rank:], cos_sin, interleaved=interleaved)
    store_rows(pool, slots, rows, scale)
    return rows
