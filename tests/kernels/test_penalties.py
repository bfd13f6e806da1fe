"""Penalties: the kernels and their reference do what the definition says."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, seeded, skip_unless_interpreter_works

from pd.kernels import penalties


def functions(kernel: str) -> tuple:
    if kernel == "torch":
        return penalties.count_tokens, penalties.apply_penalties
    skip_unless_interpreter_works()
    from pd.kernels import penalties_triton

    return penalties_triton.count_tokens, penalties_triton.apply_penalties


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("num_pairs", [0, 5, 300])
def test_every_pair_is_counted_as_often_as_it_occurs(kernel: str, num_pairs: int) -> None:
    count_tokens, _ = functions(kernel)
    generator, device = seeded(), DEVICE if kernel == "triton" else "cpu"
    places = torch.randint(3, (num_pairs,), generator=generator)
    tokens = torch.randint(-1, 7, (num_pairs,), generator=generator)
    rows = torch.randint(4, (num_pairs,), generator=generator)
    sampled = torch.tensor([6, 0, 3, 3])
    counts = torch.zeros(3, 7, dtype=torch.int32, device=device)
    count_tokens(counts, *(each.to(device) for each in (places, tokens, rows, sampled)))
    expected = torch.zeros(3, 7, dtype=torch.int32)
    for place, token, row in zip(places.tolist(), tokens.tolist(), rows.tolist(), strict=True):
        expected[place, sampled[row] if token < 0 else token] += 1
    assert torch.equal(counts.cpu(), expected)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("vocab", [5, 2048, 3000])
@pytest.mark.parametrize("drafted", [0, 4])
def test_rows_are_adjusted_by_their_own_counts_and_drafts(
    kernel: str, vocab: int, drafted: int
) -> None:
    _, apply_penalties = functions(kernel)
    generator, device = seeded(), DEVICE if kernel == "triton" else "cpu"
    logits = torch.randn(5, vocab, generator=generator)
    rows, places = torch.tensor([4, 0, 2]), torch.tensor([1, 1, 0])
    strengths = torch.tensor([[1.3, 0.5, 0.25], [0.7, 0.0, -0.5], [1.0, 2.0, 0.0]])
    counts = torch.randint(3, (2, vocab), generator=generator, dtype=torch.int32)
    in_prompt = torch.rand(2, vocab, generator=generator) < 0.3
    drafts = torch.randint(vocab, (drafted,), generator=generator)
    paths = torch.tensor([0, 1, 3, 0] if drafted else [], dtype=torch.int64)
    starts = torch.tensor([0, 3, 3, 4] if drafted else [0, 0, 0, 0])
    expected = logits.clone()
    for i in range(3):
        count = counts[places[i]].clone()
        for at in paths[starts[i] : starts[i + 1]]:
            count[drafts[at]] += 1
        repetition, frequency, presence = strengths[i]
        row = logits[rows[i]]
        weaker = torch.where(row > 0, row / repetition, row * repetition)
        row = torch.where((count > 0) | in_prompt[places[i]], weaker, row)
        expected[rows[i]] = row - frequency * count - presence * (count > 0)
    given = logits.to(device)
    arguments = (rows, places, strengths, counts, in_prompt, starts, paths, drafts)
    apply_penalties(given, *(each.to(device) for each in arguments))
    torch.testing.assert_close(given.cpu(), expected, rtol=1e-6, atol=1e-6)
