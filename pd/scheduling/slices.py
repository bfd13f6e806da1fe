"""Number of prompt tokens that a step computes beside answers, so that these keep their pace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd.core.step_cost import LEAST_SLICE, StepShape, slice_tokens

if TYPE_CHECKING:
    from pd.scheduling.cost_model import CostModel

logger = logging.getLogger(__name__)

# Without an objective, answers may take so many times as long as a step of a common batch: streams
# stay several times faster than anybody reads, and most of a step is left for prompts.
_DEFAULT_FACTOR = 3.0
_COMMON_STREAMS, _COMMON_CONTEXT = 32, 2048
# Where an answer may come that nothing is known of yet, a step takes so many times the objective.
_AWAITING_FACTOR = 2.0
# Token 2 of an answer that comes from another node waits for the step under way, and then for one
# of its own: these take so much of the objective each.
_JOINING_SHARE = 0.5
# After so many such short steps in a row, one is as long as others, so that prompts get on where
# answers come all the time.
_MOST_SHORTENED = 4
# Seconds by which an answer may come earlier or later than predicted.
_EARLY_SECONDS, LATE_SECONDS = 0.015, 0.03


class PromptSlices:
    """Chooses the budget of prompt tokens of each step. The caller holds the node's lock.

    Args:
        most: tokens of a step (``--chunked-prefill-size``).
        pool_tokens: tokens that the pool holds.

    Attributes:
        wanted: seconds between tokens that a proxy asked for; 0 if none did.
    """

    def __init__(self, costs: CostModel, most: int, pool_tokens: int) -> None:
        self._costs, self._most = costs, most
        context = min(_COMMON_STREAMS * _COMMON_CONTEXT, pool_tokens)
        common = StepShape(streams=_COMMON_STREAMS, context=context)
        # NOTE: of the speeds measured at the start, so that it does not follow the load.
        self._default = max(1e-4, _DEFAULT_FACTOR * costs.cost.seconds(common))
        self.wanted = 0.0
        self._shortened = 0
        logger.info("without an objective, answers keep %.1f ms a token", 1e3 * self._default)

    @property
    def itl(self) -> float:
        """Seconds between tokens of an answer that a step with prompt tokens keeps."""
        return self.wanted or self._default

    @property
    def horizon(self) -> float:
        """Seconds within which an answer has to be expected to matter for the next step."""
        return _AWAITING_FACTOR * self.itl + _EARLY_SECONDS

    @property
    def next_step(self) -> float:
        """Seconds from now within which an answer would come during the next step."""
        return self.itl + _EARLY_SECONDS

    def usual(self, decoding: StepShape, start: int, queued: int | None) -> int:
        """Prompt tokens of steps beside these answers. For the arguments see :meth:`tokens`."""
        return slice_tokens(self._costs.cost, self.itl, decoding, start, self._most, queued)

    def tokens(
        self,
        decoding: StepShape,
        start: int = 0,
        *,
        queued: int | None = None,
        awaits: bool = False,
        joins: bool = False,
    ) -> int:
        """Prompt tokens of the next step.

        Args:
            decoding: the answers that it continues.
            start: position of the first prompt token.
            queued: see :func:`slice_tokens`.
            awaits: whether answers may come from other nodes at any moment.
            joins: whether an answer is expected in this step, or continues here for the first time.
        """
        cost, least = self._costs.cost, min(LEAST_SLICE, self._most)
        usual = self.usual(decoding, start, queued)
        if joins and self._shortened < _MOST_SHORTENED:
            self._shortened += 1
            shorter = cost.largest_chunk(_JOINING_SHARE * self.itl, start, decoding, usual)
            return max(least, shorter)
        self._shortened = 0
        if awaits and not decoding.streams:
            limit = _AWAITING_FACTOR * self.itl
            return max(least, cost.largest_chunk(limit, start, decoding, self._most))
        return usual
