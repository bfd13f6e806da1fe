"""Changes of a radix cache by the hashes of its pages, for proxies that route by prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.radix.prefix_hashes import HASH_BYTES

if TYPE_CHECKING:
    from pd.radix.listener import PageRun


class PrefixChanges(NamedTuple):
    """Hashes of pages that were stored and removed since the last time, joined."""

    stored: bytes
    removed: bytes


class PrefixLog:
    """Listens to a cache and collects changes until they are taken; a page that was stored and
    removed meanwhile counts as removed. It never holds more than the pages that changed."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}

    def stored(self, run: PageRun) -> None:
        """Pages were inserted."""
        self._note(run.hashes, stored=True)

    def removed(self, hashes: bytes) -> None:
        """Pages were evicted."""
        self._note(hashes, stored=False)

    def _note(self, hashes: bytes, *, stored: bool) -> None:
        for start in range(0, len(hashes), HASH_BYTES):
            self._changes[hashes[start : start + HASH_BYTES]] = stored

    def take(self) -> PrefixChanges | None:
        """The changes since the last call; None without any."""
        if not self._changes:
            return None
        stored = b"".join(name for name, here in self._changes.items() if here)
        removed = b"".join(name for name, here in self._changes.items() if not here)
        self._changes.clear()
        return PrefixChanges(stored, removed)
