"""The kernel for :mod:`pd.kernels.token_masks`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

if TYPE_CHECKING:
    import torch

# Tokens per program.
_BLOCK = 4096


@triton.jit
def _apply_masks(
    logits,
    rows,
    masks,
    vocab,
    words,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of one row per program. Allowed tokens are not touched."""
    start_next(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(masks + index * words + token // BITS, mask=inside, other=-1)
    forbidden = ((word >> (token % BITS)) & 1) == 0
    row = tl.load(rows + index)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits + row * vocab + token, nothing, mask=inside & forbidden)


def apply_token_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """:func:`pd.kernels.token_masks.apply_token_masks`."""
    vocab = logits.shape[1]
    launch_kernel(
        _apply_masks,
        (len(rows), triton.cdiv(vocab, _BLOCK)),
        logits.device,
        *(logits, rows, masks, vocab, masks.shape[1]),
        BLOCK=_BLOCK,
        BITS=8 * masks.element_size(),
        num_warps=8,
    )
