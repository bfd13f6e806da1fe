"""The share of a node's time spent on prompts."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.step_cost import StepCost, StepShape

# Work counts 1/e of its time after this many seconds.
_SECONDS = 10.0


class PromptShare:
    """Counts how much longer steps take because of their prompt tokens, and forgets it gradually.

    The caller holds the node's lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at, self._seconds = clock, clock(), 0.0

    def observe_step(self, cost: StepCost, shape: StepShape) -> None:
        """Count a computed step. We divide its time between prompts and answers by ``cost``."""
        if shape.tokens:
            without = shape._replace(tokens=0, pairs=0.0)
            self._decay_seconds()
            self._seconds += max(0.0, cost.predict_seconds(shape) - cost.predict_seconds(without))

    def estimate_share(self, queued: float = 0.0) -> float:
        """Estimate the share of prompts, between 0 and 1.

        Args:
            queued: predicted seconds to compute the waiting prompts.
        """
        self._decay_seconds()
        return min(1.0, (self._seconds + queued) / _SECONDS)

    def _decay_seconds(self) -> None:
        now = self._clock()
        self._seconds *= math.exp((self._at - now) / _SECONDS)
        self._at = now
