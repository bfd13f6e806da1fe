"""The radix cache: a tree of token prefixes over KV page ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd.radix.invariants import check_invariants
from pd.radix.listener import PageRun
from pd.radix.order import EvictionOrder
from pd.radix.policies import POLICY_KEYS, PROTECTED_FLOOR, PROTECTED_SHARE
from pd.radix.prefix_hashes import HASH_BYTES, first_hash, page_hashes
from pd.radix.tree_node import Edge, IntArray, TreeNode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.radix.listener import CacheListener

_INT32 = np.dtype(np.int32)
_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)


class MatchResult(NamedTuple):
    """The longest cached prefix of a key.

    ``pages``: its page ids, int32 ``[num_pages]``; may be the cache's own memory, so read only.
    ``handle``: stands for exactly this prefix; pass it to ``lock``. It is valid until the next
    ``evict`` or ``clear``, and if locked until it is unlocked.
    """

    pages: IntArray
    handle: TreeNode

    @property
    def num_pages(self) -> int:
        return len(self.pages)


class InsertResult(NamedTuple):
    """The result of an insert.

    ``existing_pages``: how many leading pages were cached before. The caller keeps its own
    ``pages[:existing_pages]`` where they differ from the cached ones; the cache took the rest.
    ``handle``: stands for exactly the inserted key, under the same rules as a match's handle.
    ``pages``: the cached page ids of the whole key, int32 ``[num_pages]``; read only.
    """

    existing_pages: int
    handle: TreeNode
    pages: IntArray


class RadixCache:
    """Maps token prefixes, in whole pages, to page ids; evicts the least valuable ones.

    Tokens are int32 arrays ``[length]``, compared as memory. Prefixes of different namespaces
    never meet. Not thread-safe; every operation is O(length of the key + nodes on its path), plus
    O(log leaves) for the eviction order, and nothing ever walks the tree except ``check``,
    ``nodes`` and ``pages``.

    Policies, all of which evict unlocked leaves only, a parent following once it has become one:

    - ``lru``: least recently matched or inserted first.
    - ``lfu``: least often matched first, then as lru. Inserting is no hit: a request that matches
      at its start and inserts at its end (or chunk by chunk) counts once.
    - ``fifo``: first inserted first, whatever happened since.
    - ``slru``: what was never matched (probationary) first, as lru; what was (protected) only when
      nothing else is left or when it exceeds its share of the cache (``PROTECTED_SHARE``).
    - ``priority``: lowest priority first, then as lru. The priority of a prefix is the highest of
      all inserts through it.
    """

    def __init__(self, page_size: int, *, policy: str = "lru") -> None:
        """``page_size``: tokens per page. Raises ValueError for a bad size or unknown policy."""
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be at least 1")
        if policy not in POLICY_KEYS:
            known = ", ".join(POLICY_KEYS)
            raise ValueError(f"unknown eviction policy {policy!r}; choose one of {known}")
        self.page_size = page_size
        self.policy = policy
        self.evictable_pages = 0
        self.locked_pages = 0

        # Since the cache was made; hit_tokens / lookup_tokens is the hit rate of `match`.
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

    def listen(self, listener: CacheListener) -> None:
        """Report every change to ``listener`` from now on. Only an empty cache can be listened to:
        pages have hashes only where somebody listens."""
        assert not self._root.children, "a listener came to a cache that already has pages"
        self._listeners.append(listener)

    def match(
        self, tokens: IntArray, namespace: str = "", *, max_tokens: int | None = None
    ) -> MatchResult:
        """Find the longest cached prefix of ``tokens`` and count it as used and hit.

        Only whole pages match, and at most ``max_tokens`` tokens rounded down to pages. A prefix
        that ends inside a node splits it. Matching nothing gives no pages and a handle that may
        be locked like any other. Raises TypeError unless ``tokens`` is an int32 array.
        """
        path, matched, partial = self._walk(self._key(tokens, max_tokens), namespace)
        self.lookup_tokens += len(tokens)
        if not path:
            return MatchResult(_NO_PAGES, self._root)
        self.hit_tokens += matched // _INT32.itemsize
        if partial:
            path[-1] = self._split(path[-1], partial // self._page_bytes)
        self._clock = clock = self._clock + 1
        for node in path:
            node.last_used = clock
            if not node.hits:
                self._hit_pages += len(node.pages)
            node.hits += 1
        self._reorder(path[-1])
        return MatchResult(_pages_of(path), path[-1])

    def peek(self, tokens: IntArray, namespace: str = "", *, max_tokens: int | None = None) -> int:
        """Count the tokens that ``match`` would find, in whole pages, without any effect."""
        return self.peek_memory(self._key(tokens, max_tokens), namespace)

    def peek_memory(self, data: bytes, namespace: str = "") -> int:
        """Do as :meth:`peek` does; a caller that asks several caches copies the tokens once.

        Args:
            data: the memory of int32 tokens.
        """
        _, matched, _ = self._walk(data, namespace)
        return matched // _INT32.itemsize

    def path(self, tokens: IntArray, namespace: str = "") -> list[TreeNode]:
        """The nodes that a match would pass, root first and without any effect; the last one may
        match only partly."""
        return [self._root, *self._walk(self._key(tokens, None), namespace)[0]]

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        *,
        priority: int = 0,
        data: bytes | None = None,
    ) -> InsertResult:
        """Cache ``pages`` (int32 ``[n]``) as holding ``tokens`` (int32 ``[n * page_size]``).

        ``data`` is the memory of ``tokens``, which less than a page may follow, from a caller that
        has it: the tokens are not copied as a whole then.

        Counts as use of the whole key. See `InsertResult` for the owners of the pages afterwards.
        The cache keeps the array ``pages`` itself: do not write to it afterwards.
        Raises ValueError unless the tokens fill the pages exactly, TypeError unless both are
        int32 arrays.
        """
        _require_int32("pages", pages)
        if data is None:
            data = self._key(tokens, None)
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(
                f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.page_size}; "
                f"insert exactly {len(pages) * self.page_size} tokens"
            )
        path, matched, partial = self._walk(data, namespace)
        if partial:
            path[-1] = self._split(path[-1], partial // self._page_bytes)
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
        self._reorder(path[-1])
        return InsertResult(existing, path[-1], _pages_of(path))

    def lock(self, handle: TreeNode) -> None:
        """Keep the handle's prefix from eviction. Locks count: each needs its own ``unlock``."""
        assert self._is_alive(handle), "locked a handle whose prefix was evicted"
        handle.held += 1
        self._dequeue(handle)
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
        self._reorder(handle)

    def evict(self, num_pages: int) -> IntArray:
        """Drop ``num_pages`` unlocked pages, or all there are if fewer, and return their ids.

        Exactly as many as asked for: the last victim loses only its tail and stays, shorter, with
        the rank it had. Ends the validity of all handles that are not locked.
        """
        freed: list[IntArray] = []
        missing = num_pages
        while missing > 0 and (victim := self._victim()) is not None:
            if len(victim.pages) > missing:
                self._split(victim, len(victim.pages) - missing)
            self._remove_leaf(victim)
            freed.append(victim.pages)
            missing -= len(victim.pages)
        self.evicted_pages += num_pages - missing
        return _concatenate(freed)

    def clear(self) -> IntArray:
        """Drop everything that is not locked and return the page ids."""
        return self.evict(self.evictable_pages)

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes, parents before children, beginning with the root. O(size)."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def pages(self) -> IntArray:
        """All page ids in the tree, int32, in no particular order. O(size)."""
        return _concatenate([node.pages for node in self.nodes()])

    def hashes(self) -> bytes:
        """Hashes of all pages, joined, if somebody listens. O(size)."""
        return b"".join(node.hashes for node in self.nodes())

    def runs(self) -> Iterator[PageRun]:
        """All pages as listeners would be told of them if they were inserted now; a run comes after
        the pages that it follows. O(size)."""
        for edge, top in self._root.children.items():
            assert isinstance(edge, tuple), "an edge of the root without a namespace"
            stack = [(b"", top)]
            while stack:
                parent, node = stack.pop()
                yield PageRun(parent, node.hashes, node.key, edge[0])
                last = node.hashes[-HASH_BYTES:]
                stack.extend((last, child) for child in node.children.values())

    def check(self, *, unique_pages: bool = True) -> None:
        """Prove all invariants, or raise AssertionError saying which one fails. O(size).

        Pass ``unique_pages=False`` for a tree whose page ids are arbitrary and may repeat.
        """
        check_invariants(self, unique_pages=unique_pages)

    def _key(self, tokens: IntArray, max_tokens: int | None) -> bytes:
        """The whole pages of ``tokens`` as memory."""
        _require_int32("tokens", tokens)
        length = len(tokens)
        if max_tokens is not None and max_tokens < length:
            length = max(max_tokens, 0)
        return tokens[: length - length % self.page_size].tobytes()

    def _walk(self, data: bytes, namespace: str) -> tuple[list[TreeNode], int, int]:
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
            # No key ends within a page, so none that matches reaches beyond the whole pages.
            if not data.startswith(key, position):
                partial = self._common_bytes(key, data, position)
                return path, position + partial, partial
            position += len(key)
            edge = data[position : position + page_bytes]
            children = node.children
        return path, position, 0

    def _common_bytes(self, key: bytes, data: bytes, position: int) -> int:
        """Length of the common prefix of ``key`` and ``data[position:]``, in whole pages."""
        count = min(len(key), len(data) - position) // _INT32.itemsize
        differs = np.frombuffer(key, _INT32, count) != np.frombuffer(data, _INT32, count, position)
        first = int(differs.argmax())
        equal = first if differs[first] else count
        return (equal - equal % self.page_size) * _INT32.itemsize

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Move the first ``num_pages`` pages of ``node`` to a new parent, and return that.

        Handles of ``node`` end where it ends, so it is the lower half that remains ``node``.
        """
        cut = num_pages * self._page_bytes
        parent = node.parent
        assert parent is not None and 0 < cut < len(node.key)
        # Both halves are copies, or the smaller would keep the memory of the whole alive.
        upper = TreeNode(parent, node.edge, node.key[:cut], node.pages[:num_pages].copy())
        upper.locks = node.locks
        upper.created = node.created
        upper.last_used = node.last_used
        upper.hits = node.hits
        upper.priority = node.priority
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
        if self._listeners:
            last = parent.hashes[-HASH_BYTES:]
            leaf.hashes = page_hashes(last or first_hash(namespace), key, self._page_bytes)
            run = PageRun(last, leaf.hashes, key, namespace)
            for listener in self._listeners:
                listener.stored(run)
        parent.children[edge] = leaf
        self._dequeue(parent)
        self.evictable_pages += len(pages)
        return leaf

    def _remove_leaf(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children and not leaf.locks
        self._dequeue(leaf)
        del parent.children[leaf.edge]
        leaf.parent = None
        for listener in self._listeners:
            listener.removed(leaf.hashes)
        self.evictable_pages -= len(leaf.pages)
        if leaf.hits:
            self._hit_pages -= len(leaf.pages)
        self._reorder(parent)

    def _victim(self) -> TreeNode | None:
        if self.policy == "slru":
            total = self.evictable_pages + self.locked_pages
            if self._hit_pages > PROTECTED_SHARE * total:
                victim = self._order.first_from(PROTECTED_FLOOR)
                if victim is not None:
                    return victim
        return self._order.first()

    def _reorder(self, node: TreeNode) -> None:
        """Put a node where it now belongs in the eviction order, if it belongs there at all."""
        if node.children or node.locks or node is self._root:
            return
        key = self._order_key(node)
        if key != node.order_key:
            self._dequeue(node)
            self._order.add(key, node)
            node.order_key = key

    def _dequeue(self, node: TreeNode) -> None:
        if node.order_key is not None:
            self._order.remove(node.order_key)
            node.order_key = None

    def _is_alive(self, node: TreeNode) -> bool:
        return node.parent is not None or node is self._root


def _require_int32(name: str, array: IntArray) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a 1-D int32 array, not {type(array).__name__}")
    if array.dtype != _INT32 or array.ndim != 1:
        raise TypeError(f"{name} must be a 1-D int32 array, not {array.ndim}-D {array.dtype}")


def _kept(pages: IntArray) -> IntArray:
    """The array, or a copy where it would keep alive more than twice its own memory."""
    base = pages.base
    if isinstance(base, np.ndarray) and base.size > 2 * pages.size:
        return pages.copy()
    return pages


def _pages_of(path: Sequence[TreeNode]) -> IntArray:
    return path[0].pages if len(path) == 1 else _concatenate([node.pages for node in path])


def _concatenate(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else _NO_PAGES
