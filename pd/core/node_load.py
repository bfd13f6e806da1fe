"""The load of a node. Proxies predict from it how long a request would take there."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from pd.core.step_cost import StepCost, StepShape

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
# A proxy drops a report with a larger value.
MAX_SECONDS = 1e6
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SECONDS)]
_Objective = Annotated[float, msgspec.Meta(gt=0.0, le=MAX_SECONDS)]


class NodeLoad(msgspec.Struct, frozen=True):
    """Load of an elastic node at one moment.

    Attributes:
        cost: how long its steps take.
        itl: objective for the seconds between tokens while the node also prefills.
        queued_tokens: uncached prompt tokens waiting or being computed.
        queue_seconds: predicted time until these are computed.
        streams: sequences decoding here, now or after their prefill.
        answering: number of ``streams`` decoding now or, as predicted, very soon.
        awaits: whether other nodes may hand off requests at any time, so no step may be long.
        context: tokens held by all streams.
        free_tokens: free tokens of KV for new requests.
        chunk: largest number of tokens in a step (``--chunked-prefill-size``).
        prompt_share: share of the node's time for prompts, recently and for the queued ones.
    """

    cost: StepCost
    itl: _Objective
    queued_tokens: _Count = 0
    queue_seconds: _Seconds = 0.0
    streams: _Count = 0
    answering: _Count = 0
    awaits: bool = False
    context: _Count = 0
    free_tokens: _Count = 0
    chunk: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1
    prompt_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0

    def __post_init__(self) -> None:
        for name in ("itl", "queue_seconds", "prompt_share"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number")

    @property
    def decoding(self) -> StepShape:
        """Shape of a step of all streams."""
        return StepShape(streams=self.streams, context=self.context)

    @property
    def answering_step(self) -> StepShape:
        """Shape of a step of the currently decoding streams, before we add prefill."""
        context = self.context * self.answering / max(1, self.streams)
        return StepShape(streams=self.answering, context=context)
