"""The search finds the highest rate of a server whose limit is known."""

from __future__ import annotations

import random

import pytest

from pd.bench.load.search import SearchResult, SearchSettings, highest_rate
from pd.core.errors import UsageError

LIMIT = 23.0


def search(settings: SearchSettings, noise: float = 0.0, seed: int = 1) -> SearchResult:
    rng = random.Random(seed)

    def measure(rate: float, repeat: int) -> float:
        share = 1.0 if rate <= LIMIT else 0.5
        return share + rng.uniform(-noise, noise)

    return highest_rate(settings, measure)


@pytest.mark.parametrize("resolution", [0.5, 0.1, 0.01])
def test_the_limit_lies_within_the_resolution(resolution) -> None:
    found = search(SearchSettings(resolution=resolution))
    assert found.highest is not None
    assert found.failed is not None
    assert found.highest <= LIMIT < found.failed <= found.highest * (1 + resolution)


def test_a_point_ends_when_its_median_is_decided() -> None:
    found = search(SearchSettings(repeats=5))
    assert {len(point.shares) for point in found.points} == {3}


def test_one_bad_repeat_does_not_decide() -> None:
    def measure(rate: float, repeat: int) -> float:
        return 0.0 if repeat == 0 or rate > LIMIT else 1.0

    found = highest_rate(SearchSettings(repeats=3, resolution=0.05), measure)
    assert found.highest == pytest.approx(LIMIT, rel=0.05)


def test_ends_of_the_range() -> None:
    assert search(SearchSettings(low=30, high=40)).highest is None
    within = search(SearchSettings(low=1, high=10))
    assert (within.highest, within.failed) == (10, None)


@pytest.mark.parametrize(
    "settings", [{"low": 0}, {"low": 9, "high": 8}, {"share": 1.5}, {"repeats": 0}]
)
def test_settings_that_cannot_be_are_refused(settings) -> None:
    with pytest.raises(UsageError):
        SearchSettings(**settings)
