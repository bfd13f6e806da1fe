"""Policies: the order in which waiting requests are looked at.

A policy is a function from the waiting requests, oldest first, to the order of preference. It need
not care about requests that are overtaken again and again:
:class:`pd.scheduling.waiting_queue.WaitingQueue` bounds that.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.core.request import Request
    from pd.radix import RadixCache

    Policy = Callable[[Sequence[Request], RadixCache], list[Request]]


def first_come_first_served(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """fcfs: the order of arrival."""
    return list(waiting)


def longest_prefix_match(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """lpm: most cached tokens first, so that they are used before they are evicted."""
    return sorted(waiting, key=lambda request: -radix.peek(request.prompt, request.namespace))


def longest_output_first(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """lof: most tokens to generate first, so that the decode batch stays full to the end."""
    return sorted(waiting, key=lambda request: -request.params.max_tokens)


def by_priority(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """priority: the highest ``priority`` first."""
    return sorted(waiting, key=lambda request: -request.priority)


def depth_first_weight(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """dfs-weight: depth-first through the radix tree, the branch with most waiting requests first,
    so that requests of one branch run together (the order proven optimal for an offline batch in
    Zheng et al., SGLang, 2024, section 3). A request whose path ends at a node comes after those
    that go deeper: the prefixes that these share are cached, and are used before they are evicted.
    """
    paths = [radix.path(request.prompt, request.namespace) for request in waiting]
    weights = Counter(node for path in paths for node in path)

    def depth_first(index: int) -> list[tuple[int, int]]:
        return [*((-weights[node], node.created) for node in paths[index]), (1, 0)]

    return [waiting[index] for index in sorted(range(len(waiting)), key=depth_first)]


POLICIES: dict[str, Policy] = {
    "lpm": longest_prefix_match,
    "fcfs": first_come_first_served,
    "lof": longest_output_first,
    "dfs-weight": depth_first_weight,
    "priority": by_priority,
}
