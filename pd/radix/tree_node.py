"""The tree's node, which is also the handle that callers hold."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]

Edge: TypeAlias = bytes | tuple[str, bytes]
"""The key of a child in its parent: the memory of the child's first page of tokens. The root's
children include the namespace, so tenants share only the root."""


class TreeNode:
    """A run of whole pages that were always used together.

    For callers a node is an opaque handle for the prefix that ends with its last page. Splitting
    does not change this, because the lower half stays the same object.
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
        "leases",
        "leases_here",
        "locks",
        "order_key",
        "pages",
        "parent",
        "priority",
        "windows",
    )

    def __init__(self, parent: TreeNode | None, edge: Edge, key: bytes, pages: IntArray) -> None:
        self.parent = parent
        self.edge = edge
        self.key = key
        self.pages = pages
        # What the cache's owner knows about pages for sliding windows, int64 [windows, pages]; -1
        # for a page without. None in a cache without windows.
        self.windows: Int64Array | None = None
        # Joined hashes of the pages, if the cache has listeners.
        self.hashes = b""
        self.children: dict[Edge, TreeNode] = {}

        # Locks on this handle, and locks on it or any handle below it.
        self.held = 0
        self.locks = 0

        # Numbers of leases that end at this node, and the count of those that end here or below.
        self.leases_here: set[int] = set()
        self.leases = 0

        # Times are ticks of the cache's own clock.
        self.created = 0
        self.last_used = 0
        self.hits = 0
        self.priority = 0

        # The node's key in the eviction order; None unless it is an unlocked leaf.
        self.order_key: int | None = None
