"""Checks that a radix cache is consistent. Reads everything, trusts no counter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.radix.policies import LEASED_FLOOR, POLICY_KEYS

if TYPE_CHECKING:
    from pd.radix.cache import RadixCache
    from pd.radix.tree_node import TreeNode


def check_invariants(cache: RadixCache, *, unique_pages: bool = True) -> None:
    """Raise AssertionError naming the first broken invariant, if there is one. O(size).

    Args:
        unique_pages: pass False for a tree with arbitrary page ids, which may repeat.
    """
    nodes = list(cache.iter_nodes())
    root = cache._root
    _check_that(root.parent is None and not root.key and not len(root.pages), "the root holds data")
    for node in nodes:
        _check_node(cache, node)
        for child in node.children.values():
            _check_link(cache, node, child)
    _check_counts(cache, nodes)
    _check_order(cache, nodes)
    if unique_pages:
        pages = cache.list_pages()
        ids, counts = np.unique(pages, return_counts=True)
        _check_that(len(ids) == len(pages), f"pages held more than once: {ids[counts > 1][:10]}")


def _check_that(holds: bool, problem: str) -> None:
    # Not an assert statement, so the check also works under `python -O`.
    if not holds:
        raise AssertionError(f"radix cache: {problem}")


def _check_node(cache: RadixCache, node: TreeNode) -> None:
    below = sum(child.locks for child in node.children.values())
    _check_that(node.held >= 0, f"a handle is held {node.held} times")
    _check_that(
        node.locks == node.held + below,
        f"{node.locks} locks on a node, but {node.held} on its handle and {below} below it",
    )
    below = sum(child.leases for child in node.children.values())
    _check_that(
        node.leases == len(node.leases_here) + below,
        f"{node.leases} leases of a node, but {len(node.leases_here)} end here and {below} below",
    )
    for number in node.leases_here:
        _check_that(cache._leases.get(number) is node, f"lease {number} ends at another node")
    if node is cache._root:
        return
    page_bytes = cache._page_bytes
    _check_that(len(node.pages) > 0, "a node without pages")
    _check_that(
        len(node.key) == len(node.pages) * page_bytes,
        f"{len(node.key)} bytes of key for {len(node.pages)} pages of {page_bytes} bytes",
    )
    _check_that(node.pages.dtype == np.int32, f"page ids of type {node.pages.dtype}")


def _check_link(cache: RadixCache, parent: TreeNode, child: TreeNode) -> None:
    _check_that(child.parent is parent, "a child whose parent is another node")
    _check_that(parent.children.get(child.edge) is child, "a child filed under another edge")
    first_page = child.key[: cache._page_bytes]
    if parent is cache._root:
        _check_that(
            isinstance(child.edge, tuple) and child.edge[1] == first_page,
            "an edge of the root without namespace or with another page than the child's first",
        )
    else:
        _check_that(child.edge == first_page, "an edge that is not the child's first page")
        _check_that(parent.created <= child.created, "a child older than its parent")
        _check_that(parent.last_used >= child.last_used, "a child used after its parent")
        _check_that(parent.hits >= child.hits, "a child hit more often than its parent")
        _check_that(parent.priority >= child.priority, "a child of higher priority than its parent")


def _check_counts(cache: RadixCache, nodes: list[TreeNode]) -> None:
    locked = sum(len(node.pages) for node in nodes if node.locks)
    leased = sum(len(node.pages) for node in nodes if node.leases)
    unlocked = sum(len(node.pages) for node in nodes if not node.locks)
    hit = sum(len(node.pages) for node in nodes if node.hits)
    for name, counted, found in (
        ("locked_pages", cache.locked_pages, locked),
        ("evictable_pages", cache.evictable_pages, unlocked),
        ("leased_pages", cache.leased_pages, leased),
        ("hit pages", cache._hit_pages, hit),
    ):
        _check_that(counted == found, f"{name} says {counted}, the tree holds {found}")


def _check_order(cache: RadixCache, nodes: list[TreeNode]) -> None:
    leaves = {
        id(node)
        for node in nodes
        if node is not cache._root and not node.children and not node.locks
    }
    entries = list(cache._order)
    ordered = {id(node) for _, node in entries}
    _check_that(len(entries) == len(cache._order) == len(ordered), "a node twice in the order")
    _check_that(
        ordered == leaves,
        f"{len(leaves - ordered)} unlocked leaves are missing from the eviction order and "
        f"{len(ordered - leaves)} other nodes are in it",
    )
    keys = [key for key, _ in entries]
    _check_that(keys == sorted(set(keys)), "the eviction order is not sorted")
    key_of = POLICY_KEYS[cache.policy]
    for key, node in entries:
        expected = key_of(node) + (LEASED_FLOOR if node.leases else 0)
        _check_that(
            node.order_key == key == expected,
            f"a leaf stands at {key} in the eviction order, its policy says {expected}",
        )
    for node in nodes:
        _check_that(
            node.order_key is None or id(node) in ordered,
            "a node has a key of the eviction order and is not in it",
        )
