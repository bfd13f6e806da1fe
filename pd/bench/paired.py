"""Decides which of two versions is faster, from result files paired run by run."""

from __future__ import annotations

import re
from math import comb, copysign, inf
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # Rows of a result file.
    Run = Sequence[Mapping[str, Any]]

Verdict = Literal["faster", "same", "slower", "unclear", "changed", "equal"]

# Probability with which an interval covers the true median, given enough pairs.
CONFIDENCE = 0.9
# Fewer pairs than this have no such interval.
LEAST_PAIRS = 5
_LESS_IS_BETTER = re.compile(r"(^|_)(s|ms|us|ns|seconds|passes|misses|errors|failed)$")
_MORE_IS_BETTER = re.compile(
    r"(_per_s(_per_gpu)?|_per_second|([gmt]b|flop)_s|throughput|speedup|goodput|acceptance_length"
    r"|hits|(hit|right)_rate|(goodput|cached)_share|share_of_(ceiling|roofline)(_rate)?)$"
)
# Units in rows that have a ``unit``.
_MORE_IS_BETTER_UNIT = re.compile(r"/s$|per second$")


class Measure(NamedTuple):
    """One number of a result file.

    Attributes:
        row: texts, switches and constant integers of its row, which identify the work.
        occurrence: index of the row among rows with the same identity.
        name: name of the number.
    """

    row: tuple[tuple[str, Any], ...]
    occurrence: int
    name: str

    @property
    def label(self) -> str:
        """The row's values as text."""
        return " ".join(str(value) for _, value in self.row) or "-"


class Comparison(NamedTuple):
    """A measure before and after.

    Attributes:
        before, after: medians.
        ratio: median of after by before over the pairs; infinite if a zero became positive.
        low, high: interval of the ratio; None with few pairs.
    """

    measure: Measure
    before: float
    after: float
    pairs: int
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict


def compare_runs(
    before: Sequence[Run], after: Sequence[Run], margin: float = 0.02
) -> list[Comparison]:
    """Compare runs of one benchmark with as many others; run ``i`` of both makes a pair.

    Args:
        margin: ratios up to ``1 ± margin`` count as no difference.

    Returns:
        measures that all runs have, in the order of the first run. Integers that never differ
        identify rows instead.
    """
    constant = _constant_integers([*before, *after])
    old = [_collect_measures(run, constant) for run in before]
    new = [_collect_measures(run, constant) for run in after]
    common = [m for m in old[0] if all(m in run for run in (*old, *new))]
    comparisons = []
    for measure in common:
        pairs = [(a[measure], b[measure]) for a, b in zip(old, new, strict=True)]
        # The sign test only needs to know which of two ratios is larger, so infinity will do.
        ratios = [b / a if a else copysign(inf, b) if b else 1.0 for a, b in pairs]
        ratio, interval = median(ratios), median_interval(ratios)
        verdict = _judge(measure, pairs, ratio, interval, margin)
        start, end = median(a for a, _ in pairs), median(b for _, b in pairs)
        low, high = interval or (None, None)
        comparisons.append(Comparison(measure, start, end, len(pairs), ratio, low, high, verdict))
    return comparisons


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the narrowest interval between two values, equally far from both ends of their order,
    that covers the median with :data:`CONFIDENCE`; None if no interval does.

    We use the sign test, because it assumes nothing about the distribution of the values.
    """
    n, ordered = len(values), sorted(values)
    if n < LEAST_PAIRS:
        return None
    left = 0
    while 1 - 2 * sum(comb(n, i) for i in range(left + 2)) / 2**n >= CONFIDENCE:
        left += 1
    return ordered[left], ordered[n - 1 - left]


def is_better_if_less(measure: Measure) -> bool | None:
    """Return whether a smaller value is better; None if neither the row's ``unit`` nor the name of
    the measure tells."""
    unit = dict(measure.row).get("unit")
    if unit is not None:
        return _MORE_IS_BETTER_UNIT.search(unit) is None
    if _MORE_IS_BETTER.search(measure.name):
        return False
    return True if _LESS_IS_BETTER.search(measure.name) else None


def _judge(
    measure: Measure,
    pairs: Sequence[tuple[float, float]],
    ratio: float,
    interval: tuple[float, float] | None,
    margin: float,
) -> Verdict:
    less_is_better = is_better_if_less(measure)
    if all(old == new for old, new in pairs):
        return "equal"
    if less_is_better is None:
        return "changed"
    if interval is None:
        return "unclear"
    low, high = interval
    if low > 1 and ratio > 1 + margin:
        return "slower" if less_is_better else "faster"
    if high < 1 and ratio < 1 - margin:
        return "faster" if less_is_better else "slower"
    return "same" if 1 - margin <= low and high <= 1 + margin else "unclear"


def _collect_measures(run: Run, constant: frozenset[tuple[int, str]]) -> dict[Measure, float]:
    measures: dict[Measure, float] = {}
    seen: dict[tuple[tuple[str, Any], ...], int] = {}
    for place, row in enumerate(run):
        names = {
            name
            for name, value in row.items()
            if isinstance(value, (str, bool))
            or (isinstance(value, int) and (place, name) in constant)
        }
        key = tuple((name, value) for name, value in row.items() if name in names)
        occurrence = seen.get(key, 0)
        seen[key] = occurrence + 1
        for name, value in row.items():
            if name not in names and isinstance(value, (int, float)):
                measures[Measure(key, occurrence, name)] = float(value)
    return measures


def _constant_integers(runs: Sequence[Run]) -> frozenset[tuple[int, str]]:
    """Find the places and names of integers that are the same in all runs."""
    first, *others = runs
    return frozenset(
        (place, name)
        for place, row in enumerate(first)
        for name, value in row.items()
        if type(value) is int
        and all(place < len(run) and run[place].get(name) == value for run in others)
    )
