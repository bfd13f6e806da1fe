"""Eviction policies: each turns an unlocked leaf into one integer, and the smallest goes first.

All nodes that share a tick of the clock lie on one path from the root, and at most one node of a
path is a leaf. So with the tick as the lower part, no two leaves ever have the same key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.radix.tree_node import TreeNode

_TICK_BITS = 48

PROTECTED_FLOOR = 1 << _TICK_BITS
"""Under slru, keys from here on belong to the protected segment."""

PROTECTED_SHARE = 0.8
"""Under slru, the part of all cached pages that the protected segment may hold before its own
oldest leaves are evicted. Without a bound, pages that were hit once long ago would fill the cache
and new ones would be evicted before they ever had a chance of a hit."""


def _lru(node: TreeNode) -> int:
    return node.last_used


def _lfu(node: TreeNode) -> int:
    return (node.hits << _TICK_BITS) + node.last_used


def _fifo(node: TreeNode) -> int:
    return node.created


def _slru(node: TreeNode) -> int:
    return (PROTECTED_FLOOR if node.hits else 0) + node.last_used


def _priority(node: TreeNode) -> int:
    return (node.priority << _TICK_BITS) + node.last_used


POLICY_KEYS: dict[str, Callable[[TreeNode], int]] = {
    "lru": _lru,
    "lfu": _lfu,
    "fifo": _fifo,
    "slru": _slru,
    "priority": _priority,
}

EVICTION_POLICIES: tuple[str, ...] = tuple(POLICY_KEYS)
