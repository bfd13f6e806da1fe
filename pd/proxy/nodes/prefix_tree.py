"""Estimates a node's radix cache from our own requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.radix import RadixCache

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]

MAX_TREE_TOKENS = 4 << 20


class PrefixTree:
    """A radix tree of tokens with the size of the node's pool. Evicts the least recently used
    prefix.

    We see neither requests of other proxies nor the node's evictions, so this is a guess. A wrong
    guess costs time, never correctness.
    """

    def __init__(self, page_size: int, pool_tokens: int) -> None:
        self._cache = RadixCache(page_size)
        self._page_size = page_size
        self._max_pages = max(1, min(pool_tokens, MAX_TREE_TOKENS) // page_size)

    @property
    def num_tokens(self) -> int:
        return self._cache.evictable_pages * self._page_size

    def count_cached(self, tokens: IntArray, namespace: str, data: bytes | None = None) -> int:
        """Count leading tokens presumably held by the node, in whole pages.

        ``data`` is the memory of ``tokens``, from callers asking several nodes.
        """
        return self._cache.count_cached_memory(
            tokens.tobytes() if data is None else data, namespace
        )

    def add_tokens(self, tokens: IntArray, namespace: str, data: bytes | None = None) -> None:
        """Note that the node will soon hold these tokens. ``data``: see :meth:`count_cached`."""
        num_pages = min(len(tokens) // self._page_size, self._max_pages)
        whole = tokens[: num_pages * self._page_size]
        pages = np.zeros(num_pages, dtype=np.int32)  # we do not use page ids
        if data is not None and len(tokens) - len(whole) >= self._page_size:
            data = data[: whole.nbytes]  # the pool holds no more of it
        self._cache.insert_prefix(whole, pages, namespace, data=data)
        excess = self._cache.evictable_pages - self._max_pages
        if excess > 0:
            self._cache.evict_pages(excess)
