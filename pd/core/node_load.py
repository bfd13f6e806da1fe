"""Load that a node reports, for proxies that predict how long a request would take there."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from pd.core.step_cost import StepCost, StepShape

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
# A proxy drops a report with more.
MAX_SECONDS = 1e6
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SECONDS)]
_Objective = Annotated[float, msgspec.Meta(gt=0.0, le=MAX_SECONDS)]


class NodeLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load of an elastic node at one moment.

    Attributes:
        cost: how long its steps take.
        itl: seconds between tokens that the node keeps while it computes prompts beside answers.
        queued_tokens: prompt tokens that wait or are computed, without those that are cached.
        queue_seconds: predicted time until these are computed.
        streams: sequences that are generated here, or will be when their prompts are computed.
        answering: those of them that are generated now, or that are predicted to be very soon.
        awaits: whether answers may come from other nodes at any time, so that no step is long.
        context: tokens of the streams.
        free_tokens: tokens whose KV new requests can have room for.
        chunk: tokens of a step (``--chunked-prefill-size``).
        prompt_share: part of the node's recent time that prompts took, and that those which wait
            will take.
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
        """A step of all the streams."""
        return StepShape(streams=self.streams, context=self.context)

    @property
    def beside(self) -> StepShape:
        """A step of the streams that are generated now, beside which prompts are computed."""
        context = self.context * self.answering / max(1, self.streams)
        return StepShape(streams=self.answering, context=context)
