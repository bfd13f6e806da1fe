"""The tree's node, which is also the handle that callers hold."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]

Edge: TypeAlias = bytes | tuple[str, bytes]
"""The key of a child in its parent: the memory of the child's first page of tokens. Below the root
it includes the namespace, so tenants share only the root."""


class TreeNode:
    """A run of whole pages that were always used together.

    To callers a node is an opaque handle that means "the prefix ending with my last page". It
    keeps that meaning when the tree splits it, because the lower half keeps the identity.
    """

    __slots__ = (
        "children",
        "created",
        "edge",
        "hashes",
        "held",
        "hits",
        "key",
        "last_used",
        "locks",
        "order_key",
        "pages",
        "parent",
        "priority",
    )

    def __init__(self, parent: TreeNode | None, edge: Edge, key: bytes, pages: IntArray) -> None:
        self.parent = parent
        self.edge = edge
        self.key = key
        self.pages = pages
        # Hashes of the pages, joined, if somebody listens to the cache.
        self.hashes = b""
        self.children: dict[Edge, TreeNode] = {}

        # Locks on this very handle, and on it or any handle below it.
        self.held = 0
        self.locks = 0

        # Times are ticks of the cache's own clock.
        self.created = 0
        self.last_used = 0
        self.hits = 0
        self.priority = 0

        # The node's key in the eviction order; None unless it is an unlocked leaf.
        self.order_key: int | None = None
