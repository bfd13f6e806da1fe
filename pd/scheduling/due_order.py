"""Orders waiting prompts so that as many as possible meet their objective for token 1."""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from pd.core.step_cost import StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd.radix import RadixCache
    from pd.scheduling.cost_model import CostModel
    from pd.scheduling.request import Request

# Policies that yield to objectives. The others order by explicit wishes of a user.
POLICIES_BY_DUE = ("lpm", "fcfs")
# We may pass over a prompt until it has waited for this many times its patience.
_PATIENCE_FACTOR = 2
# So many prompts per step are chosen by their cached prefix. Later ones seldom fit into the step.
_MOST_BY_PREFIX = 8


@dataclass(slots=True)
class Pace:
    """The current pace of prompts.

    Attributes:
        tokens: prompt tokens of a step, initially ``--chunked-prefill-size``.
        beside: shape of the answers in the same step.
    """

    tokens: int
    beside: StepShape = field(default_factory=StepShape)


class Prospect(NamedTuple):
    """A prompt that may still be in time.

    Attributes:
        due: when its first token is due.
        seconds: predicted time to compute it.
        cached: number of its leading tokens that are cached.
    """

    due: float
    seconds: float
    request: Request
    cached: int = 0


class DueOrder:
    """Orders prompts so that as many as possible are in time. The caller holds the node's lock.

    Prompts that can be in time come first. Where any order has them all in time, those with the
    longest cached prefix go first, so it is used before it is evicted; otherwise those that are due
    first. Late prompts follow, shortest first, because they then delay others least.

    Any number of younger prompts may go before a prompt, but not forever: after twice its patience
    it is owed its turn. Owed prompts and those that can be in time take turns, because a queue of
    owed prompts alone would make all others late as well. Prompts admitted before go first. A
    prompt without an objective counts as due right away.

    Args:
        predict_seconds: predicts the time to compute a request's prompt from a given token on.
        count_cached: returns the number of cached leading tokens of a waiting prompt.
        get_patience: returns the usual seconds until token 1. We use it instead of a shorter
            objective, because otherwise long prompts with short objectives would soon go before all
            others.
        window: maximum number of prompts to predict, so the cost of a step stays bounded.
    """

    def __init__(
        self,
        predict_seconds: Callable[[Request, int], float],
        count_cached: Callable[[Request], int],
        get_patience: Callable[[Request], float],
        window: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._predict_seconds, self._count_cached = predict_seconds, count_cached
        self._get_patience = get_patience
        self._window, self._clock = window, clock
        self._is_turn_of_owed = True

    @classmethod
    def from_costs(cls, costs: CostModel, radix: RadixCache, pace: Pace, window: int) -> DueOrder:
        """Make an order from a node's cost model."""
        chunk = pace.tokens

        def predict_seconds(request: Request, start: int) -> float:
            left = len(request.prompt) - start
            return costs.cost.prefill_seconds(start, left, pace.tokens, pace.beside)

        def count_cached(request: Request) -> int:
            return min(
                radix.count_cached(request.prompt, request.namespace), len(request.prompt) - 1
            )

        def get_patience(request: Request) -> float:
            return costs.cost.usual_ttft(len(request.prompt), chunk)

        return cls(predict_seconds, count_cached, get_patience, window)

    def __call__(self, waiting: Sequence[Request]) -> list[Request]:
        """Return the requests in order of preference. ``waiting`` has the oldest first."""
        now = self._clock()
        begun: list[Request] = []
        others: list[Request] = []
        for request in waiting:
            (others if request.times.admitted is None else begun).append(request)
        owed: list[tuple[int, float, Request]] = []
        prospects: list[Prospect] = []
        for request in others[: self._window]:
            cached = self._count_cached(request)
            if self._is_owed(request, now):
                owed.append((-cached, request.due_at, request))
                continue
            seconds = self._predict_seconds(request, cached)
            due = request.due_at if request.ttft else now + seconds
            prospects.append(Prospect(due, seconds, request, cached))
        timely, late = split_timely(prospects, now)
        turns = [
            [request for _, _, request in sorted(owed, key=lambda each: each[:2])],
            [prospect.request for prospect in prefer_cached(timely, now, _MOST_BY_PREFIX)],
        ]
        if not self._is_turn_of_owed:
            turns.reverse()
        in_turn = (each for pair in zip_longest(*turns) for each in pair if each is not None)
        ordered = [prospect.request for prospect in late]
        return [*begun, *in_turn, *ordered, *others[self._window :]]

    def note_admission(self, request: Request) -> None:
        """Note whose turn is next. Call this when a waiting request is admitted."""
        if request.times.admitted is None:
            self._is_turn_of_owed = not self._is_owed(request, self._clock())

    def will_be_late(self, request: Request, left: int) -> bool:
        """Return whether a request with ``left`` prompt tokens will be late even if it goes first.

        False if it has waited so long that it goes first anyway.
        """
        now = self._clock()
        if not request.ttft or self._is_owed(request, now):
            return False
        return now + self._predict_seconds(request, len(request.prompt) - left) > request.due_at

    def _is_owed(self, request: Request, now: float) -> bool:
        if not request.ttft or now < request.due_at:
            return False
        arrived = request.due_at - request.ttft
        patience = max(request.ttft, self._get_patience(request))
        return now >= arrived + _PATIENCE_FACTOR * patience


def split_timely(
    prospects: Iterable[Prospect], now: float
) -> tuple[list[Prospect], list[Prospect]]:
    """Split prompts, computed one after the other, so that as many as possible are in time.

    We use the algorithm of Moore and Hodgson (Moore, Management Science 15, 1968): whenever a
    prompt would end too late, give up the longest one so far.

    Returns:
        Timely prompts in the order in which they are due, and late ones, shortest first.
    """
    ordered = sorted(prospects, key=lambda prospect: (prospect.due, prospect.seconds))
    kept: list[tuple[float, int]] = []
    given_up: set[int] = set()
    end = now
    for number, prospect in enumerate(ordered):
        heapq.heappush(kept, (-prospect.seconds, number))
        end += prospect.seconds
        if end > prospect.due:
            seconds, longest = heapq.heappop(kept)
            end += seconds
            given_up.add(longest)
    timely = [prospect for number, prospect in enumerate(ordered) if number not in given_up]
    late = [ordered[number] for number in given_up]
    return timely, sorted(late, key=lambda prospect: (prospect.seconds, prospect.due))


def prefer_cached(timely: Sequence[Prospect], now: float, most: int) -> list[Prospect]:
    """Move up to ``most`` prompts with long cached prefixes forward, as far as all stay in time.

    Args:
        timely: prompts that are all in time if they are computed one after the other.
    """
    left, begin = list(timely), now
    chosen: list[Prospect] = []
    while left and len(chosen) < most:
        best, end, slack = 0, begin, math.inf
        for number, prospect in enumerate(left):
            if prospect.seconds > slack:
                if slack <= 0:
                    break
            elif prospect.cached > left[best].cached:
                best = number
            end += prospect.seconds
            slack = min(slack, prospect.due - end)
        chosen.append(left.pop(best))
        begin += chosen[-1].seconds
    return [*chosen, *left]
