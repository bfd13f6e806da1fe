"""Changes of a radix cache in order, with parents and tokens, for routers other than ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.radix.prefix_hashes import HASH_BYTES

if TYPE_CHECKING:
    from pd.radix.cache import RadixCache
    from pd.radix.listener import PageRun


class BlockChanges(NamedTuple):
    """Changes since the last time, in order.

    Attributes:
        changes: for each change, a run of stored pages or the joined hashes of removed pages.
        is_complete: whether ``changes`` describe the whole cache, so you must forget all earlier
            ones.
    """

    changes: list[PageRun | bytes]
    is_complete: bool


class BlockLog:
    """Listens to a cache, and collects changes until you take them.

    The first changes describe the whole cache. So do the next ones after :meth:`restart`, or after
    more than ``max_pages`` pages changed before you took them.
    """

    def __init__(self, cache: RadixCache, max_pages: int) -> None:
        self._cache = cache
        self._max_pages = max_pages
        self._changes: list[PageRun | bytes] = []
        self._num_pages = 0
        self._complete = True
        cache.add_listener(self)

    def on_stored(self, run: PageRun) -> None:
        """Note inserted pages."""
        self._add_change(run, run.hashes)

    def on_removed(self, hashes: bytes) -> None:
        """Note evicted pages."""
        self._add_change(hashes, hashes)

    def restart(self) -> None:
        """Let the next changes describe the whole cache."""
        self._complete = True
        self._changes, self._num_pages = [], 0

    def take_changes(self) -> BlockChanges | None:
        """Return the changes since the last call, or None without any."""
        complete, changes = self._complete, self._changes
        if complete:
            changes.extend(self._cache.iter_runs())
        self._complete, self._changes, self._num_pages = False, [], 0
        return BlockChanges(changes, complete) if changes or complete else None

    def _add_change(self, change: PageRun | bytes, hashes: bytes) -> None:
        if self._complete:
            return
        self._num_pages += len(hashes) // HASH_BYTES
        if self._num_pages > self._max_pages:
            self.restart()
        else:
            self._changes.append(change)
