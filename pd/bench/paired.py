"""Whether one of two versions is faster: measures of their result files, paired run by run."""

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

# An interval covers the true median with this probability at least, where there are enough pairs.
CONFIDENCE = 0.9
# Pairs below this number have no such interval.
LEAST_PAIRS = 5
_LESS_IS_BETTER = re.compile(r"(^|_)(s|ms|us|ns|seconds|passes|misses|errors|failed)$")
_MORE_IS_BETTER = re.compile(
    r"(_per_s(_per_gpu)?|_per_second|([gmt]b|flop)_s|throughput|speedup|goodput|acceptance_length"
    r"|hits|(hit|right)_rate|(goodput|cached)_share|share_of_(ceiling|roofline)(_rate)?)$"
)
# Units, in rows that name the unit of their numbers.
_MORE_IS_BETTER_UNIT = re.compile(r"/s$|per second$")


class Measure(NamedTuple):
    """One number of a result file.

    Attributes:
        row: texts, switches and constant integers of its row, which tell what was measured.
        occurrence: number of the row among those alike.
        name: of the number.
    """

    row: tuple[tuple[str, Any], ...]
    occurrence: int
    name: str

    @property
    def label(self) -> str:
        """The row's values, for people."""
        return " ".join(str(value) for _, value in self.row) or "-"


class Comparison(NamedTuple):
    """A measure before and after.

    Attributes:
        before, after: medians.
        ratio: median over pairs of after by before; infinite where something came of nothing.
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
        measures that all runs have, in the order of the first. Counts that never differ are parts
        of rows instead.
    """
    constant = _constant_integers([*before, *after])
    old = [_measures(run, constant) for run in before]
    new = [_measures(run, constant) for run in after]
    common = [m for m in old[0] if all(m in run for run in (*old, *new))]
    return [_compare(m, [r[m] for r in old], [r[m] for r in new], margin) for m in common]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest interval between two of the values, as far from either end, that covers the
    median with :data:`CONFIDENCE`; None if none does.

    By the sign test, which supposes nothing of how the values are distributed.
    """
    n, ordered = len(values), sorted(values)
    if n < LEAST_PAIRS:
        return None
    left = 0
    while 1 - 2 * sum(comb(n, i) for i in range(left + 2)) / 2**n >= CONFIDENCE:
        left += 1
    return ordered[left], ordered[n - 1 - left]


def is_better_if_less(measure: Measure) -> bool | None:
    """Return whether a smaller value is better, by a measure's name or its row's ``unit``; None if
    neither says."""
    unit = dict(measure.row).get("unit")
    if unit is not None:
        return _MORE_IS_BETTER_UNIT.search(unit) is None
    if _MORE_IS_BETTER.search(measure.name):
        return False
    return True if _LESS_IS_BETTER.search(measure.name) else None


def _compare(
    measure: Measure, before: Sequence[float], after: Sequence[float], margin: float
) -> Comparison:
    ratios = [_ratio(old, new) for old, new in zip(before, after, strict=True)]
    ratio, interval = median(ratios), median_interval(ratios)
    low, high = interval or (None, None)
    verdict = _verdict(measure, before, after, ratio, interval, margin)
    return Comparison(
        measure, median(before), median(after), len(before), ratio, low, high, verdict
    )


def _ratio(old: float, new: float) -> float:
    """Ratio of a pair. The sign test asks only which of two ratios is larger."""
    if old:
        return new / old
    return copysign(inf, new) if new else 1.0


def _verdict(
    measure: Measure,
    before: Sequence[float],
    after: Sequence[float],
    ratio: float,
    interval: tuple[float, float] | None,
    margin: float,
) -> Verdict:
    less_is_better = is_better_if_less(measure)
    if list(before) == list(after):
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


def _measures(run: Run, constant: frozenset[tuple[int, str]]) -> dict[Measure, float]:
    found: dict[Measure, float] = {}
    seen: dict[tuple[tuple[str, Any], ...], int] = {}
    for place, row in enumerate(run):
        names = {name for name, value in row.items() if _is_name(value, (place, name) in constant)}
        key = tuple((name, value) for name, value in row.items() if name in names)
        occurrence = seen.get(key, 0)
        seen[key] = occurrence + 1
        for name, value in row.items():
            if name not in names and isinstance(value, (int, float)):
                found[Measure(key, occurrence, name)] = float(value)
    return found


def _is_name(value: object, constant: bool) -> bool:
    return isinstance(value, (str, bool)) or (isinstance(value, int) and constant)


def _constant_integers(runs: Sequence[Run]) -> frozenset[tuple[int, str]]:
    """Places and names of integers that are the same in all runs."""
    first, *others = runs
    return frozenset(
        (place, name)
        for place, row in enumerate(first)
        for name, value in row.items()
        if type(value) is int
        and all(place < len(run) and run[place].get(name) == value for run in others)
    )
