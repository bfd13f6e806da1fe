"""Sampling on a GPU draws the reference's tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import (
    DEVICE,
    ON_GPU,
    SEED,
    normal,
    seeded,
)

from pd.core.sampling_params import SEED_LIMIT
from pd.kernels.sampling import find_threshold, sample_rows

# Between the seeds of two rows.
_FAR = 0x1234567890ABCDEF

pytestmark = pytest.mark.usefixtures("triton_works")


def triton_rows(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels, on either device."""
    from pd.kernels import sampling_triton

    there = [each.to(DEVICE) if isinstance(each, torch.Tensor) else each for each in arguments]
    tokens, finite = sampling_triton.sample_rows(*there, 1e-5, None)
    return tokens.cpu(), finite.cpu()


def parameters(rows: int, vocab_size: int) -> list[torch.Tensor]:
    """Temperatures, keys, top_k, top_p, min_p: greedy rows, each filter alone, and all."""
    kinds = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 20, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (2.0, 0, 1.0, 0.05),
        (1.0, 300, 0.6, 0.001),
        (1e-7, 1, 0.5, 0.0),
        (0.0, 5, 0.5, 0.5),
        (1.0, 1, 1.0, 0.0),
    ]
    chosen = [kinds[row % len(kinds)] for row in range(rows)]
    temperatures, top_k, top_p, min_p = zip(*chosen, strict=True)
    return [
        torch.tensor(temperatures),
        torch.tensor([((SEED + row * _FAR) % SEED_LIMIT, 3 * row) for row in range(rows)]),
        torch.tensor([min(k or vocab_size, vocab_size) for k in top_k]),
        torch.tensor(top_p),
        torch.tensor(min_p),
    ]


@pytest.mark.parametrize(
    ("vocab_size", "flags"),
    [
        pytest.param(
            size,
            flags,
            marks=pytest.mark.full if size != 1000 and not (ON_GPU or all(flags)) else (),
        )
        for size in (1, 3, 1000, 9001)
        for flags in ((False, False), (True, False), (True, True))
    ],
)
def test_tokens_are_the_references(vocab_size: int, flags: tuple[bool, bool]) -> None:
    rows = 18
    logits = normal(seeded(), rows, vocab_size) * torch.linspace(0.3, 6, rows)[:, None]
    logits[10:] = logits[10:].round()  # many ties
    before = logits.clone()
    arguments = parameters(rows, vocab_size)
    tokens, finite = triton_rows(logits, *arguments, *flags)
    expected, expected_finite = sample_rows(before, *arguments, *flags)
    assert torch.equal(logits, before)
    assert torch.equal(tokens, expected)
    assert torch.equal(finite, expected_finite) and bool(finite.all())


def test_rows_that_are_not_finite_are_reported_and_harm_no_other() -> None:
    logits = normal(seeded(), 9, 5000)
    arguments = parameters(9, 5000)
    expected, _ = sample_rows(logits, *arguments)
    bad = {1: float("nan"), 2: float("inf"), 3: float("nan"), 5: float("inf")}
    for row, value in bad.items():
        logits[row, 4000 + row] = value
    logits[4] = float("-inf")
    logits[6, :2000] = float("-inf")
    expected[6] = sample_rows(logits, *arguments)[0][6]
    tokens, finite = triton_rows(logits, *arguments, True, True)
    assert finite.tolist() == sample_rows(logits, *arguments)[1].tolist()
    assert finite.tolist() == [row not in (*bad, 4) for row in range(9)]
    assert torch.equal(tokens[finite], expected[finite])
    assert bool(((tokens >= 0) & (tokens < 5000)).all())


def test_logits_may_be_bfloat16() -> None:
    logits = normal(seeded(), 9, 700).to(torch.bfloat16)
    arguments = parameters(9, 700)
    expected, _ = sample_rows(logits, *arguments)
    assert torch.equal(triton_rows(logits, *arguments, True, True)[0], expected)


@settings(max_examples=15 if not ON_GPU else 200, deadline=None)
@given(
    size=st.sampled_from([1, 2, 17, 300, 5000]),
    top_k=st.one_of(st.just(0), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    spread=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    shift=st.sampled_from([0.0, -30.0, 1000.0]),
    seed=st.integers(0, 2**16),
    candidates=st.sampled_from([16, 256, 4096]),
)
def test_thresholds_keep_what_the_reference_keeps(
    size: int,
    top_k: int,
    top_p: float,
    spread: float,
    shift: float,
    seed: int,
    candidates: int,
) -> None:
    from pd.kernels.sampling_filters_triton import find_row_thresholds

    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * spread + shift
    k, p = torch.tensor([min(top_k or size, size)]), torch.tensor([top_p])
    arguments = (each.to(DEVICE) for each in (logits, torch.ones(1), k, p, torch.zeros(1)))
    found = find_row_thresholds(*arguments, 1e-5, chunk=1024, max_candidates=candidates)
    kept = logits[0] >= found.cpu()
    # Where rounding decides whether a token is in, either is right.
    for slack in (0.0, -1e-5, 1e-5):
        expected = find_threshold(logits, k, p + slack if top_p < 1 else p)
        if torch.equal(kept, logits[0] >= expected[0]):
            return
    pytest.fail(f"kept {int(kept.sum())} of {size}")


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_on_a_gpu_without_waiting_for_it(dtype: torch.dtype) -> None:
    rows, vocab_size = 64, 128256
    logits = (normal(seeded(), rows, vocab_size) * torch.linspace(0.3, 6, rows)[:, None]).to(dtype)
    arguments = parameters(rows, vocab_size)
    expected, _ = sample_rows(logits, *arguments)
    there = [each.to(DEVICE) for each in (logits, *arguments)]
    sample_rows(*there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, finite = sample_rows(*there)
    graph.replay()
    assert bool(finite.all())
    # Rounding of the noise or of a threshold may decide between two tokens, very rarely.
    assert int((tokens.cpu() != expected).sum()) <= 1
