"""Changes of a radix cache in their order, with parents and tokens, for other routers than pd's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.radix.prefix_hashes import HASH_BYTES

if TYPE_CHECKING:
    from pd.radix.cache import RadixCache
    from pd.radix.listener import PageRun


class BlockChanges(NamedTuple):
    """Changes since the last time, in order: a run of pages that were stored, or the joined hashes
    of pages that were removed.

    ``complete``: forget all that was known before, ``changes`` are everything that is cached.
    """

    changes: list[PageRun | bytes]
    complete: bool


class BlockLog:
    """Listens to a cache and collects changes until they are taken.

    The first that are taken are all that is cached. So are the next ones when changes came to more
    pages than ``max_pages`` before anybody took them, and after :meth:`start_over`.
    """

    def __init__(self, cache: RadixCache, max_pages: int) -> None:
        self._cache = cache
        self._max_pages = max_pages
        self._changes: list[PageRun | bytes] = []
        self._num_pages = 0
        self._complete = True
        cache.listen(self)

    def stored(self, run: PageRun) -> None:
        """Pages were inserted."""
        self._add(run, run.hashes)

    def removed(self, hashes: bytes) -> None:
        """Pages were evicted."""
        self._add(hashes, hashes)

    def start_over(self) -> None:
        """The next changes are all that is cached."""
        self._complete = True
        self._changes, self._num_pages = [], 0

    def take(self) -> BlockChanges | None:
        """The changes since the last call; None without any."""
        complete, changes = self._complete, self._changes
        if complete:
            changes.extend(self._cache.runs())
        self._complete, self._changes, self._num_pages = False, [], 0
        return BlockChanges(changes, complete) if changes or complete else None

    def _add(self, change: PageRun | bytes, hashes: bytes) -> None:
        if self._complete:
            return
        self._num_pages += len(hashes) // HASH_BYTES
        if self._num_pages > self._max_pages:
            self.start_over()
        else:
            self._changes.append(change)
