"""The reference for attention sinks: learned scores that join a softmax without a value, so that a
head may attend to nothing (Xiao et al., 2024; gpt-oss, 2025)."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Do ``scaled_dot_product_attention`` with ``sinks``, which broadcast with a column of the
    scores; None for none."""
    if sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores += mask
    column = sinks.float().expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v
