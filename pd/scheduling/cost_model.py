"""Fits the time of a node's steps while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.core.step_cost import StepCost, StepShape, chunk_pairs, features

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.scheduling.step import Work

    FloatArray = npt.NDArray[np.float64]

# Steps of which half of the weight of a fit consists.
_HALF_LIFE = 500
_DECAY = 0.5 ** (1 / _HALF_LIFE)
# Weight of the last fit in the next one, in steps: what the last steps do not tell stays.
_ANCHOR = 5.0
# A step that took this many times as long as predicted, or more, counts as this many times: it
# compiled a kernel, or the process got no CPU.
_OUTLIER = 3.0
# Steps that seem to take less or more are no measurements.
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 1e3
# Steps after which a fit is made again.
_REFIT = 64
_SWEEPS = 40


def shape_of(works: Sequence[Work]) -> StepShape:
    """The shape of a planned step."""
    tokens = streams = context = 0
    pairs = 0.0
    for work in works:
        count = work.stop - work.start
        if work.sequence.decodes:
            streams += count + work.num_drafted
            context += work.stop
        else:
            tokens += count
            pairs += chunk_pairs(work.start, count)
    return StepShape(tokens, pairs, streams, context)


class CostModel:
    """A fit of :class:`pd.core.step_cost.StepCost` to the steps of this node.

    Least squares of relative errors, in which older steps count less and less, with coefficients
    that are not negative (coordinate descent, as by Franc, Hlaváč and Navara, 2005). The caller
    holds the node's lock, except for :attr:`cost`, which may be read at any time.

    Attributes:
        cost: the present fit.
        observed: number of steps that were observed.
    """

    def __init__(self) -> None:
        count = len(StepCost.__struct_fields__)
        self.cost = StepCost()
        self.observed = 0
        self._matrix: FloatArray = np.zeros((count, count))
        self._target: FloatArray = np.zeros(count)

    def observe(self, shape: StepShape, seconds: float) -> float:
        """Correct the fit by a step that was computed.

        Returns:
            The relative error of the prediction: 0.5 where the step took half as long again.
        """
        predicted = self.cost.seconds(shape)
        error = seconds / predicted - 1 if predicted > 0 else 0.0
        taken = min(seconds, _OUTLIER * predicted) if predicted > 0 else seconds
        if _LEAST_SECONDS <= taken <= _MOST_SECONDS:
            row = np.array(features(shape)) / taken
            self._matrix = _DECAY * self._matrix + np.outer(row, row)
            self._target = _DECAY * self._target + row
        self.observed += 1
        if self.observed % _REFIT == 0:
            self.fit()
        return error

    def fit(self) -> None:
        """Compute :attr:`cost` anew from what was observed."""
        found = np.array(self.cost.coefficients)
        scale = np.diag(self._matrix)
        anchor = _ANCHOR * scale / max(1.0, self._weight) + 1e-30
        matrix = self._matrix + np.diag(anchor)
        target = self._target + anchor * found
        for _ in range(_SWEEPS):
            for index in range(len(found)):
                gradient = matrix[index] @ found - target[index]
                found[index] = max(0.0, found[index] - gradient / matrix[index, index])
        self.cost = StepCost(*np.minimum(found, 1e3).tolist())

    @property
    def _weight(self) -> float:
        """Steps that the fit consists of."""
        steps = min(self.observed, 10 * _HALF_LIFE)
        return float((1 - _DECAY**steps) / (1 - _DECAY))
