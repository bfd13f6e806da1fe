"""Noise is a fixed function of its counters, rightly distributed; thresholds are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.core.sampling_params import SEED_LIMIT
from pd.kernels.sampling import find_threshold, make_gumbel_noise, make_random_bits, mix_noise_keys

torch.set_num_threads(1)
MASK = 0xFFFFFFFF
PINNED = [[2133699716, 442717202, -130635372], [-426180787, -1995325852, -1943654429]]


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


def keys(*pairs: tuple[int, int]) -> torch.Tensor:
    return mix_noise_keys(torch.tensor(pairs))


class TestNoise:
    def test_is_the_documented_hash_on_unsigned_integers(self) -> None:
        (first, second), *_ = keys((2**62 + 12345, 678)).tolist()
        bits = make_random_bits(keys((2**62 + 12345, 678)), 1000)[0].tolist()
        for token in (0, 1, 2, 500, 999):
            x = lowbias32((token * 0x9E3779B9 & MASK) ^ (first & MASK))
            assert bits[token] & MASK == lowbias32(x ^ (second & MASK))

    def test_never_changes(self) -> None:
        """Two versions of pd must draw the same tokens from one seed."""
        assert make_random_bits(keys((0, 0), (7, 100)), 3).tolist() == PINNED

    def test_rows_do_not_depend_on_each_other(self) -> None:
        pairs = [(seed, position) for seed in range(3) for position in range(3)]
        together = make_gumbel_noise(keys(*pairs), 500)
        for row, pair in enumerate(pairs):
            assert torch.equal(make_gumbel_noise(keys(pair), 500)[0], together[row])

    def test_seeds_and_positions_differ(self) -> None:
        pairs = [(seed, position) for seed in range(30) for position in range(30)]
        assert len({tuple(each) for each in keys(*pairs).tolist()}) == 900

    @given(st.integers(0, SEED_LIMIT - 1), st.integers(0, 1 << 40))
    @settings(deadline=None)
    def test_keys_are_splitmix64_on_unsigned_integers(self, seed: int, position: int) -> None:
        mask = (1 << 64) - 1
        z = ((seed ^ (position * 0xD1342543DE82EF95 & mask)) + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        (first, second), *_ = keys((seed, position)).tolist()
        assert (first & MASK, second & MASK) == (z & MASK, z >> 32)

    def test_is_gumbel_distributed(self) -> None:
        """Moments, and the distribution function on 20 bins of equal probability."""
        noise = make_gumbel_noise(keys(*((5, position) for position in range(50))), 20000)
        assert torch.isfinite(noise).all()
        values = noise.double().flatten()
        assert abs(float(values.mean()) - 0.5772157) < 3e-3
        assert abs(float(values.var()) - np.pi**2 / 6) < 1e-2
        uniform = torch.exp(-torch.exp(-values))
        assert chi_square(torch.histc(uniform, 20, 0, 1), len(values) / 20) < 43.8  # p = 0.001

    def test_neighbours_are_independent(self) -> None:
        """Adjacent tokens, positions and seeds, by the correlation of 400,000 pairs."""
        noise = make_gumbel_noise(keys(*((s, p) for s in range(4) for p in range(5))), 20000)
        noise = noise.view(4, 5, -1)
        for a, b in (
            (noise[..., 1:], noise[..., :-1]),
            (noise[:, 1:], noise[:, :-1]),
            (noise[1:], noise[:-1]),
        ):
            together = torch.stack((a.flatten(), b.flatten()))
            assert abs(float(torch.corrcoef(together)[0, 1])) < 0.006

    def test_is_finite_at_the_extremes_of_the_hash(self) -> None:
        bits = torch.tensor([0, 1, 0x7FFFFFFF], dtype=torch.int32)
        u = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
        noise = -torch.log(-torch.log1p(-u))
        assert torch.isfinite(noise).all()
        assert float(noise.max()) < 22.3 and float(noise.min()) > -2.9


class TestThreshold:
    @settings(max_examples=150, deadline=None)
    @given(
        size=st.sampled_from([1, 2, 17, 300, 5000]),
        top_k=st.one_of(st.just(0), st.integers(1, 400)),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        spread=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
        seed=st.integers(0, 2**16),
    )
    def test_keeps_what_the_definition_keeps(
        self, size: int, top_k: int, top_p: float, spread: float, seed: int
    ) -> None:
        random = np.random.default_rng(seed)
        logits = (random.standard_normal(size) * spread).astype(np.float32)
        k = min(top_k or size, size)
        found = find_threshold(
            torch.from_numpy(logits)[None], torch.tensor([k]), torch.tensor([top_p])
        )
        kept = logits >= found.numpy()[0]
        ordered = np.sort(logits)[::-1][:k].astype(np.float64)
        mass = np.exp(ordered - ordered[0])
        before = (np.cumsum(mass) - mass) / mass.sum()
        # Where rounding decides whether a token is in, either is right.
        for slack in (-1e-5, 0.0, 1e-5):
            count = max(1, int((before < top_p + slack).sum())) if top_p < 1 else k
            if np.array_equal(kept, logits >= ordered[count - 1]):
                return
        pytest.fail(f"kept {kept.sum()} of {size}")

    def test_does_not_depend_on_the_other_rows(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(12, 9000, generator=generator) * torch.linspace(0.1, 5, 12)[:, None]
        top_k = torch.tensor([9000, 3, 2000, 9000] * 3)
        top_p = torch.tensor([0.9, 1.0, 0.95, 0.9999] * 3)
        together = find_threshold(logits, top_k, top_p)
        for i in range(12):
            alone = find_threshold(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1])
            assert torch.equal(alone[0], together[i])


def chi_square(observed: torch.Tensor, expected: float) -> float:
    return float(((observed - expected) ** 2 / expected).sum())
