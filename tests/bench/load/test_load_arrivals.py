"""Schedules are pure functions of seed and settings, and have the statistics that they promise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pd.bench.load.arrivals import Arrivals, draw_arrivals
from pd.core.errors import UsageError

COUNT = 20_000


def intervals(arrivals: Arrivals, seed: int = 1) -> np.ndarray:
    return np.diff(draw_arrivals(arrivals, COUNT, seed), prepend=0.0)


def test_same_seed_same_times_and_another_seed_others() -> None:
    arrivals = Arrivals(rate=7.0, burstiness=0.5)
    assert draw_arrivals(arrivals, 100, 3) == draw_arrivals(arrivals, 100, 3)
    assert draw_arrivals(arrivals, 100, 3) != draw_arrivals(arrivals, 100, 4)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_mean_of_the_rate_and_the_variation_of_the_gamma_shape(
    burstiness,
) -> None:
    found = intervals(Arrivals(rate=50.0, burstiness=burstiness))
    assert found.mean() == pytest.approx(1 / 50, rel=0.05)
    # The coefficient of variation of a gamma distribution of shape k is 1/sqrt(k).
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_counts_in_windows_vary_as_much_as_their_mean() -> None:
    counts = np.bincount(np.floor(draw_arrivals(Arrivals(rate=20.0), COUNT, 5)).astype(int))[:-1]
    assert counts.mean() == pytest.approx(20, rel=0.05)
    assert counts.var() == pytest.approx(20, rel=0.15)


def test_constant_intervals_are_equal() -> None:
    found = intervals(Arrivals(rate=8.0, burstiness=float("inf")))
    assert found == pytest.approx(np.full(COUNT, 1 / 8))


@pytest.mark.parametrize("ramp", ["linear", "exponential"])
def test_a_ramp_goes_from_its_start_to_its_end(ramp) -> None:
    arrivals = Arrivals(burstiness=float("inf"), ramp=ramp, ramp_start=10.0, ramp_end=40.0)
    rates = 1 / intervals(arrivals)
    assert (rates[0], rates[-1]) == pytest.approx((10.0, 40.0))
    middle = 25.0 if ramp == "linear" else 20.0
    assert rates[COUNT // 2] == pytest.approx(middle, rel=0.01)
    assert all(before <= after for before, after in pairwise(rates.round(6)))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rate": 0.0}, "--request-rate must be above 0"),
        ({"rate": float("nan")}, "--request-rate must be above 0"),
        ({"burstiness": -1.0}, "--burstiness must be above 0"),
        ({"ramp": "linear", "ramp_start": 0.0, "ramp_end": 1.0}, "--ramp-up-start-rps"),
        ({"ramp": "linear", "ramp_start": 1.0, "ramp_end": float("inf")}, "--ramp-up-end-rps"),
    ],
)
def test_what_is_no_rate_is_refused(settings, complaint) -> None:
    with pytest.raises(UsageError, match=complaint):
        Arrivals(**settings)
