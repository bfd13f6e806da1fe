"""Part of a node's recent time that prompts took, and the part that they will take."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.step_cost import StepCost, StepShape

# What was computed so many seconds ago counts for 1/e of what is computed now.
_SECONDS = 10.0


class PromptShare:
    """Counts by how much steps took longer for the prompt tokens in them, and forgets it gradually.
    The caller holds the node's lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at, self._seconds = clock, clock(), 0.0

    def observe(self, cost: StepCost, shape: StepShape) -> None:
        """A step was computed. ``cost``: by which its time is divided between prompts and
        answers."""
        if shape.tokens:
            without = shape._replace(tokens=0, pairs=0.0)
            self._decay()
            self._seconds += max(0.0, cost.seconds(shape) - cost.seconds(without))

    def value(self, queued: float = 0.0) -> float:
        """Between 0 and 1. ``queued``: seconds until the prompts that wait are computed."""
        self._decay()
        return min(1.0, (self._seconds + queued) / _SECONDS)

    def _decay(self) -> None:
        now = self._clock()
        self._seconds *= math.exp((self._at - now) / _SECONDS)
        self._at = now
