"""Finds the highest rate of a deployment by bisection."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search; rates are requests per second.

    Attributes:
        share: least share of good requests.
        repeats: runs at each rate; their median decides.
        resolution: the search ends when the lowest failing rate is at most this share above the
            highest passing rate.
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
    """One rate, with the share of good requests in each repeat."""

    rate: float
    shares: list[float] = field(default_factory=list)

    def passes(self, share: float) -> bool:
        return median(self.shares) >= share

    def is_decided(self, settings: SearchSettings) -> bool:
        """Whether no further repeat can move the median to the other side of the share."""
        good = sum(share >= settings.share for share in self.shares)
        return max(good, len(self.shares) - good) > settings.repeats / 2


@dataclass
class SearchResult:
    """Result of a search.

    Attributes:
        highest: highest rate that passed; None if even the lowest failed.
        failed: lowest rate that failed; None if all passed.
        points: every rate in the order of measurement.
    """

    highest: float | None = None
    failed: float | None = None
    points: list[Point] = field(default_factory=list)


def highest_rate(settings: SearchSettings, measure: Callable[[float, int], float]) -> SearchResult:
    """Search for the highest rate within the objectives.

    Rates double from the lowest until one fails. Then we bisect the interval by the geometric mean,
    because the ratio of rates matters.

    Args:
        measure: returns the share of good requests at a rate, in one repeat.
    """
    result = SearchResult()
    rate = settings.low
    while True:
        point = Point(rate)
        result.points.append(point)
        for repeat in range(settings.repeats):
            point.shares.append(measure(rate, repeat))
            if point.is_decided(settings):
                break
        if point.passes(settings.share):
            result.highest = rate
            if rate >= settings.high:
                return result
        else:
            result.failed = rate
            if rate <= settings.low:
                return result
        if result.failed is None:
            rate = min(rate * 2, settings.high)
            continue
        assert result.highest is not None  # the lowest rate passed, or the search is over
        if result.failed <= result.highest * (1 + settings.resolution):
            return result
        rate = (result.highest * result.failed) ** 0.5
