"""Chooses how many prompt tokens a step computes, so answers in the same step keep their pace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd.core.step_cost import LEAST_SLICE, StepShape, slice_tokens

if TYPE_CHECKING:
    from pd.scheduling.cost_model import CostModel

logger = logging.getLogger(__name__)

# Without an objective, a token may take this many times as long as a step of a common batch.
# Streams stay several times faster than anybody reads, and prompts get most of a step.
_DEFAULT_FACTOR = 3.0
_COMMON_STREAMS, _COMMON_CONTEXT = 32, 2048
# If an answer may arrive at any moment, a step may take this many times the objective.
_AWAITING_FACTOR = 2.0
# Token 2 of an answer from another node waits for the launched step and then for its own. Each of
# them may take this share of the objective.
_JOINING_SHARE = 0.5
# After this many short steps in a row one has the usual length, because otherwise prompts would
# starve while answers keep arriving.
_MOST_SHORTENED = 4
# Seconds by which an answer may arrive earlier or later than predicted.
_EARLY_SECONDS, LATE_SECONDS = 0.015, 0.03


class PromptSlices:
    """Chooses the budget of prompt tokens of each step. The caller holds the node's lock.

    Args:
        most: maximum tokens of a step (``--chunked-prefill-size``).
        pool_tokens: capacity of the pool in tokens.

    Attributes:
        wanted_itl: objective of the proxies for the seconds between tokens; 0 if there is none.
    """

    def __init__(self, costs: CostModel, most: int, pool_tokens: int) -> None:
        self._costs, self._most = costs, most
        context = min(_COMMON_STREAMS * _COMMON_CONTEXT, pool_tokens)
        common = StepShape(streams=_COMMON_STREAMS, context=context)
        # From the speeds at the start, so it does not follow the load.
        self._default = max(1e-4, _DEFAULT_FACTOR * costs.cost.predict_seconds(common))
        self.wanted_itl = 0.0
        self._shortened = 0
        logger.info("without an objective, answers keep %.1f ms a token", 1e3 * self._default)

    @property
    def itl(self) -> float:
        """Seconds between tokens of an answer, respected by steps with prompt tokens."""
        return self.wanted_itl or self._default

    @property
    def horizon(self) -> float:
        """Seconds from now within which an expected answer matters for the next step."""
        return _AWAITING_FACTOR * self.itl + _EARLY_SECONDS

    @property
    def next_step_horizon(self) -> float:
        """Seconds from now within which an answer would arrive during the next step."""
        return self.itl + _EARLY_SECONDS

    def usual_tokens(self, decoding: StepShape, start: int, queued: int | None) -> int:
        """Return the prompt tokens of an ordinary step; see :meth:`choose_tokens`."""
        return slice_tokens(self._costs.cost, self.itl, decoding, start, self._most, queued)

    def choose_tokens(
        self,
        decoding: StepShape,
        start: int = 0,
        *,
        queued: int | None = None,
        awaits: bool = False,
        joins: bool = False,
    ) -> int:
        """Choose the number of prompt tokens of the next step.

        Args:
            decoding: shape of the answers in the step.
            start: position of the first prompt token.
            queued: see :func:`slice_tokens`.
            awaits: whether answers may arrive from other nodes at any moment.
            joins: whether we expect an answer during this step, or one continues here for the first
                time.
        """
        cost, least = self._costs.cost, min(LEAST_SLICE, self._most)
        usual = self.usual_tokens(decoding, start, queued)
        if joins and self._shortened < _MOST_SHORTENED:
            self._shortened += 1
            shorter = cost.find_largest_chunk(_JOINING_SHARE * self.itl, start, decoding, usual)
            return max(least, shorter)
        self._shortened = 0
        if awaits and not decoding.streams:
            limit = _AWAITING_FACTOR * self.itl
            return max(least, cost.find_largest_chunk(limit, start, decoding, self._most))
        return usual
