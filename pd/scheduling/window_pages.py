"""Pages of layers with a sliding window. They come from the same pool as all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.engine.page_allocator import NO_PAGE, PageState

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Several

    import numpy.typing as npt

    from pd.engine.page_allocator import PageAllocator
    from pd.radix import RadixCache
    from pd.scheduling.request import Sequence

    IntArray = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

# A prompt that goes to another node keeps so many more tokens than the window, because pages of
# that node may begin earlier.
SPARE_TOKENS = 256


def find_first_kept(num_tokens: int, window: int) -> int:
    """Return the first token of a prompt whose KV a prefill node keeps for the decode node."""
    return max(0, num_tokens - window - SPARE_TOKENS)


class WindowPages:
    """Owns the pages of layers with sliding windows. The caller holds the node's lock.

    A token sees only the last tokens before it. So a sequence gives up a page when its next token
    does not see it any more. A page in the radix tree then stays cached, but may be evicted
    although the prefix and its other pages are in use. A prefix matches only if the pages of its
    last window are still cached.

    The tree has a ticket for each page instead of the page itself. A ticket is valid as long as the
    page stays in the tree, and the allocator gives it no other owner. When we evict a page, its
    ticket becomes invalid, wherever it is in the tree. So we need not find it.

    We evict pages in two classes, each in the order in which sequences gave them up. Pages inside
    of a sequence that went on come first, because they help only prompts that branch off right
    there. Those at the end of a sequence, and those that were matched before, come last.

    Args:
        windows: number of tokens that each window holds, for each page table after the first.
    """

    def __init__(
        self, windows: Several[int], allocator: PageAllocator, radix: RadixCache, page_size: int
    ) -> None:
        self.windows = tuple(windows)
        self._allocator, self._radix, self._page_size = allocator, radix, page_size
        count = allocator.num_pages
        # The valid ticket of each page, or -1; how many sequences use it there; whether it matched.
        self._tickets = np.full(count, -1, dtype=np.int64)
        self._users = np.zeros(count, dtype=np.int32)
        self._matched = np.zeros(count, dtype=np.bool_)
        self._next_ticket = 0
        # Cached pages without users, in the order of their eviction.
        self._inner: dict[int, None] = {}
        self._ends: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        """Number of cached pages that no sequence uses."""
        return len(self._inner) + len(self._ends)

    @property
    def num_inner(self) -> int:
        """Number of evictable pages that are worth least."""
        return len(self._inner)

    @property
    def num_locked(self) -> int:
        """Number of cached pages that sequences use."""
        return int(np.count_nonzero(self._tickets >= 0)) - self.num_evictable

    def first_page(self, num_tokens: int, window: int) -> int:
        """Return the first page that a sequence needs whose first ``num_tokens`` are computed.

        We count from the last whole page, because others will match up to there. The last token may
        be computed again, so it has its window, too.
        """
        whole = num_tokens - num_tokens % self._page_size
        return max(0, whole - window) // self._page_size

    def count_new(self, old: int, new: int, num_tokens: int) -> int:
        """Count the pages that :meth:`add_pages` takes for ``new`` instead of ``old`` pages of each
        table."""
        firsts = (self.first_page(num_tokens, window) for window in self.windows)
        return sum(max(0, new - max(old, first)) for first in firsts)

    # ---- matching

    def count_usable(
        self, tokens: IntArray, namespace: str, max_tokens: int, length: int | None
    ) -> int:
        """Count the leading tokens of a prompt whose pages are cached, and those of the last window
        before them, too.

        Args:
            length: of a prompt that goes to another node, which needs :func:`find_first_kept`.
        """
        tickets = self._radix.join_windows(tokens, namespace, max_tokens=max_tokens)
        size, num_pages = self._page_size, tickets.shape[1]
        ends = np.arange(num_pages + 1)
        usable = np.ones(num_pages + 1, dtype=np.bool_)
        for window, row in zip(self.windows, tickets, strict=True):
            missing = np.where(self._is_valid(row), -1, ends[:-1])
            # The last missing page before each end.
            last = np.maximum.accumulate(np.concatenate(([-1], missing)))
            firsts = np.maximum(ends * size - window, 0) // size
            if length is not None:
                firsts = np.minimum(firsts, find_first_kept(length, window) // size)
            usable &= last < firsts
        return int(np.flatnonzero(usable)[-1]) * size

    def _is_valid(self, tickets: Int64Array) -> BoolArray:
        """Return for each ticket whether its page is still cached."""
        valid: BoolArray = (tickets >= 0) & (self._tickets[self._page_of(tickets)] == tickets)
        return valid

    def _page_of(self, tickets: Int64Array) -> Int64Array:
        pages: Int64Array = tickets % self._allocator.num_pages
        return pages

    def needed_from(self, length: int, window: int) -> int:
        """Return the first token of a prompt that a decode node needs in layers with a window."""
        first = self.first_page(length, window) * self._page_size
        return max(first, find_first_kept(length, window))

    def use_cached(self, sequence: Sequence, num_tokens: int, length: int | None) -> None:
        """Give a sequence without pages those of the windows before its first ``num_tokens``, which
        :meth:`count_usable` counted; ``length`` as there."""
        tickets = self._radix.join_windows(
            sequence.ids, sequence.request.namespace, max_tokens=num_tokens
        )
        pages = np.where(self._is_valid(tickets), self._page_of(tickets), NO_PAGE)
        for window, row in zip(self.windows, pages, strict=True):
            first = self.first_page(num_tokens, window)
            if length is not None:
                first = min(first, find_first_kept(length, window) // self._page_size)
            row[:first] = NO_PAGE
            used = row[first:]
            assert (used != NO_PAGE).all(), f"pages of a matched window are missing: {row}"
            for page in used[self._users[used] == 0].tolist():
                self._inner.pop(page, None)
                self._ends.pop(page, None)
            self._users[used] += 1
            self._matched[used] = True
        sequence.window_pages = pages.astype(np.int32)
        sequence.window_owned = np.zeros(pages.shape, dtype=np.bool_)
        sequence.window_begins = (0,) * len(self.windows)

    # ---- growing

    def add_pages(
        self, sequence: Sequence, num_pages: int, num_tokens: int, state: PageState
    ) -> None:
        """Extend the tables of a sequence to ``num_pages``, except by pages before
        :meth:`first_page` of ``num_tokens``. There must be enough free ones."""
        rows = []
        old = sequence.window_pages.shape[1]
        if not old:
            self.clear_tables(sequence)
        for window in self.windows:
            added = np.full(num_pages - old, NO_PAGE, dtype=np.int32)
            new = added[max(0, self.first_page(num_tokens, window) - old) :]
            new[:] = self._allocator.allocate_pages(len(new), state)
            rows.append(added)
        added = np.stack(rows)
        sequence.window_pages = np.concatenate([sequence.window_pages, added], axis=1)
        sequence.window_owned = np.concatenate([sequence.window_owned, added != NO_PAGE], axis=1)
        # Pages found in the cache may lie before the window of the next token, too.
        self.drop_passed(sequence, num_tokens, None)

    def clear_tables(self, sequence: Sequence) -> None:
        """Make the tables of a sequence empty. The caller has moved or given up its pages."""
        shape = len(self.windows), 0
        sequence.window_pages = np.empty(shape, dtype=np.int32)
        sequence.window_owned = np.empty(shape, dtype=np.bool_)
        sequence.window_begins = (0,) * len(self.windows)
        sequence.first_whole_page = 0

    def list_owned(self, sequence: Sequence) -> IntArray:
        """Return the pages that a sequence alone holds."""
        return sequence.window_pages[sequence.window_owned]

    # ---- caching

    def cache_pages(self, sequence: Sequence, num_pages: int) -> None:
        """Give the tree the pages it lacks among the first ``num_pages`` of a sequence, whose
        handle ends there. The sequence still uses them.

        A page is whole only if all its tokens arrived or were computed.
        """
        owned = sequence.window_owned[:, :num_pages]
        given = np.flatnonzero(owned.any(axis=0))
        if not len(given):
            return
        assert sequence.handle is not None
        owned = owned.copy()
        owned[:, : sequence.first_whole_page] = False
        mine = sequence.window_owned.copy()
        for begin, part in self._radix.iter_windows(sequence.handle, num_pages):
            columns = slice(begin, begin + part.shape[1])
            new = owned[:, columns] & ~self._is_valid(part)
            pages = sequence.window_pages[:, columns][new]
            if len(pages):
                self._allocator.move_pages(pages, PageState.OWNED, PageState.IN_TREE)
                part[new] = self._issue_tickets(pages)
                mine[:, columns][new] = False
            if begin <= given[0]:
                break
        sequence.window_owned = mine

    def _issue_tickets(self, pages: IntArray) -> Int64Array:
        self._next_ticket += self._allocator.num_pages
        tickets: Int64Array = self._next_ticket + pages.astype(np.int64)
        self._tickets[pages] = tickets
        self._users[pages], self._matched[pages] = 1, False
        return tickets

    def keep_end(self, sequence: Sequence) -> None:
        """Evict the last window of a sequence as late as pages that matched."""
        for row, owned in zip(sequence.window_pages, sequence.window_owned, strict=True):
            self._matched[row[(row != NO_PAGE) & ~owned]] = True

    # ---- giving up

    def drop_passed(self, sequence: Sequence, num_tokens: int, length: int | None) -> None:
        """Give up the pages that a sequence does not need after its first ``num_tokens``. No
        transfer may read them.

        Args:
            length: as in :meth:`count_usable`.
        """
        pages, size = sequence.window_pages, self._page_size
        firsts = []
        for window in self.windows:
            first = self.first_page(num_tokens, window)
            if length is not None:
                first = min(first, find_first_kept(length, window) // size)
            firsts.append(min(first, pages.shape[1]))
        if all(first <= begin for first, begin in zip(firsts, sequence.window_begins, strict=True)):
            return
        kept, owned = pages.copy(), sequence.window_owned.copy()
        for row, first in enumerate(firsts):
            passed = slice(sequence.window_begins[row], first)
            self._give_up(pages[row, passed], owned[row, passed], is_end=False)
            kept[row, passed], owned[row, passed] = NO_PAGE, False
        sequence.window_begins = tuple(firsts)
        sequence.window_pages, sequence.window_owned = kept, owned

    def drop_cached(self, sequence: Sequence) -> None:
        """Give up the pages of a sequence that are in the tree. The caller handles the others."""
        for pages, owned in zip(sequence.window_pages, sequence.window_owned, strict=True):
            self._give_up(pages[~owned], owned[~owned], is_end=True)

    def _give_up(self, pages: IntArray, owned: BoolArray, *, is_end: bool) -> None:
        self._allocator.free_pages(pages[owned], PageState.OWNED)
        cached = pages[~owned & (pages != NO_PAGE)]
        self._users[cached] -= 1
        for page in cached[self._users[cached] == 0].tolist():
            ends = is_end or self._matched[page]
            (self._ends if ends else self._inner)[page] = None

    # ---- evicting

    def evict_inner(self, count: int) -> int:
        """Free up to ``count`` pages that are worth least, and return how many."""
        return self._evict(self._inner, count)

    def evict_ends(self, count: int) -> int:
        """Free up to ``count`` of the other evictable pages, and return how many."""
        return self._evict(self._ends, count)

    def evict_all(self) -> int:
        """Free all evictable pages, and return how many."""
        return self.evict_inner(len(self._inner)) + self.evict_ends(len(self._ends))

    def _evict(self, pages: dict[int, None], count: int) -> int:
        victims = np.fromiter(pages, np.int32, min(count, len(pages)))
        for page in victims.tolist():
            del pages[page]
        self._free(victims)
        return len(victims)

    def _free(self, pages: IntArray) -> None:
        assert not self._users[pages].any(), f"sequences use evicted pages: {pages}"
        self._tickets[pages] = -1
        self._allocator.free_pages(pages, PageState.IN_TREE)

    def free_dropped(self) -> int:
        """Free the pages of prefixes that the tree has dropped, and return how many."""
        count = 0
        for tickets in self._radix.take_dropped_windows():
            valid = self._is_valid(tickets)
            pages = self._page_of(tickets)[valid].astype(np.int32)
            for page in pages.tolist():
                self._inner.pop(page, None)
                self._ends.pop(page, None)
            self._free(pages)
            count += len(pages)
        return count

    # ---- checks

    def check_owners(self, sequences: Iterable[Sequence]) -> IntArray:
        """Raise AssertionError unless each cached page has the users and the class that it should
        have. Returns all cached pages."""
        users = np.zeros_like(self._users)
        for sequence in sequences:
            self._check_sequence(sequence)
            for row, owned in zip(sequence.window_pages, sequence.window_owned, strict=True):
                users[row[~owned & (row != NO_PAGE)]] += 1
        assert np.array_equal(users, self._users), "pages of windows have other users"
        found = [node.windows for node in self._radix.iter_nodes() if node.windows is not None]
        tickets = np.concatenate([np.empty(0, np.int64), *(part.ravel() for part in found)])
        pages = np.sort(self._page_of(tickets[self._is_valid(tickets)])).astype(np.int32)
        cached = np.flatnonzero(self._tickets >= 0).astype(np.int32)
        assert np.array_equal(pages, cached), "tickets differ from those in the tree"
        idle = sorted([*self._inner, *self._ends])
        assert idle == cached[users[cached] == 0].tolist(), "evictable pages of windows differ"
        return cached

    def _check_sequence(self, sequence: Sequence) -> None:
        shape = len(self.windows), len(sequence.pages)
        assert sequence.window_pages.shape == sequence.window_owned.shape == shape, (
            f"page tables of shape {sequence.window_pages.shape}, not {shape}"
        )
        for row, begin in zip(sequence.window_pages, sequence.window_begins, strict=True):
            held = row != NO_PAGE
            assert not held[:begin].any(), "a page before the window is held"
            assert (np.diff(held.astype(np.int8)) >= 0).all(), f"a window has a gap: {row}"
