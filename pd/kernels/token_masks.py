"""Forbids tokens in rows of logits."""

from __future__ import annotations

import torch

from pd.kernels.dispatch import uses_triton

# Tokens per element of a mask.
BITS = 32


def apply_token_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: contiguous float32 ``[n, vocab_size]``.
        rows: int64 ``[m]``, rows of ``logits``, each once.
        masks: contiguous int32 ``[m, ceil(vocab_size / 32)]``: bit ``i % 32`` of element
            ``i // 32`` is 1 if token ``i`` is allowed.
    """
    if uses_triton(logits):
        from pd.kernels import token_masks_triton

        token_masks_triton.apply_token_masks(logits, rows, masks)
        return
    shifts = torch.arange(BITS, dtype=torch.int32, device=masks.device)
    forbidden = ((masks[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    logits.index_put_((rows,), logits[rows].masked_fill_(forbidden, float("-inf")))
