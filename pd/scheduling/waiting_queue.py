"""Requests that wait for prefill: their order, and which should wait for another."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.scheduling.policy import POLICIES
from pd.scheduling.slack import GIVING_WAY, SlackOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.core.request import Request
    from pd.radix import RadixCache
    from pd.scheduling.cost_model import CostModel

    IntArray = npt.NDArray[np.int32]

# A policy orders this many of the oldest requests, so that a step's cost stays bounded.
WINDOW = 128


class WaitingQueue:
    """Waiting requests, oldest first.

    Greedy orders starve: a request that shares nothing may be overtaken for ever. So each request
    counts the younger ones that were admitted before it; at ``max_overtakes`` it goes first. (One
    that follows a leader, or lacks memory that only a decode node can free, may be overtaken more
    often: both end by themselves.)

    Args:
        by_slack: orders the requests if any has an objective for its first token; None has the
            policy order them all the same.
    """

    def __init__(
        self,
        policy: str,
        radix: RadixCache,
        max_overtakes: int,
        by_slack: SlackOrder | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise UsageError(
                f"--schedule-policy must be one of {', '.join(POLICIES)}, not {policy}"
            )
        self._order = POLICIES[policy]
        self._radix = radix
        self._max_overtakes = max_overtakes
        self._by_slack = by_slack if policy in GIVING_WAY else None
        # A dict for its order and its removal in constant time.
        self._requests: dict[bytes, Request] = {}

    @classmethod
    def of(
        cls, config: NodeConfig, radix: RadixCache, costs: CostModel | None = None
    ) -> WaitingQueue:
        """The queue that a node's configuration asks for. ``costs``: of an elastic node."""
        by_slack = None
        if costs is not None:
            by_slack = SlackOrder.of(costs, radix, config.chunked_prefill_size, WINDOW)
        return cls(config.schedule_policy, radix, config.max_overtakes, by_slack)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.room in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Append a request."""
        self._requests[request.room] = request

    def add_first(self, request: Request) -> None:
        """Put back a request that was admitted before."""
        self._requests = {request.room: request} | self._requests

    def is_overdue(self, request: Request) -> bool:
        """Whether no other may overtake the request any more."""
        return request.progress.overtaken >= self._max_overtakes

    def remove(self, request: Request) -> None:
        """Take a request out, if it is in."""
        self._requests.pop(request.room, None)

    def admit(self, request: Request) -> None:
        """Take out a request that runs now; older ones were overtaken."""
        for other in self:
            if other is request:
                break
            other.progress.overtaken += 1
        del self._requests[request.room]

    def candidates(self) -> Iterator[Request]:
        """Each request once, in order of admission: overdue ones, also those that became so since
        the last one was admitted, then the window in the policy's order, then the others by age;
        or all by slack, if any has an objective.
        """
        requests = list(self)
        window = requests[:WINDOW]
        overdue: list[Request] = []
        named: set[Request] = set()
        left = -1
        for preferred in self._ordered(requests):
            if len(self) != left:  # a request was admitted, and so others were overtaken
                left, overdue = len(self), [r for r in window if self.is_overdue(r)]
            for request in (*overdue, preferred):
                if request not in named:
                    named.add(request)
                    yield request

    def _ordered(self, requests: list[Request]) -> Iterable[Request]:
        if self._by_slack is not None and any(request.ttft for request in requests):
            return self._by_slack(requests)
        return chain(self._order(requests[:WINDOW], self._radix), requests[WINDOW:])

    def should_follow(self, request: Request, leaders: Iterable[Request]) -> bool:
        """Whether a running request is computing a prefix of this one that is not cached yet.

        Waiting for it computes the shared part once. No follower is bound to its leader: when the
        leader ends, however it ends, the next look finds it gone.
        """
        page_size = self._radix.page_size
        cached = -1
        for leader in leaders:
            if leader.namespace != request.namespace:
                continue
            reusable = request.prompt[: reusable_tokens(request)]
            shared = common_prefix(reusable, leader.prompt) // page_size * page_size
            if shared == 0:
                continue
            if cached < 0:
                cached = self._radix.peek(request.prompt, request.namespace)
            if shared > cached:
                return True
        return False


def reusable_tokens(request: Request) -> int:
    """Leading tokens of the prompt that may come from the cache. The last one is always computed
    (its logits give token 1), and so is every token whose logits give a wanted prompt log
    probability."""
    limit = len(request.prompt) - 1
    start = request.params.prompt_logprobs_start
    return limit if start is None else min(limit, max(start - 1, 0))


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Length of the longest common prefix of two int32 arrays."""
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
