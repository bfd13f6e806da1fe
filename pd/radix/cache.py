"""The radix cache: a tree of token prefixes over KV page ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.radix.listener import PageRun
from pd.radix.order import EvictionOrder
from pd.radix.policies import LEASED_FLOOR, POLICY_KEYS, PROTECTED_FLOOR, PROTECTED_SHARE
from pd.radix.prefix_hashes import HASH_BYTES, hash_namespace, hash_pages
from pd.radix.tree_node import Edge, Int64Array, IntArray, TreeNode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.radix.listener import CacheListener

_INT32 = np.dtype(np.int32)
_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)


class MatchResult(NamedTuple):
    """The longest cached prefix of a key.

    Attributes:
        pages: page ids, int32 ``[num_pages]``. Read only, because it may be the cache's own memory.
        handle: stands for exactly this prefix; pass it to ``lock``. It is valid until the next
            ``evict_pages`` or ``clear``. A locked handle is valid until you unlock it.
    """

    pages: IntArray
    handle: TreeNode

    @property
    def num_pages(self) -> int:
        return len(self.pages)


class InsertResult(NamedTuple):
    """The result of an insertion.

    Attributes:
        existing_pages: number of leading pages that were cached before. You keep your own
            ``pages[:existing_pages]`` if they differ from the cached ones; the cache owns the rest.
        handle: stands for exactly the inserted key, with the same rules as a match's handle.
        pages: cached page ids of the whole key, int32 ``[num_pages]``; read only.
    """

    existing_pages: int
    handle: TreeNode
    pages: IntArray


class RadixCache:
    """Maps token prefixes, in whole pages, to page ids, and evicts the least valuable ones.

    Tokens are int32 arrays ``[length]``, compared as memory. Namespaces share no prefixes. The
    cache is not thread-safe. Every operation takes O(length of the key + nodes on its path), plus
    O(log leaves) for the eviction order. Nothing walks the whole tree except the functions marked
    with O(size).

    Every policy only evicts unlocked leaves. A parent follows once it has become a leaf.

    - ``lru``: least recently matched or inserted first.
    - ``lfu``: least often matched first, then like lru. Insertions do not count, so a request that
      matches at its start and inserts at its end (or after each chunk) counts once.
    - ``fifo``: first inserted first, whatever happened since.
    - ``slru``: never matched (probationary) pages first, like lru. Matched (protected) pages only
      go if nothing else is left, or if they exceed their share of the cache (``PROTECTED_SHARE``).
    - ``priority``: lowest priority first, then like lru. The priority of a prefix is the highest of
      all insertions through it.

    Under every policy a leased prefix goes last, see :meth:`lease_prefix`.
    """

    def __init__(self, page_size: int, *, policy: str = "lru", num_windows: int = 0) -> None:
        """Create an empty cache.

        Args:
            page_size: tokens per page.
            num_windows: numbers that the owner keeps for each page (:meth:`join_windows`).

        Raises:
            ValueError: the page size is below 1, or the policy is unknown.
        """
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be at least 1")
        if policy not in POLICY_KEYS:
            known = ", ".join(POLICY_KEYS)
            raise ValueError(f"unknown eviction policy {policy!r}; choose one of {known}")
        self.page_size = page_size
        self.policy = policy
        self._num_windows = num_windows
        self._dropped_windows: list[Int64Array] = []
        self.evictable_pages = 0
        self.locked_pages = 0
        self.leased_pages = 0

        # Totals. hit_tokens / lookup_tokens is the hit rate of `match_prefix`.
        self.lookup_tokens = 0
        self.hit_tokens = 0
        self.evicted_pages = 0

        self._page_bytes = page_size * _INT32.itemsize
        self._order_key = POLICY_KEYS[policy]
        self._order = EvictionOrder()
        self._root = TreeNode(None, b"", b"", _NO_PAGES)
        self._clock = 0
        self._hit_pages = 0  # matched at least once: slru's protected segment
        self._listeners: list[CacheListener] = []
        # The node that each lease ends at. A lease of an evicted node moves to the node's parent.
        self._leases: dict[int, TreeNode] = {}
        self._lease_count = 0

    def add_listener(self, listener: CacheListener) -> None:
        """Report every change to ``listener`` from now on.

        The cache must be empty, because pages only have hashes if there are listeners.
        """
        assert not self._root.children, "a listener came to a cache that already has pages"
        self._listeners.append(listener)

    def match_prefix(
        self, tokens: IntArray, namespace: str = "", *, max_tokens: int | None = None
    ) -> MatchResult:
        """Find the longest cached prefix of ``tokens``, and count it as used and hit.

        Only whole pages match, and at most ``max_tokens`` tokens rounded down to pages. A prefix
        that ends inside a node splits the node. Without a match you get no pages, and a handle
        that you can lock like any other.

        Raises:
            TypeError: ``tokens`` is not an int32 array.
        """
        path, matched, partial = self._walk_tree(self._page_memory(tokens, max_tokens), namespace)
        self.lookup_tokens += len(tokens)
        if not path:
            return MatchResult(_NO_PAGES, self._root)
        self.hit_tokens += matched // _INT32.itemsize
        if partial:
            path[-1] = self._split_node(path[-1], partial // self._page_bytes)
        self._clock = clock = self._clock + 1
        for node in path:
            node.last_used = clock
            if not node.hits:
                self._hit_pages += len(node.pages)
            node.hits += 1
        self._enqueue_leaf(path[-1])
        return MatchResult(_join_pages(path), path[-1])

    def count_cached(
        self, tokens: IntArray, namespace: str = "", *, max_tokens: int | None = None
    ) -> int:
        """Count the tokens that ``match_prefix`` would find, without any effect."""
        return self.count_cached_memory(self._page_memory(tokens, max_tokens), namespace)

    def count_cached_memory(self, data: bytes, namespace: str = "") -> int:
        """Count cached tokens, for callers that ask several caches and copy the tokens once.

        Args:
            data: the memory of int32 tokens.
        """
        _, matched, _ = self._walk_tree(data, namespace)
        return matched // _INT32.itemsize

    def join_windows(
        self, tokens: IntArray, namespace: str = "", *, max_tokens: int | None = None
    ) -> Int64Array:
        """Return the owner's numbers of the pages that ``match_prefix`` would find, without any
        effect: int64 ``[num_windows, pages]``. -1 stands for none."""
        path, matched, _ = self._walk_tree(self._page_memory(tokens, max_tokens), namespace)
        parts = [node.windows for node in path if node.windows is not None]
        if not parts:
            return np.empty((self._num_windows, 0), dtype=np.int64)
        return np.concatenate(parts, axis=1)[:, : matched // self._page_bytes]

    def iter_windows(self, handle: TreeNode, num_pages: int) -> Iterator[tuple[int, Int64Array]]:
        """Iterate over the owner's numbers in a prefix of ``num_pages``, from its end on.

        Yields:
            number of the first page of a part, and the part, int64 ``[num_windows, pages]``. You
            may write to it.
        """
        node: TreeNode | None = handle
        while node is not None and node.windows is not None:
            num_pages -= len(node.pages)
            yield num_pages, node.windows
            node = node.parent

    def take_dropped_windows(self) -> list[Int64Array]:
        """Return the owner's numbers in prefixes dropped since the last call."""
        dropped, self._dropped_windows = self._dropped_windows, []
        return dropped

    def find_path(self, tokens: IntArray, namespace: str = "") -> tuple[list[TreeNode], int]:
        """Return the nodes that a match would pass, root first, and the number of tokens that it
        would find, without any effect. The last node may match only in part.
        """
        path, matched, _ = self._walk_tree(self._page_memory(tokens, None), namespace)
        return [self._root, *path], matched // _INT32.itemsize

    def insert_prefix(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        *,
        priority: int = 0,
        data: bytes | None = None,
    ) -> InsertResult:
        """Cache ``pages`` (int32 ``[n]``), which hold ``tokens`` (int32 ``[n * page_size]``).

        This counts as a use of the whole key. See `InsertResult` for the owners of the pages. The
        cache keeps the array ``pages``, so do not write to it afterwards.

        Args:
            data: memory of ``tokens``, if you have it, so we need no copy of the tokens. Less than
                a page of other tokens may follow.

        Raises:
            ValueError: the tokens do not fill the pages exactly.
            TypeError: tokens or pages are not int32 arrays.
        """
        _require_int32("pages", pages)
        if data is None:
            data = self._page_memory(tokens, None)
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(
                f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.page_size}; "
                f"insert exactly {len(pages) * self.page_size} tokens"
            )
        path, matched, partial = self._walk_tree(data, namespace)
        if partial:
            path[-1] = self._split_node(path[-1], partial // self._page_bytes)
        self._clock = clock = self._clock + 1
        for node in path:
            node.last_used = clock
            if priority > node.priority:
                node.priority = priority
        existing = matched // self._page_bytes
        if existing < len(pages):
            parent = path[-1] if path else self._root
            key = data[matched : len(pages) * self._page_bytes]
            path.append(self._add_leaf(parent, namespace, key, _kept(pages[existing:])))
            path[-1].priority = priority
        if not path:
            return InsertResult(0, self._root, _NO_PAGES)
        self._enqueue_leaf(path[-1])
        return InsertResult(existing, path[-1], _join_pages(path))

    def lock(self, handle: TreeNode) -> None:
        """Keep the handle's prefix from eviction. Each lock needs its own ``unlock``."""
        assert self._is_alive(handle), "locked a handle whose prefix was evicted"
        handle.held += 1
        self._dequeue_leaf(handle)
        node: TreeNode | None = handle
        while node is not None:
            if not node.locks:
                self.evictable_pages -= len(node.pages)
                self.locked_pages += len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, handle: TreeNode) -> None:
        """Take back one ``lock`` of this handle."""
        assert handle.held > 0, "unlocked a handle that is not locked"
        handle.held -= 1
        node: TreeNode | None = handle
        while node is not None:
            node.locks -= 1
            if not node.locks:
                self.evictable_pages += len(node.pages)
                self.locked_pages -= len(node.pages)
            node = node.parent
        self._enqueue_leaf(handle)

    def lease_prefix(self, handle: TreeNode) -> int:
        """Evict the handle's prefix only when nothing else is left, and return the lease's number.

        Unlike a lock, a lease takes no pages away from others. The parts of the prefix that are
        evicted under pressure leave the lease.
        """
        assert self._is_alive(handle), "leased a handle whose prefix was evicted"
        self._lease_count = number = self._lease_count + 1
        self._leases[number] = handle
        handle.leases_here.add(number)
        self._count_lease(handle, 1)
        return number

    def end_lease(self, number: int) -> None:
        """End a lease, whether or not parts of its prefix were evicted."""
        handle = self._leases.pop(number)
        handle.leases_here.discard(number)
        self._count_lease(handle, -1)

    def _count_lease(self, handle: TreeNode, change: int) -> None:
        node: TreeNode | None = handle
        while node is not None:
            before = node.leases
            node.leases += change
            if not before or not node.leases:
                self.leased_pages += change * len(node.pages)
            node = node.parent
        self._enqueue_leaf(handle)

    def evict_pages(self, num_pages: int) -> IntArray:
        """Drop ``num_pages`` unlocked pages, or all if there are fewer, and return their ids.

        If the last victim has too many pages, it loses only its tail and keeps its rank. All
        unlocked handles become invalid.
        """
        freed: list[IntArray] = []
        missing = num_pages
        while missing > 0 and (victim := self._find_victim()) is not None:
            if len(victim.pages) > missing:
                self._split_node(victim, len(victim.pages) - missing)
            self._remove_leaf(victim)
            freed.append(victim.pages)
            missing -= len(victim.pages)
        self.evicted_pages += num_pages - missing
        return _concatenate_pages(freed)

    def clear(self) -> IntArray:
        """Drop all unlocked pages and return their ids."""
        return self.evict_pages(self.evictable_pages)

    def iter_nodes(self) -> Iterator[TreeNode]:
        """Iterate over all nodes, parents before children. O(size)."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def list_pages(self) -> IntArray:
        """Return all page ids, int32, in no particular order. O(size)."""
        return _concatenate_pages([node.pages for node in self.iter_nodes()])

    def join_hashes(self) -> bytes:
        """Return the joined hashes of all pages, if there are listeners. O(size)."""
        return b"".join(node.hashes for node in self.iter_nodes())

    def iter_runs(self) -> Iterator[PageRun]:
        """Iterate over all pages as listeners would hear of them now, parents first. O(size)."""
        for edge, top in self._root.children.items():
            assert isinstance(edge, tuple), "an edge of the root without a namespace"
            stack = [(b"", top)]
            while stack:
                parent, node = stack.pop()
                yield PageRun(parent, node.hashes, node.key, edge[0])
                last = node.hashes[-HASH_BYTES:]
                stack.extend((last, child) for child in node.children.values())

    def _page_memory(self, tokens: IntArray, max_tokens: int | None) -> bytes:
        """Return the whole pages of ``tokens`` as memory."""
        _require_int32("tokens", tokens)
        length = len(tokens)
        if max_tokens is not None and max_tokens < length:
            length = max(max_tokens, 0)
        return tokens[: length - length % self.page_size].tobytes()

    def _walk_tree(self, data: bytes, namespace: str) -> tuple[list[TreeNode], int, int]:
        """Follow the whole pages of ``data`` down from the root.

        Returns the nodes on the path (without the root), the number of bytes of ``data`` that they
        match, and how many of these lie in the last node if that matches only partly (else 0).
        """
        path: list[TreeNode] = []
        position, page_bytes = 0, self._page_bytes
        end = len(data) - len(data) % page_bytes
        edge: Edge = (namespace, data[:page_bytes])
        children = self._root.children
        while position < end:
            node = children.get(edge)
            if node is None:
                break
            path.append(node)
            key = node.key
            # No key ends inside a page, so no matching key reaches beyond the whole pages.
            if not data.startswith(key, position):
                partial = self._common_bytes(key, data, position)
                return path, position + partial, partial
            position += len(key)
            edge = data[position : position + page_bytes]
            children = node.children
        return path, position, 0

    def _common_bytes(self, key: bytes, data: bytes, position: int) -> int:
        """Count the common leading bytes of ``key`` and ``data[position:]``, in whole pages."""
        count = min(len(key), len(data) - position) // _INT32.itemsize
        differs = np.frombuffer(key, _INT32, count) != np.frombuffer(data, _INT32, count, position)
        first = int(differs.argmax())
        equal = first if differs[first] else count
        return (equal - equal % self.page_size) * _INT32.itemsize

    def _split_node(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Move the first ``num_pages`` pages of ``node`` to a new parent, and return the parent.

        The lower half stays the same object, because handles of ``node`` end where it ends.
        """
        cut = num_pages * self._page_bytes
        parent = node.parent
        assert parent is not None and 0 < cut < len(node.key)
        # Both halves are copies, because the smaller one would keep all of the memory alive.
        upper = TreeNode(parent, node.edge, node.key[:cut], node.pages[:num_pages].copy())
        upper.locks = node.locks
        upper.leases = node.leases
        upper.created = node.created
        upper.last_used = node.last_used
        upper.hits = node.hits
        upper.priority = node.priority
        if node.windows is not None:
            upper.windows = node.windows[:, :num_pages].copy()
            node.windows = node.windows[:, num_pages:].copy()
        upper.hashes = node.hashes[: num_pages * HASH_BYTES]
        node.hashes = node.hashes[num_pages * HASH_BYTES :]
        parent.children[node.edge] = upper

        node.parent = upper
        node.key = node.key[cut:]
        node.pages = node.pages[num_pages:].copy()
        node.edge = node.key[: self._page_bytes]
        upper.children[node.edge] = node
        return upper

    def _add_leaf(self, parent: TreeNode, namespace: str, key: bytes, pages: IntArray) -> TreeNode:
        first_page = key[: self._page_bytes]
        edge: Edge = (namespace, first_page) if parent is self._root else first_page
        leaf = TreeNode(parent, edge, key, pages)
        leaf.created = leaf.last_used = self._clock
        if self._num_windows:
            leaf.windows = np.full((self._num_windows, len(pages)), -1, dtype=np.int64)
        if self._listeners:
            last = parent.hashes[-HASH_BYTES:]
            leaf.hashes = hash_pages(last or hash_namespace(namespace), key, self._page_bytes)
            run = PageRun(last, leaf.hashes, key, namespace)
            for listener in self._listeners:
                listener.on_stored(run)
        parent.children[edge] = leaf
        self._dequeue_leaf(parent)
        self.evictable_pages += len(pages)
        return leaf

    def _remove_leaf(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children and not leaf.locks
        self._dequeue_leaf(leaf)
        del parent.children[leaf.edge]
        leaf.parent = None
        if leaf.windows is not None:
            self._dropped_windows.append(leaf.windows)
        if leaf.leases:
            self.leased_pages -= len(leaf.pages)
            for number in leaf.leases_here:
                self._leases[number] = parent
            parent.leases_here |= leaf.leases_here
        for listener in self._listeners:
            listener.on_removed(leaf.hashes)
        self.evictable_pages -= len(leaf.pages)
        if leaf.hits:
            self._hit_pages -= len(leaf.pages)
        self._enqueue_leaf(parent)

    def _find_victim(self) -> TreeNode | None:
        if self.policy == "slru":
            total = self.evictable_pages + self.locked_pages
            if self._hit_pages > PROTECTED_SHARE * total:
                victim = self._order.find_first_from(PROTECTED_FLOOR)
                if victim is not None and not victim.leases:
                    return victim
        return self._order.find_first()

    def _enqueue_leaf(self, node: TreeNode) -> None:
        """Put a node in its place in the eviction order, if it is an unlocked leaf."""
        if node.children or node.locks or node is self._root:
            return
        key = self._order_key(node)
        if node.leases:
            key += LEASED_FLOOR
        if key != node.order_key:
            self._dequeue_leaf(node)
            self._order.add_leaf(key, node)
            node.order_key = key

    def _dequeue_leaf(self, node: TreeNode) -> None:
        if node.order_key is not None:
            self._order.remove_key(node.order_key)
            node.order_key = None

    def _is_alive(self, node: TreeNode) -> bool:
        return node.parent is not None or node is self._root


def _require_int32(name: str, array: IntArray) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a 1-D int32 array, not {type(array).__name__}")
    if array.dtype != _INT32 or array.ndim != 1:
        raise TypeError(f"{name} must be a 1-D int32 array, not {array.ndim}-D {array.dtype}")


def _kept(pages: IntArray) -> IntArray:
    """Return the array, or a copy if it would keep more than twice its own memory alive."""
    base = pages.base
    if isinstance(base, np.ndarray) and base.size > 2 * pages.size:
        return pages.copy()
    return pages


def _join_pages(path: Sequence[TreeNode]) -> IntArray:
    return path[0].pages if len(path) == 1 else _concatenate_pages([node.pages for node in path])


def _concatenate_pages(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else _NO_PAGES
