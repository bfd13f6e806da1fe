"""Prefixes that a node presumably holds: its radix cache, estimated from what was sent there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.radix import RadixCache

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]

MAX_TREE_TOKENS = 4 << 20


class PrefixTree:
    """A radix tree of tokens as large as the node's pool, evicted least recently used first.

    The proxy sees neither what other proxies send nor what the node evicts, so this is a guess;
    a wrong one costs time, never correctness.
    """

    def __init__(self, page_size: int, pool_tokens: int) -> None:
        self._cache = RadixCache(page_size)
        self._page_size = page_size
        self._max_pages = max(1, min(pool_tokens, MAX_TREE_TOKENS) // page_size)

    @property
    def num_tokens(self) -> int:
        return self._cache.evictable_pages * self._page_size

    def match(self, tokens: IntArray, namespace: str, data: bytes | None = None) -> int:
        """Leading tokens that the node presumably holds, in whole pages. ``data``: the memory of
        ``tokens``, from callers that ask several nodes."""
        return self._cache.peek_memory(tokens.tobytes() if data is None else data, namespace)

    def insert(self, tokens: IntArray, namespace: str, data: bytes | None = None) -> None:
        """The node is about to hold these tokens. ``data``: see :meth:`match`."""
        num_pages = min(len(tokens) // self._page_size, self._max_pages)
        whole = tokens[: num_pages * self._page_size]
        pages = np.zeros(num_pages, dtype=np.int32)  # page ids mean nothing here
        if data is not None and len(tokens) - len(whole) >= self._page_size:
            data = data[: whole.nbytes]  # the pool holds no more of it
        self._cache.insert(whole, pages, namespace, data=data)
        excess = self._cache.evictable_pages - self._max_pages
        if excess > 0:
            self._cache.evict(excess)
