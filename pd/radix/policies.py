"""Eviction policies: each maps an unlocked leaf to an integer, and we evict the smallest first.

The lower part of each key is a tick of the cache's clock. All nodes with the same tick lie on one
path from the root, and only one node of a path is a leaf. So no two leaves have the same key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.radix.tree_node import TreeNode

_TICK_BITS = 48

PROTECTED_FLOOR = 1 << _TICK_BITS
"""Under slru, keys from here on belong to the protected segment: leaves that were matched."""

PROTECTED_SHARE = 0.8
"""Under slru, the part of the cache that the protected segment may hold before we evict its oldest
leaves. Without a limit, pages with a single old hit would fill the cache, and we would evict new
pages before they ever had a chance of a hit."""


def _lru_key(node: TreeNode) -> int:
    return node.last_used


def _lfu_key(node: TreeNode) -> int:
    return (node.hits << _TICK_BITS) + node.last_used


def _fifo_key(node: TreeNode) -> int:
    return node.created


def _slru_key(node: TreeNode) -> int:
    return (PROTECTED_FLOOR if node.hits else 0) + node.last_used


def _priority_key(node: TreeNode) -> int:
    return (node.priority << _TICK_BITS) + node.last_used


POLICY_KEYS: dict[str, Callable[[TreeNode], int]] = {
    "lru": _lru_key,
    "lfu": _lfu_key,
    "fifo": _fifo_key,
    "slru": _slru_key,
    "priority": _priority_key,
}

LEASED_FLOOR = 1 << 128
"""Added to the key of a leased leaf. Other keys are smaller, so we evict leased leaves last."""

EVICTION_POLICIES: tuple[str, ...] = tuple(POLICY_KEYS)
