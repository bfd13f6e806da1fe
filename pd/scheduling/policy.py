"""Policies for the order of waiting requests.

A policy is a function from the waiting requests, oldest first, to an order of preference. Policies
may starve requests, because :class:`pd.scheduling.waiting_queue.WaitingQueue` limits that.

To add a policy, write such a function and add it to :data:`POLICIES`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.radix import RadixCache
    from pd.radix.tree_node import TreeNode
    from pd.scheduling.request import Request

    Policy = Callable[[Sequence[Request], RadixCache], list[Request]]


def first_come_first_served(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """fcfs: the order of arrival."""
    return list(waiting)


def longest_prefix_match(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """lpm: most cached tokens first, so we use them before we evict them."""
    return sorted(
        waiting, key=lambda request: -radix.count_cached(request.prompt, request.namespace)
    )


def longest_output_first(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """lof: most tokens to generate first, so the decode batch stays full to the end."""
    return sorted(waiting, key=lambda request: -request.params.max_tokens)


def by_priority(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """priority: the highest ``priority`` first."""
    return sorted(waiting, key=lambda request: -request.priority)


def depth_first_weight(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """dfs-weight: depth-first through the radix tree, branches with most waiting requests first.

    Requests of one branch therefore run together. Zheng et al. (SGLang, 2024, section 3) prove this
    order optimal for an offline batch. The branch used last comes before all others, whatever their
    weight, because a walk ends a branch before it begins the next one. A request whose path ends at
    a node comes after deeper ones, because they use the cached prefixes before we evict them.
    """
    paths = [radix.find_path(request.prompt, request.namespace) for request in waiting]
    weights = Counter(node for path, _ in paths for node in path)
    begun: dict[TreeNode | None, TreeNode] = {}
    for node in weights:
        latest = begun.setdefault(node.parent, node)
        if node.last_used > latest.last_used:
            begun[node.parent] = node

    def depth_first(index: int) -> list[tuple[bool, int, int]]:
        path, matched = paths[index]
        steps = ((begun[n.parent] is not n, -weights[n], n.created) for n in path)
        return [*steps, (True, 1, -matched)]

    return [waiting[index] for index in sorted(range(len(waiting)), key=depth_first)]


def by_chance(waiting: Sequence[Request], radix: RadixCache) -> list[Request]:
    """random: an order by chance that stays the same, to measure what the others gain."""
    return sorted(waiting, key=lambda request: zlib.crc32(request.rid.encode()))


POLICIES: dict[str, Policy] = {
    "lpm": longest_prefix_match,
    "fcfs": first_come_first_served,
    "lof": longest_output_first,
    "dfs-weight": depth_first_weight,
    "priority": by_priority,
    "random": by_chance,
}
