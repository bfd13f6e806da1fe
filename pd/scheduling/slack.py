"""Orders waiting prompts by how long each can still wait for its objective."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.step_cost import StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.core.request import Request
    from pd.radix import RadixCache
    from pd.scheduling.cost_model import CostModel

# Policies that give way to objectives. The others order by what a user asked for.
GIVING_WAY = ("lpm", "fcfs")
_ALONE = StepShape()


class SlackOrder:
    """Least slack first: the time until the first token is due, without the time that the rest of
    the prompt is predicted to take.

    Prompts that can still be in time go before those that are late, which would otherwise have all
    behind them be late, too. A late one is passed over for as long again as its objective at most:
    then only those that were due before it go before it. A prompt that was admitted before goes
    first, and one without an objective counts as one that cannot wait.

    Args:
        seconds: predicts the time that the prompt of a request takes alone.
        window: for so many prompts at most this is asked, so that a step's cost stays bounded.
    """

    def __init__(
        self,
        seconds: Callable[[Request], float],
        window: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._window, self._clock = seconds, window, clock

    @classmethod
    def of(cls, costs: CostModel, radix: RadixCache, chunk: int, window: int) -> SlackOrder:
        """An order by a node's cost model. ``chunk``: tokens of a step."""

        def seconds(request: Request) -> float:
            cached = min(radix.peek(request.prompt, request.namespace), len(request.prompt) - 1)
            left = len(request.prompt) - cached
            return costs.cost.prefill_seconds(cached, left, chunk, _ALONE)

        return cls(seconds, window)

    def __call__(self, waiting: Sequence[Request]) -> list[Request]:
        """The order of preference. ``waiting``: oldest first."""
        now = self._clock()
        begun: list[Request] = []
        owed: list[Request] = []
        timely: list[Request] = []
        late: list[Request] = []
        for request in waiting:
            overdue = now - request.due if request.ttft else -1.0
            if request.times.admitted is not None:
                begun.append(request)
            elif overdue < 0:
                timely.append(request)
            elif overdue < request.ttft:
                late.append(request)
            else:
                owed.append(request)
        slacks: list[tuple[float, Request]] = []
        for request in timely[: self._window]:
            slack = request.due - now - self._seconds(request) if request.ttft else 0.0
            if slack < 0:
                late.append(request)
            else:
                slacks.append((slack, request))
        slacks.sort(key=lambda pair: pair[0])
        for requests in (owed, late):
            requests.sort(key=lambda request: request.due)
        ordered = [request for _, request in slacks]
        return [*begun, *owed, *ordered, *timely[self._window :], *late]
