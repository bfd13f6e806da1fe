"""The interface through which a radix cache reports stored and evicted pages."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PageRun(NamedTuple):
    """Consecutive pages of one prefix.

    Attributes:
        parent: hash of the page before the first one; empty at the start of a prompt.
        hashes: joined hashes of the pages.
        tokens: memory of their int32 tokens.
    """

    parent: bytes
    hashes: bytes
    tokens: bytes
    namespace: str


class CacheListener(Protocol):
    """Hears of every change of a cache, in order.

    A listener must not use the cache, because we call it while the cache changes.
    """

    def on_stored(self, run: PageRun) -> None:
        """Handle inserted pages."""

    def on_removed(self, hashes: bytes) -> None:
        """Handle evicted pages, given their joined hashes."""
