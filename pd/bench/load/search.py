"""The highest rate that a deployment bears, by bisection."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. Rates in requests a second.

    Attributes:
        share: of the requests that must meet the objectives.
        repeats: runs at each rate; their median decides.
        resolution: the search ends when the lowest rate that fails is at most this much (as a
            share) above the highest that passes.
    """

    low: float = 1.0
    high: float = 64.0
    share: float = 0.9
    repeats: int = 3
    resolution: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < float("inf"):
            raise UsageError(
                f"--min-rate and --max-rate must be above 0 and in order, not {self.low:g} and "
                f"{self.high:g}"
            )
        if not 0 < self.share <= 1 or not self.resolution > 0 or self.repeats < 1:
            raise UsageError(
                "--share is above 0 and at most 1, --resolution above 0, --repeats at least 1"
            )


@dataclass
class Point:
    """One rate: the share of requests that met the objectives, in each repeat."""

    rate: float
    shares: list[float] = field(default_factory=list)

    def passes(self, share: float) -> bool:
        return median(self.shares) >= share

    def is_decided(self, settings: SearchSettings) -> bool:
        """Whether no further repeat can change which side of the share the median is on."""
        good = sum(share >= settings.share for share in self.shares)
        return max(good, len(self.shares) - good) > settings.repeats / 2


@dataclass
class Found:
    """Result of a search.

    Attributes:
        highest: highest rate that passed; None if the lowest one already failed.
        failed: lowest rate that failed; None if none did.
        points: every rate in the order of measurement.
    """

    highest: float | None = None
    failed: float | None = None
    points: list[Point] = field(default_factory=list)


def highest_rate(settings: SearchSettings, measure: Callable[[float, int], float]) -> Found:
    """Search for the highest rate that keeps the objectives.

    Rates double from the lowest until one fails, and then the interval is bisected (by the
    geometric mean, since what counts is the ratio).

    Args:
        measure: gives the share of requests that met the objectives at a rate, in one repeat.
    """
    found = Found()
    rate = settings.low
    while True:
        point = _measure_point(settings, rate, measure)
        found.points.append(point)
        if point.passes(settings.share):
            found.highest = rate
            if rate >= settings.high:
                return found
        else:
            found.failed = rate
            if rate <= settings.low:
                return found
        if found.failed is None:
            rate = min(rate * 2, settings.high)
            continue
        assert found.highest is not None  # the lowest rate passed, or the search is over
        if found.failed <= found.highest * (1 + settings.resolution):
            return found
        rate = (found.highest * found.failed) ** 0.5


def _measure_point(
    settings: SearchSettings, rate: float, measure: Callable[[float, int], float]
) -> Point:
    point = Point(rate)
    for repeat in range(settings.repeats):
        point.shares.append(measure(rate, repeat))
        if point.is_decided(settings):
            break
    return point
