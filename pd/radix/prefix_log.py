"""Changes of a radix cache as hashes of pages, for proxies that route by prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.radix.prefix_hashes import HASH_BYTES

if TYPE_CHECKING:
    from pd.radix.listener import PageRun


class PrefixChanges(NamedTuple):
    """Joined hashes of the pages stored and removed since the last time."""

    stored: bytes
    removed: bytes


class PrefixLog:
    """Listens to a cache, and collects changes until you take them.

    A page that was stored and removed meanwhile counts as removed.
    """

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}

    def on_stored(self, run: PageRun) -> None:
        """Note inserted pages."""
        self._note_pages(run.hashes, stored=True)

    def on_removed(self, hashes: bytes) -> None:
        """Note evicted pages."""
        self._note_pages(hashes, stored=False)

    def _note_pages(self, hashes: bytes, *, stored: bool) -> None:
        for start in range(0, len(hashes), HASH_BYTES):
            self._changes[hashes[start : start + HASH_BYTES]] = stored

    def take_changes(self) -> PrefixChanges | None:
        """Return the changes since the last call, or None without any."""
        if not self._changes:
            return None
        stored = b"".join(name for name, here in self._changes.items() if here)
        removed = b"".join(name for name, here in self._changes.items() if not here)
        self._changes.clear()
        return PrefixChanges(stored, removed)
