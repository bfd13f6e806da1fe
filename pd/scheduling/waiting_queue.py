"""Requests waiting for prefill, and their order."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.scheduling.due_order import POLICIES_BY_DUE, DueOrder, Pace
from pd.scheduling.policy import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.core.step_cost import StepShape
    from pd.radix import RadixCache
    from pd.scheduling.cost_model import CostModel
    from pd.scheduling.request import Request

    IntArray = npt.NDArray[np.int32]

# A policy orders only this many of the oldest requests, so the cost of a step stays bounded.
WINDOW = 128


class WaitingQueue:
    """Holds waiting requests, oldest first.

    Greedy policies starve requests, because others may overtake a request that shares nothing
    forever. So each request counts the younger ones admitted before it, and goes first at
    ``max_overtakes``. A request may be overtaken more often while it follows a leader, or lacks
    memory of a decode node, because both waits end by themselves.

    Args:
        by_due: orders the requests if any has an objective for its first token. If None, the policy
            orders them anyway.
        pace: the pace of prompts, from which ``by_due`` predicts.
        caches_prefixes: whether a computed prefix serves later prompts.
    """

    def __init__(
        self,
        policy: str,
        radix: RadixCache,
        max_overtakes: int,
        by_due: DueOrder | None = None,
        pace: Pace | None = None,
        *,
        caches_prefixes: bool = True,
    ) -> None:
        if policy not in POLICIES:
            raise UsageError(
                f"--schedule-policy must be one of {', '.join(POLICIES)}, not {policy}"
            )
        self._policy = POLICIES[policy]
        self._radix = radix
        self._caches_prefixes = caches_prefixes
        self._max_overtakes = max_overtakes
        self._by_due = by_due if policy in POLICIES_BY_DUE else None
        self._pace = pace
        # A dict keeps the order, and removes in constant time.
        self._requests: dict[bytes, Request] = {}

    @classmethod
    def from_config(
        cls, config: NodeConfig, radix: RadixCache, costs: CostModel | None = None
    ) -> WaitingQueue:
        """Make the queue for a node's configuration. Elastic nodes pass ``costs``."""
        by_due = pace = None
        if costs is not None:
            pace = Pace(config.chunked_prefill_size)
            by_due = DueOrder.from_costs(costs, radix, pace, WINDOW)
        return cls(
            config.schedule_policy,
            radix,
            config.max_overtakes,
            by_due,
            pace,
            caches_prefixes=config.radix_cache == "on",
        )

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.room in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add_request(self, request: Request) -> None:
        """Append a new request."""
        self._requests[request.room] = request

    def put_back(self, request: Request) -> None:
        """Put a request back in front after it was admitted before."""
        self._requests = {request.room: request} | self._requests

    def is_overdue(self, request: Request) -> bool:
        """Return whether no other request may overtake this one any more."""
        return request.progress.num_overtakes >= self._max_overtakes

    def remove_request(self, request: Request) -> None:
        """Remove a request if it waits."""
        self._requests.pop(request.room, None)

    def admit_request(self, request: Request) -> None:
        """Remove a request because it runs now, and count it as overtaking the older ones."""
        for other in self:
            if other is request:
                break
            other.progress.num_overtakes += 1
        if self._by_due is not None:
            self._by_due.note_admission(request)
        del self._requests[request.room]

    def iter_candidates(self) -> Iterator[Request]:
        """Iterate over all requests in order of admission.

        If any request has an objective, objectives decide. Otherwise overdue requests come first,
        then the window in the policy's order, then the others by age. Requests becoming overdue
        during the iteration move to the front.
        """
        requests = list(self)
        window = requests[:WINDOW]
        overdue: list[Request] = []
        named: set[Request] = set()
        left = -1
        for preferred in self._order_requests(requests):
            if len(self) != left:  # a request was admitted, and so others were overtaken
                left, overdue = len(self), [r for r in window if self.is_overdue(r)]
            for request in (*overdue, preferred):
                if request not in named:
                    named.add(request)
                    yield request

    def _order_requests(self, requests: list[Request]) -> Iterable[Request]:
        if self._by_due is not None and any(request.ttft for request in requests):
            return self._by_due(requests)
        return chain(self._policy(requests[:WINDOW], self._radix), requests[WINDOW:])

    def note_pace(self, tokens: int, beside: StepShape) -> None:
        """Note how many prompt tokens a step computes, and with which answers."""
        if self._pace is not None:
            self._pace.tokens, self._pace.beside = tokens, beside

    def will_be_late(self, request: Request, left: int) -> bool:
        """See :meth:`pd.scheduling.due_order.DueOrder.will_be_late`. False without objectives."""
        return self._by_due is not None and self._by_due.will_be_late(request, left)

    def should_follow(self, request: Request, leaders: Iterable[Request]) -> bool:
        """Return whether a running request computes a prefix of this one that is not cached yet.

        If the request waits, we compute the shared part once. We check this anew for each step, so
        a follower continues however its leader ends.
        """
        if not self._caches_prefixes:
            return False
        page_size = self._radix.page_size
        cached = -1
        for leader in leaders:
            if leader.namespace != request.namespace:
                continue
            reusable = request.prompt[: count_reusable(request)]
            shared = count_common_prefix(reusable, leader.prompt) // page_size * page_size
            if shared == 0:
                continue
            if cached < 0:
                cached = self._radix.count_cached(request.prompt, request.namespace)
            if shared > cached:
                return True
        return False


def count_reusable(request: Request) -> int:
    """Count the leading tokens of a prompt that may come from the cache.

    We always compute the last token, because its logits give token 1, and all tokens whose logits
    give a prompt log probability.
    """
    limit = len(request.prompt) - 1
    start = request.params.prompt_logprobs_start
    return limit if start is None else min(limit, max(start - 1, 0))


def count_common_prefix(a: IntArray, b: IntArray) -> int:
    """Return the length of the longest common prefix of two int32 arrays."""
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
