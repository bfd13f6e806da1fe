"""Fits the time of a node's steps while it runs."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pd.core.step_cost import COEFFICIENTS, StepCost, StepShape, chunk_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from pd.core.request import Request
    from pd.scheduling.step import Work

    FloatArray = npt.NDArray[np.float64]

# Steps of which half of the weight of a fit consists.
_HALF_LIFE = 500
_DECAY = 0.5 ** (1 / _HALF_LIFE)
# Weight of the last fit in the next one, in steps: what the last steps do not tell stays.
_ANCHOR = 5.0
# A first fit cannot tell some coefficients apart. The smaller its anchor, the more of the time a
# coefficient gets: first ``base``, then ``mixed``.
_FIRST_ANCHORS = (1e-6, 1e-5, *[1e-3] * (len(COEFFICIENTS) - 2))
# A step that took so many times as long as the last ones, by their predictions, or so many times
# less, counts as that many times: it compiled a kernel, or the process got no CPU.
_OUTLIER = 3.0
_RECENT = 15
# Steps that seem to take less or more are no measurements.
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 1e3
# A fit is made again after so many steps, or when the errors of the predictions add up to so much.
_REFIT = 64
_REFIT_ERRORS = 8.0
# If most of the last steps took so many times as long as predicted, or so many times less, what was
# observed before counts for a part of itself from then on.
_WRONG = 1.5
_KEPT = 0.25
# A feature of which so little is left of the weight that it had counts as never observed.
_STALE = 1e-100


def shape_of(works: Sequence[Work], *, planned: bool = False) -> StepShape:
    """The shape of a step.

    Args:
        planned: it was not launched, and may get the drafts that its works may have.
    """
    tokens = streams = context = 0
    pairs = 0.0
    for work in works:
        count = work.stop - work.start
        if work.sequence.decodes:
            streams += count + (work.most_drafted if planned else work.num_drafted)
            context += work.stop
        else:
            tokens += count
            pairs += chunk_pairs(work.start, count)
    return StepShape(tokens, pairs, streams, context)


def with_answers(shape: StepShape, requests: Iterable[Request]) -> StepShape:
    """A step that also continues the answers of these requests, whose prompts it attends to."""
    for request in requests:
        if request.params.max_tokens > 1:
            count = request.params.n
            context = shape.context + count * len(request.prompt)
            shape = shape._replace(streams=shape.streams + count, context=context)
    return shape


class CostModel:
    """A fit of :class:`pd.core.step_cost.StepCost` to the steps of this node.

    Least squares of relative errors, in which older steps count less and less, with coefficients
    that are not negative. The caller holds the node's lock, except for :attr:`cost`, which may be
    read at any time.

    Args:
        graphs: see :class:`~pd.core.step_cost.StepCost`.

    Attributes:
        cost: the present fit.
        observed: number of steps that were observed.
    """

    def __init__(self, graphs: int = 0) -> None:
        count = len(COEFFICIENTS)
        self.cost = StepCost(graphs=graphs)
        self.observed = 0
        self._matrix: FloatArray = np.zeros((count, count))
        self._target: FloatArray = np.zeros(count)
        # By how much the last steps took longer than predicted, as factors.
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._errors = 0.0

    def observe(self, shape: StepShape, seconds: float) -> float:
        """Correct the fit by a step that was computed.

        Returns:
            The relative error of the prediction: 0.5 where the step took half as long again.
        """
        predicted = self.cost.seconds(shape)
        error = seconds / predicted - 1 if predicted > 0 else 0.0
        self.observed += 1
        if _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            self._take(shape, seconds, predicted)
        self._errors += min(abs(error), 1.0)
        if self.observed % _REFIT == 0 or self._errors >= _REFIT_ERRORS:
            if self._is_wrong:
                self._matrix *= _KEPT
                self._target *= _KEPT
                self._recent.clear()
            self.fit()
        return error

    @property
    def _is_wrong(self) -> bool:
        """Whether most of the last steps took far longer than predicted, or far less."""
        is_known = len(self._recent) > _RECENT // 2
        return is_known and not 1 / _WRONG < median(self._recent) < _WRONG

    def measured(self, shape: StepShape, seconds: float, weight: int) -> None:
        """Take a step as true that was measured while nothing else ran, as ``weight`` of those that
        :meth:`observe` sees."""
        row = np.array(self.cost.features(shape)) / seconds
        self._matrix += weight * np.outer(row, row)
        self._target += weight * row
        self.observed += weight

    def _take(self, shape: StepShape, seconds: float, predicted: float) -> None:
        scale = seconds
        if predicted > 0:
            self._recent.append(seconds / predicted)
            usual = predicted * median(self._recent)
            seconds = min(max(seconds, usual / _OUTLIER), usual * _OUTLIER)
            # NOTE: a step that seemed short, because the host looked late for the one before, must
            # not weigh more than others.
            scale = max(seconds, usual)
        row = np.array(self.cost.features(shape)) / scale
        self._matrix = _DECAY * self._matrix + np.outer(row, row)
        self._target = _DECAY * self._target + row * (seconds / scale)

    def fit(self, *, first: bool = False) -> None:
        """Compute :attr:`cost` anew from what was observed.

        Args:
            first: there is no earlier fit that is worth keeping.
        """
        self._errors = 0.0
        weight = np.diag(self._matrix).copy()
        stale = (weight > 0) & (weight < _STALE)
        weight[stale] = self._matrix[stale] = self._matrix[:, stale] = self._target[stale] = 0.0
        # Each coefficient in units in which it matters as much as any other.
        units = np.sqrt(np.where(weight > 0, weight, 1.0))
        if first:
            anchor = np.array(_FIRST_ANCHORS)
            before = np.zeros(len(units))
        else:
            anchor = np.full(len(units), _ANCHOR / max(1.0, self._weight))
            before = np.array(self.cost.coefficients) * units
        # What was never observed keeps its value.
        matrix = self._matrix / np.outer(units, units) + np.diag(anchor + (weight <= 0))
        target = self._target / units + (anchor + (weight <= 0)) * before
        found = _least_squares(matrix, target) / units
        fitted = dict(zip(COEFFICIENTS, np.minimum(found, 1e3).tolist(), strict=True))
        self.cost = msgspec.structs.replace(self.cost, **fitted)

    @property
    def _weight(self) -> float:
        """Steps that the fit consists of."""
        steps = min(self.observed, 10 * _HALF_LIFE)
        return float((1 - _DECAY**steps) / (1 - _DECAY))


def _least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The ``x`` without negative entries for which ``x·matrix·x / 2 - target·x`` is least.

    The active set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23),
    from normal equations.

    Args:
        matrix: positive definite ``[n, n]``.
        target: ``[n]``.
    """
    count = len(target)
    found = np.zeros(count)
    free = np.zeros(count, np.bool_)
    # NOTE: of each coordinate its own, since some were hardly observed lately.
    tolerance = 1e-9 * np.abs(target)
    for _ in range(3 * count):
        gradient = target - matrix @ found
        gradient = np.where(free | (gradient <= tolerance), 0.0, gradient)
        best = int(gradient.argmax())
        if gradient[best] <= 0:
            break
        free[best] = True
        while True:
            wanted = np.zeros(count)
            wanted[free] = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
            below = free & (wanted <= 0)
            if not below.any():
                found = wanted
                break
            # Go towards the solution until the first entry would become negative.
            ratios = np.where(below, found / np.where(below, found - wanted, 1.0), np.inf)
            step = ratios.min()
            found = found + step * (wanted - found)
            free &= ratios > step
            found[~free] = 0.0
    return found
