"""Masks of tokens: the kernel and its reference do what the definition says."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, seeded, skip_unless_interpreter_works

from pd.kernels.token_masks import BITS, apply_token_masks


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 5000])
@pytest.mark.parametrize("rows", [[], [2], [3, 0, 1]])
def test_forbidden_tokens_have_no_chance(kernel: str, vocab: int, rows: list[int]) -> None:
    generator = seeded()
    device = DEVICE if kernel == "triton" else "cpu"
    logits = torch.randn(4, vocab, generator=generator)
    words = -(-vocab // BITS)
    allowed = torch.rand(len(rows), words * BITS, generator=generator) < 0.5
    weights = torch.tensor([1 << bit for bit in range(BITS)], dtype=torch.int64)
    masks = (allowed.view(len(rows), words, BITS) * weights).sum(-1).to(torch.int32)
    expected = logits.clone()
    for place, row in enumerate(rows):
        expected[row, ~allowed[place, :vocab]] = float("-inf")
    given = logits.to(device), torch.tensor(rows, dtype=torch.int64, device=device)
    if kernel == "triton" and rows:
        skip_unless_interpreter_works()
        from pd.kernels.token_masks_triton import apply_token_masks as by_triton

        by_triton(*given, masks.to(device))
    else:
        apply_token_masks(*given, masks.to(device))
    assert torch.equal(given[0].cpu(), expected)
