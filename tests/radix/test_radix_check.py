"""`check` finds every kind of damage and says what it found."""

from collections.abc import Callable

import numpy as np
import pytest
from radix_model import as_array

from pd.radix import RadixCache, TreeNode, check_invariants


def a_cache() -> RadixCache:
    """A prefix of one page with two leaves, the left one locked."""
    cache = RadixCache(2)
    cache.insert_prefix(as_array([1, 2, 3, 4]), as_array([0, 1]))
    cache.insert_prefix(as_array([1, 2, 5, 6]), as_array([0, 2]))
    cache.lock(cache.match_prefix(as_array([1, 2, 3, 4])).handle)
    return cache


def nodes_by_name(cache: RadixCache) -> dict[str, TreeNode]:
    return {
        "prefix": cache.match_prefix(as_array([1, 2])).handle,
        "left": cache.match_prefix(as_array([1, 2, 3, 4])).handle,
        "right": cache.match_prefix(as_array([1, 2, 5, 6])).handle,
    }


def double_page(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["left"].pages = nodes["right"].pages


def longer_key(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["left"].key += b"...."


def wrong_parent(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["left"].parent = nodes["right"]


def wrong_edge(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["left"].key = bytes(8)


def missing_namespace(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    root = nodes["prefix"].parent
    assert root is not None
    root.children = {nodes["prefix"].key: nodes["prefix"]}
    nodes["prefix"].edge = nodes["prefix"].key


def lock_on_leaf_only(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["prefix"].locks = 0
    cache._root.locks = 0


def lost_lock(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["left"].held = 0


def miscounted_evictable(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    cache.evictable_pages += 1


def miscounted_locked(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    cache.locked_pages -= 1


def miscounted_hits(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    cache._hit_pages += 1


def leaf_missing_in_order(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    cache._dequeue_leaf(nodes["right"])


def locked_leaf_in_order(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    cache._order.add_leaf(1, nodes["left"])


def outdated_key(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["right"].last_used -= 1


def child_used_later(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["prefix"].last_used = 0


def wide_pages(cache: RadixCache, nodes: dict[str, TreeNode]) -> None:
    nodes["left"].pages = nodes["left"].pages.astype(np.int64)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (double_page, "held more than once"),
        (longer_key, "bytes of key"),
        (wrong_parent, "whose parent is another"),
        (wrong_edge, "not the child's first page"),
        (missing_namespace, "without namespace"),
        (lock_on_leaf_only, "0 locks on a node, but 0 on its handle and 1 below"),
        (lost_lock, "1 locks on a node, but 0"),
        (miscounted_evictable, "evictable_pages says 2"),
        (miscounted_locked, "locked_pages says 1"),
        (miscounted_hits, "hit pages says"),
        (leaf_missing_in_order, "1 unlocked leaves are missing"),
        (locked_leaf_in_order, "1 other nodes are in it"),
        (outdated_key, "its policy says"),
        (child_used_later, "used after its parent"),
        (wide_pages, "int64"),
    ],
)
def test_finds(damage: Callable[[RadixCache, dict[str, TreeNode]], None], problem: str) -> None:
    cache = a_cache()
    nodes = nodes_by_name(cache)
    check_invariants(cache)
    damage(cache, nodes)
    with pytest.raises(AssertionError, match=problem):
        check_invariants(cache)


def test_allows_repeated_page_ids_where_they_mean_nothing() -> None:
    cache = RadixCache(1)
    cache.insert_prefix(as_array([1, 2, 3]), as_array([0, 0, 0]))
    check_invariants(cache, unique_pages=False)
    with pytest.raises(AssertionError, match="held more than once"):
        check_invariants(cache, unique_pages=True)
