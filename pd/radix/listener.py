"""Interface to which a radix cache reports the pages that it keeps and evicts."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PageRun(NamedTuple):
    """Consecutive pages of one prefix.

    ``parent``: hash of the page before the first, empty at the beginning of a prompt. ``hashes``:
    those of the pages, joined. ``tokens``: memory of their int32 tokens.
    """

    parent: bytes
    hashes: bytes
    tokens: bytes
    namespace: str


class CacheListener(Protocol):
    """Called for every change of a cache, in order and while the cache changes, so it must not use
    the cache."""

    def stored(self, run: PageRun) -> None:
        """Pages were inserted."""

    def removed(self, hashes: bytes) -> None:
        """Pages were evicted; ``hashes``: theirs, joined."""
