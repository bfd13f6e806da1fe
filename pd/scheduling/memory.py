"""Pages of sequences: matched from the radix tree, allocated, cached, released."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.engine.page_allocator import PageAllocator, PageState

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from pd.core.request import Sequence
    from pd.radix import RadixCache
    from pd.speculative.ngram_cache import NgramCache

    IntArray = npt.NDArray[np.int32]

# A request that has lacked pages for so long gets them before others of its node.
LACKING_SECONDS = 1.0


class Memory:
    """The pool's pages and the radix tree that caches them. The caller holds the node's lock.

    A sequence's page table never changes under it: when its tokens are inserted into the tree and
    the tree has them already, the sequence keeps its own copies until it is released, so that a
    launched step or a running transfer reads what it was given.

    Args:
        ngram_cache: is given the tokens of what is cached, or is None.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        radix: RadixCache,
        ngram_cache: NgramCache | None = None,
    ) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.radix = radix
        self._ngram_cache = ngram_cache

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.allocator.num_pages

    @property
    def available(self) -> int:
        """Pages that an allocation can have: free ones and those it may evict."""
        return self.allocator.count(PageState.FREE) + self.radix.evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def missing(self, sequence: Sequence, num_tokens: int, max_cached: int) -> int:
        """Pages that a sequence without pages would lack for ``num_tokens`` after :meth:`match`.

        Unlike a match it leaves no trace, so it may be asked again and again.
        """
        return self.pages_for(num_tokens) - self.cached(sequence, max_cached) // self.page_size

    def cached(self, sequence: Sequence, max_tokens: int) -> int:
        """Leading tokens of a sequence that :meth:`match` would find; leaves no trace."""
        namespace = sequence.request.namespace
        return self.radix.peek(sequence.ids, namespace, max_tokens=max_tokens)

    def match(self, sequence: Sequence, max_tokens: int) -> int:
        """Give a sequence without pages its cached prefix, locked; returns its tokens."""
        assert sequence.handle is None and len(sequence.pages) == 0
        namespace = sequence.request.namespace
        found = self.radix.match(sequence.ids, namespace, max_tokens=max_tokens)
        self.radix.lock(found.handle)
        sequence.handle = found.handle
        sequence.pages = np.array(found.pages, dtype=np.int32)
        sequence.owned = np.zeros(len(found.pages), dtype=np.bool_)
        sequence.num_computed = len(found.pages) * self.page_size
        sequence.num_noted = max(sequence.num_noted, sequence.num_computed)
        return sequence.num_computed

    def grow(self, sequence: Sequence, num_tokens: int, state: PageState = PageState.OWNED) -> bool:
        """Make the page table cover ``num_tokens``, evicting as needed; False if impossible."""
        missing = self.pages_for(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        shortage = missing - self.allocator.count(PageState.FREE)
        if shortage > 0:
            self.allocator.free(self.radix.evict(shortage), PageState.IN_TREE)
        pages = self.allocator.allocate(missing, state)
        sequence.pages = np.concatenate([sequence.pages, pages])
        sequence.owned = np.concatenate([sequence.owned, np.ones(missing, dtype=np.bool_)])
        return True

    def cache(self, sequence: Sequence) -> None:
        """Insert the computed tokens' whole pages into the tree and keep them locked there."""
        if self._ngram_cache is not None:
            self._note(sequence, self._ngram_cache)
        count = sequence.num_computed // self.page_size
        if count == 0:
            return
        inserted = self.radix.insert(
            sequence.ids[: count * self.page_size],
            sequence.pages[:count],
            sequence.request.namespace,
            priority=sequence.request.priority,
        )
        given = slice(inserted.existing_pages, count)
        self.allocator.move(sequence.pages[given], PageState.OWNED, PageState.IN_TREE)
        sequence.owned[given] = False
        self.radix.lock(inserted.handle)
        if sequence.handle is not None:
            self.radix.unlock(sequence.handle)
        sequence.handle = inserted.handle

    @staticmethod
    def _note(sequence: Sequence, ngram_cache: NgramCache) -> None:
        """Give the n-gram cache the tokens that it was not given yet: those computed of a prompt,
        and all of an output. What the prefix cache had is not computed again, so it costs nothing
        here either."""
        stop = sequence.num_tokens if sequence.decodes else sequence.num_computed
        if stop > sequence.num_noted:
            namespace = sequence.request.namespace
            ngram_cache.add(namespace, sequence.ids[:stop], sequence.num_noted)
            sequence.num_noted = stop

    def own_reserved(self, sequence: Sequence) -> None:
        """Make reserved pages the sequence's own, whether or not KV has arrived in them."""
        own = sequence.pages[sequence.owned]
        self.allocator.move(own, PageState.RESERVED, PageState.OWNED)

    def release(self, sequence: Sequence) -> None:
        """Give up all pages of a sequence; what is in the tree stays cached."""
        self.allocator.free(sequence.pages[sequence.owned], PageState.OWNED)
        self._forget(sequence)

    def quarantine(self, sequence: Sequence) -> IntArray:
        """Give up reserved pages that a transfer may still write; returns them for
        :meth:`end_quarantine`."""
        pages = sequence.pages[sequence.owned]
        self.allocator.move(pages, PageState.RESERVED, PageState.QUARANTINED)
        self._forget(sequence)
        return pages

    def end_quarantine(self, pages: IntArray) -> None:
        """Nothing can write to these pages any more."""
        self.allocator.free(pages, PageState.QUARANTINED)

    def _forget(self, sequence: Sequence) -> None:
        if sequence.handle is not None:
            self.radix.unlock(sequence.handle)
        sequence.handle = None
        sequence.pages = sequence.pages[:0]
        sequence.owned = sequence.owned[:0]
        sequence.num_computed = 0

    def flush(self) -> int:
        """Drop everything cached and unlocked, and the n-gram cache; returns the number of pages
        freed."""
        if self._ngram_cache is not None:
            self._ngram_cache.clear()
        pages = self.radix.clear()
        self.allocator.free(pages, PageState.IN_TREE)
        return len(pages)

    def counts(self) -> dict[str, int]:
        """Pages by owner, as ``/server_info`` shows them; they add up to ``total``."""
        count = self.allocator.count
        return {
            "total": self.num_pages,
            "free": count(PageState.FREE),
            "cached": self.radix.evictable_pages,
            "locked": self.radix.locked_pages + count(PageState.OWNED),
            "reserved": count(PageState.RESERVED),
            "quarantined": count(PageState.QUARANTINED),
        }

    def check(self, sequences: Iterable[Sequence], quarantined: Iterable[IntArray]) -> None:
        """Raise AssertionError unless each page has exactly the owner that the states say."""
        self.allocator.check()
        self.radix.check()
        cached = np.sort(self.radix.pages())
        assert np.array_equal(cached, self.allocator.pages_in(PageState.IN_TREE)), "tree differs"
        owned = [sequence.pages[sequence.owned] for sequence in sequences]
        held = np.sort(np.concatenate([*owned, np.empty(0, dtype=np.int32)]))
        expected = np.union1d(
            self.allocator.pages_in(PageState.OWNED), self.allocator.pages_in(PageState.RESERVED)
        )
        assert np.array_equal(held, expected), "sequences hold other pages than the states say"
        waiting = np.sort(np.concatenate([*quarantined, np.empty(0, dtype=np.int32)]))
        assert np.array_equal(waiting, self.allocator.pages_in(PageState.QUARANTINED)), "quarantine"
