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

    from pd.scheduling.request import Request
    from pd.scheduling.step import Work

    FloatArray = npt.NDArray[np.float64]

# The latest steps, this many, make up half of the weight of a fit.
_HALF_LIFE = 500
_DECAY = 0.5 ** (1 / _HALF_LIFE)
# Weight of the last fit in the next one, in steps. It keeps coefficients not determined by recent
# steps.
_ANCHOR = 5.0
# A first fit cannot distinguish some coefficients. A coefficient with a smaller anchor gets more of
# the time: first ``base``, then ``mixed``.
_FIRST_ANCHORS = (1e-6, 1e-5, *[1e-3] * (len(COEFFICIENTS) - 2))
# We clip a step that took this many times more or less than recent ones, relative to its
# prediction, because it compiled a kernel or the process had no CPU.
_OUTLIER = 3.0
_RECENT = 15
# We ignore steps outside these limits.
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 1e3
# We fit again after this many steps, or when the errors of the predictions add up to this sum.
_REFIT = 64
_REFIT_ERRORS = 8.0
# If most recent steps took this many times more or less than predicted, we reduce the weight of all
# earlier observations.
_WRONG = 1.5
_KEPT = 0.25
# A feature whose weight has decayed below this counts as never observed.
_STALE = 1e-100


def step_shape(works: Sequence[Work], *, planned: bool = False) -> StepShape:
    """Return the shape of a step.

    Args:
        planned: whether the step is not launched yet, so we count its possible drafts.
    """
    tokens = streams = context = 0
    pairs = 0.0
    for work in works:
        count = work.stop - work.start
        if work.sequence.is_decoding:
            streams += count + (work.max_drafted if planned else work.num_drafted)
            context += work.stop
        else:
            tokens += count
            pairs += chunk_pairs(work.start, count)
    return StepShape(tokens, pairs, streams, context)


def add_answers(shape: StepShape, requests: Iterable[Request]) -> StepShape:
    """Return the shape of a step extended by the answers of these requests."""
    for request in requests:
        if request.params.max_tokens > 1:
            count = request.params.n
            context = shape.context + count * len(request.prompt)
            shape = shape._replace(streams=shape.streams + count, context=context)
    return shape


class CostModel:
    """Fits :class:`pd.core.step_cost.StepCost` to the steps of this node.

    We minimize the squares of relative errors with coefficients that are not negative. Older steps
    count less and less. The caller holds the node's lock, but you may read :attr:`cost` any time.

    Args:
        graphs: see :class:`~pd.core.step_cost.StepCost`.

    Attributes:
        cost: the current fit.
        num_observed: number of observed steps.
    """

    def __init__(self, graphs: int = 0) -> None:
        count = len(COEFFICIENTS)
        self.cost = StepCost(graphs=graphs)
        self.num_observed = 0
        self._matrix: FloatArray = np.zeros((count, count))
        self._target: FloatArray = np.zeros(count)
        # Recent times of steps as multiples of their predictions.
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._errors = 0.0

    def observe_step(self, shape: StepShape, seconds: float) -> float:
        """Correct the fit by a computed step.

        Returns:
            The relative error of the prediction: 0.5 if the step took half as long again.
        """
        predicted = self.cost.predict_seconds(shape)
        error = seconds / predicted - 1 if predicted > 0 else 0.0
        self.num_observed += 1
        if _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            self._add_step(shape, seconds, predicted)
        self._errors += min(abs(error), 1.0)
        if self.num_observed % _REFIT == 0 or self._errors >= _REFIT_ERRORS:
            if self._is_wrong:
                self._matrix *= _KEPT
                self._target *= _KEPT
                self._recent.clear()
            self.fit()
        return error

    @property
    def _is_wrong(self) -> bool:
        """Whether most recent steps took far longer than predicted, or far less."""
        is_known = len(self._recent) > _RECENT // 2
        return is_known and not 1 / _WRONG < median(self._recent) < _WRONG

    def add_measurement(self, shape: StepShape, seconds: float, weight: int) -> None:
        """Add a step measured while nothing else ran. It counts as ``weight`` steps."""
        row = np.array(self.cost.compute_features(shape)) / seconds
        self._matrix += weight * np.outer(row, row)
        self._target += weight * row
        self.num_observed += weight

    def _add_step(self, shape: StepShape, seconds: float, predicted: float) -> None:
        scale = seconds
        if predicted > 0:
            self._recent.append(seconds / predicted)
            usual = predicted * median(self._recent)
            seconds = min(max(seconds, usual / _OUTLIER), usual * _OUTLIER)
            # A step may seem short because the host was late to see the end of the one before. It
            # must not weigh more than others.
            scale = max(seconds, usual)
        row = np.array(self.cost.compute_features(shape)) / scale
        self._matrix = _DECAY * self._matrix + np.outer(row, row)
        self._target = _DECAY * self._target + row * (seconds / scale)

    def fit(self, *, first: bool = False) -> None:
        """Compute :attr:`cost` from all observations.

        Args:
            first: whether there is no earlier fit worth keeping.
        """
        self._errors = 0.0
        weight = np.diag(self._matrix).copy()
        stale = (weight > 0) & (weight < _STALE)
        weight[stale] = self._matrix[stale] = self._matrix[:, stale] = self._target[stale] = 0.0
        # We scale coefficients so that all of them matter alike.
        units = np.sqrt(np.where(weight > 0, weight, 1.0))
        if first:
            anchor = np.array(_FIRST_ANCHORS)
            before = np.zeros(len(units))
        else:
            anchor = np.full(len(units), _ANCHOR / max(1.0, self._weight))
            before = np.array(self.cost.coefficients) * units
        # A coefficient without observations keeps its value.
        matrix = self._matrix / np.outer(units, units) + np.diag(anchor + (weight <= 0))
        target = self._target / units + (anchor + (weight <= 0)) * before
        coefficients = _solve_least_squares(matrix, target) / units
        fitted = dict(zip(COEFFICIENTS, np.minimum(coefficients, 1e3).tolist(), strict=True))
        self.cost = msgspec.structs.replace(self.cost, **fitted)

    @property
    def _weight(self) -> float:
        """Number of steps in the fit, by weight."""
        steps = min(self.num_observed, 10 * _HALF_LIFE)
        return float((1 - _DECAY**steps) / (1 - _DECAY))


def _solve_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Minimize ``x·matrix·x / 2 - target·x`` over ``x`` without negative entries.

    We use the active set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter
    23) with normal equations.

    Args:
        matrix: positive definite ``[n, n]``.
        target: ``[n]``.
    """
    count = len(target)
    solution = np.zeros(count)
    free = np.zeros(count, np.bool_)
    # One tolerance for each coordinate, because some were hardly observed lately.
    tolerance = 1e-9 * np.abs(target)
    for _ in range(3 * count):
        gradient = target - matrix @ solution
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
                solution = wanted
                break
            # Go towards the solution until the first entry would become negative.
            ratios = np.where(below, solution / np.where(below, solution - wanted, 1.0), np.inf)
            step = ratios.min()
            solution = solution + step * (wanted - solution)
            free &= ratios > step
            solution[~free] = 0.0
    return solution
