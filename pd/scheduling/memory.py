"""Pages of sequences: matches, allocates, caches and releases them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.engine.page_allocator import PageAllocator, PageState
from pd.radix import check_invariants
from pd.scheduling.prefix_leases import PrefixLeases
from pd.scheduling.window_pages import WindowPages

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Several

    import numpy.typing as npt

    from pd.radix import RadixCache
    from pd.scheduling.request import Request, Sequence
    from pd.speculative.ngram_cache import NgramCache

    IntArray = npt.NDArray[np.int32]

# A request that has lacked pages for so long gets them before others on its node.
LACKING_SECONDS = 1.0


class Memory:
    """Owns the pool's pages and the radix tree. The caller holds the node's lock.

    Entries of a page table never change, because a launched step or a transfer may be reading them.
    If we insert tokens the tree already has, the sequence therefore keeps its own copies until we
    release it.

    Args:
        ngram_cache: receives all computed tokens; None without one.
        caches_prefixes: whether computed tokens go into the tree. Otherwise it stays empty.
        windows: sliding windows with page tables of their own.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        radix: RadixCache,
        ngram_cache: NgramCache | None = None,
        *,
        caches_prefixes: bool = True,
        windows: Several[int] = (),
    ) -> None:
        self.page_size = page_size
        self.caches_prefixes = caches_prefixes
        self.allocator = PageAllocator(num_pages)
        self.radix = radix
        self.windows = None
        if windows:
            self.windows = WindowPages(windows, self.allocator, radix, page_size)
        self.prefix_leases = PrefixLeases(radix, num_pages)
        self._ngram_cache = ngram_cache

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool."""
        return self.allocator.num_pages

    @property
    def num_tables(self) -> int:
        """Number of page tables of a sequence. As many pages hold one page of new tokens."""
        return 1 if self.windows is None else 1 + len(self.windows.windows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pool holds, if no page was given up for a window."""
        return self.num_pages // self.num_tables * self.page_size

    @property
    def num_available(self) -> int:
        """Number of pages an allocation can get: free pages and evictable ones."""
        free = self.allocator.count_pages(PageState.FREE) + self.radix.evictable_pages
        return free if self.windows is None else free + self.windows.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages in each table for ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def count_missing(
        self, sequence: Sequence, num_tokens: int, max_cached: int, received: int = 0
    ) -> int:
        """Count the pages a sequence without pages still needs after :meth:`match_prefix`.

        Unlike a match this changes nothing, so you may call it again and again.

        Args:
            received: as in :meth:`grow_pages`.
        """
        cached = self.count_cached(sequence, max_cached) // self.page_size
        return self._count_new(cached, self.pages_for(num_tokens), received)

    def count_growth(self, sequence: Sequence, num_tokens: int, received: int = 0) -> int:
        """Count the pages that :meth:`grow_pages` needs."""
        return self._count_new(len(sequence.pages), self.pages_for(num_tokens), received)

    def _count_new(self, old: int, new: int, received: int) -> int:
        if new <= old:
            return 0
        if self.windows is None:
            return new - old
        return new - old + self.windows.count_new(old, new, received)

    def count_cached(self, sequence: Sequence, max_tokens: int) -> int:
        """Count the leading tokens that :meth:`match_prefix` would find. This changes nothing."""
        namespace = sequence.request.namespace
        if self.windows is None:
            return self.radix.count_cached(sequence.ids, namespace, max_tokens=max_tokens)
        length = _find_sent_length(sequence)
        return self.windows.count_usable(sequence.ids, namespace, max_tokens, length)

    def match_prefix(self, sequence: Sequence, max_tokens: int) -> int:
        """Lock the cached prefix of a sequence without pages, and return its number of tokens."""
        assert sequence.handle is None and len(sequence.pages) == 0
        namespace = sequence.request.namespace
        if self.windows is not None:
            max_tokens = self.count_cached(sequence, max_tokens)
            self.windows.use_cached(sequence, max_tokens, _find_sent_length(sequence))
        match = self.radix.match_prefix(sequence.ids, namespace, max_tokens=max_tokens)
        self.radix.lock(match.handle)
        sequence.handle = match.handle
        sequence.pages = np.array(match.pages, dtype=np.int32)
        sequence.owned = np.zeros(len(match.pages), dtype=np.bool_)
        sequence.num_computed = len(match.pages) * self.page_size
        sequence.num_noted = max(sequence.num_noted, sequence.num_computed)
        return sequence.num_computed

    def grow_pages(
        self,
        sequence: Sequence,
        num_tokens: int,
        state: PageState = PageState.OWNED,
        received: int = 0,
    ) -> bool:
        """Extend the page tables to ``num_tokens``, and evict pages as needed.

        Args:
            received: number of leading tokens whose KV comes from another node, so windows get no
                pages for tokens that the next one does not see.

        Returns:
            False if there are not enough pages. Then nothing has changed.
        """
        missing = self.pages_for(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        needed = self.count_growth(sequence, num_tokens, received)
        if needed > self.num_available:
            return False
        shortage = needed - self.allocator.count_pages(PageState.FREE)
        if shortage > 0:
            self.prefix_leases.end_expired()
            self._evict_pages(shortage)
        pages = self.allocator.allocate_pages(missing, state)
        sequence.pages = np.concatenate([sequence.pages, pages])
        sequence.owned = np.concatenate([sequence.owned, np.ones(missing, dtype=np.bool_)])
        if self.windows is not None:
            self.windows.add_pages(sequence, len(sequence.pages), received, state)
        return True

    def _evict_pages(self, count: int) -> None:
        """Free ``count`` pages or more. There must be enough evictable ones."""
        windows = self.windows
        if windows is None:
            self.allocator.free_pages(self.radix.evict_pages(count), PageState.IN_TREE)
            return
        while count > 0:
            if windows.num_inner:
                count -= windows.evict_inner(count)
            elif self.radix.evictable_pages:
                pages = self.radix.evict_pages(count)
                self.allocator.free_pages(pages, PageState.IN_TREE)
                count -= len(pages) + windows.free_dropped()
            else:
                count -= windows.evict_ends(count)

    def drop_passed(self, sequence: Sequence) -> None:
        """Give up pages of windows that the sequence does not need any more. The step that computed
        its ``num_computed`` tokens is accounted for."""
        if self.windows is not None:
            self.windows.drop_passed(sequence, sequence.num_computed, _find_sent_length(sequence))

    def cache_tokens(self, sequence: Sequence) -> None:
        """Insert the whole pages of the computed tokens into the tree, and lock them there.

        Without a prefix cache the sequence keeps them instead.
        """
        if self._ngram_cache is not None:
            self._note_ngrams(sequence, self._ngram_cache)
        count = sequence.num_computed // self.page_size
        if count == 0 or not self.caches_prefixes:
            return
        inserted = self.radix.insert_prefix(
            sequence.ids[: count * self.page_size],
            sequence.pages[:count],
            sequence.request.namespace,
            priority=sequence.request.priority,
        )
        given = slice(inserted.existing_pages, count)
        self.allocator.move_pages(sequence.pages[given], PageState.OWNED, PageState.IN_TREE)
        sequence.owned[given] = False
        self.radix.lock(inserted.handle)
        if sequence.handle is not None:
            self.radix.unlock(sequence.handle)
        sequence.handle = inserted.handle
        if self.windows is not None:
            self.windows.cache_pages(sequence, count)

    def lease_prompt(self, request: Request) -> None:
        """Keep the cached pages of a computed prompt as long as its client asks, within limits."""
        sequence = request.sequence
        if request.prefix_lease and sequence.handle is not None and self.caches_prefixes:
            if self.windows is not None:
                self.windows.keep_end(sequence)
            pages = sequence.num_computed // self.page_size
            self.prefix_leases.add_lease(
                request.owner, request.rid, sequence.handle, pages, request.prefix_lease
            )

    @staticmethod
    def _note_ngrams(sequence: Sequence, ngram_cache: NgramCache) -> None:
        """Give the n-gram cache computed prompt tokens and output it does not have.

        We skip tokens from the prefix cache, because the n-gram cache got them from an earlier
        sequence.
        """
        stop = sequence.num_tokens if sequence.is_decoding else sequence.num_computed
        if stop > sequence.num_noted:
            namespace = sequence.request.namespace
            ngram_cache.add_text(namespace, sequence.ids[:stop], sequence.num_noted)
            sequence.num_noted = stop

    def count_held(
        self, sequence: Sequence, cached: int, group_windows: Several[int]
    ) -> tuple[int, ...]:
        """Count the leading tokens of a prompt that another node need not send, for each group of
        planes.

        Args:
            sequence: has pages for the whole prompt, the first ``cached`` tokens from the cache.
            group_windows: window of each group of planes; 0 for a group without one.
        """
        windows, length = self.windows, len(sequence.request.prompt)
        if windows is None:
            return (cached,) * len(group_windows)
        firsts = [windows.needed_from(length, window) if window else 0 for window in group_windows]
        sequence.first_whole_page = self.pages_for(max(firsts))
        return tuple(max(cached, first) for first in firsts)

    def own_reserved(self, sequence: Sequence) -> None:
        """Turn reserved pages into owned ones, whether or not KV has arrived in them."""
        own = self._list_owned(sequence)
        self.allocator.move_pages(own, PageState.RESERVED, PageState.OWNED)

    def _list_owned(self, sequence: Sequence) -> IntArray:
        """Return the pages of all tables that a sequence alone holds."""
        own = sequence.pages[sequence.owned]
        if self.windows is None:
            return own
        return np.concatenate((own, self.windows.list_owned(sequence)))

    def release_pages(self, sequence: Sequence) -> None:
        """Release all pages of a sequence. Pages in the tree stay cached."""
        self.allocator.free_pages(self._list_owned(sequence), PageState.OWNED)
        self._drop_pages(sequence)

    def quarantine_pages(self, sequence: Sequence) -> IntArray:
        """Take reserved pages away from a sequence while a transfer may still write to them.

        Returns:
            The pages, for :meth:`end_quarantine`.
        """
        pages = self._list_owned(sequence)
        self.allocator.move_pages(pages, PageState.RESERVED, PageState.QUARANTINED)
        self._drop_pages(sequence)
        return pages

    def end_quarantine(self, pages: IntArray) -> None:
        """Free quarantined pages, once nothing can write to them."""
        self.allocator.free_pages(pages, PageState.QUARANTINED)

    def _drop_pages(self, sequence: Sequence) -> None:
        if self.windows is not None:
            self.windows.drop_cached(sequence)
            self.windows.clear_tables(sequence)
        if sequence.handle is not None:
            self.radix.unlock(sequence.handle)
        sequence.handle = None
        sequence.pages = sequence.pages[:0]
        sequence.owned = sequence.owned[:0]
        sequence.num_computed = 0

    def flush_cache(self) -> int:
        """Drop the n-gram cache and all unlocked cached pages, and return how many we freed."""
        if self._ngram_cache is not None:
            self._ngram_cache.clear_texts()
        pages = self.radix.clear()
        self.allocator.free_pages(pages, PageState.IN_TREE)
        if self.windows is None:
            return len(pages)
        return len(pages) + self.windows.free_dropped() + self.windows.evict_all()

    def count_pages(self) -> dict[str, int]:
        """Count pages by owner for ``/server_info``. They add up to ``total``."""
        count = self.allocator.count_pages
        cached, locked = self.radix.evictable_pages, self.radix.locked_pages
        if self.windows is not None:
            cached += self.windows.num_evictable
            locked += self.windows.num_locked
        return {
            "total": self.num_pages,
            "free": count(PageState.FREE),
            "cached": cached,
            "locked": locked + count(PageState.OWNED),
            "reserved": count(PageState.RESERVED),
            "quarantined": count(PageState.QUARANTINED),
        }

    def check_owners(self, sequences: Iterable[Sequence], quarantined: Iterable[IntArray]) -> None:
        """Raise AssertionError unless each page has exactly the owner named by its state."""
        self.allocator.check_invariants()
        check_invariants(self.radix)
        sequences = list(sequences)
        cached = np.sort(self.radix.list_pages())
        if self.windows is not None:
            cached = np.sort(np.concatenate((cached, self.windows.check_owners(sequences))))
        assert np.array_equal(cached, self.allocator.find_pages(PageState.IN_TREE)), "tree differs"
        owned = [self._list_owned(sequence) for sequence in sequences]
        held = np.sort(np.concatenate([*owned, np.empty(0, dtype=np.int32)]))
        expected = np.union1d(
            self.allocator.find_pages(PageState.OWNED),
            self.allocator.find_pages(PageState.RESERVED),
        )
        assert np.array_equal(held, expected), "sequences hold other pages than the states say"
        waiting = np.sort(np.concatenate([*quarantined, np.empty(0, dtype=np.int32)]))
        assert np.array_equal(waiting, self.allocator.find_pages(PageState.QUARANTINED)), (
            "quarantine"
        )


def _find_sent_length(sequence: Sequence) -> int | None:
    """Return the length of a prompt whose KV goes to another node; None for others."""
    request = sequence.request
    return None if request.outgoing is None else len(request.prompt)
