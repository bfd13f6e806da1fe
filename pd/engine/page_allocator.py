"""Tracks the owner of each page of a KV pool."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]

# We search for adjacent pages if an allocation is at least 1 / _SEARCH of the pool, and take them
# from at most _RUNS runs.
_SEARCH, _RUNS = 128, 8


# Stands in a page table for a page that its sequence gave up.
NO_PAGE = -1


class PageState(IntEnum):
    """The owner of a page. Each page has exactly one at any time."""

    FREE = 0
    IN_TREE = 1  # in the radix tree, locked there or not
    OWNED = 2  # a sequence alone holds it
    RESERVED = 3  # promised to a transfer that has not committed
    QUARANTINED = 4  # its request has ended, but a transfer may still write to it


class PageAllocator:
    """Allocates pages ``0 .. num_pages - 1`` and checks every change of owner.

    Methods that move pages assert their current owner. So if a page would get two owners, the
    process stops instead of corrupting a request.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._states = np.zeros(num_pages, dtype=np.uint8)
        self._counts = [num_pages, 0, 0, 0, 0]
        self._places = np.empty(num_pages, dtype=np.int64)  # scratch of :meth:`move`
        # A stack; low page numbers on top.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)

    def count_pages(self, state: PageState) -> int:
        """Return the number of pages in ``state``."""
        return self._counts[state]

    def allocate_pages(self, num_pages: int, state: PageState) -> IntArray:
        """Take ``num_pages`` free pages. The caller has checked that there are enough.

        A large allocation (at least a 128th of the pool) gets adjacent pages if possible, because
        transfers copy them as one and attention reads them in place.
        """
        free = self._counts[PageState.FREE]
        assert 0 <= num_pages <= free, f"{num_pages} pages asked for, {free} free"
        pages = self._free[free - num_pages : free][::-1].copy()
        if num_pages * _SEARCH >= self.num_pages and (np.diff(pages) != 1).any():
            pages = self._take_few_runs(num_pages, pages)
        self._states[pages] = state
        self._counts[PageState.FREE] -= num_pages
        self._counts[state] += num_pages
        return pages

    def _take_few_runs(self, num_pages: int, otherwise: IntArray) -> IntArray:
        """Take the shortest run of free pages that is long enough, or else the longest runs.
        Returns ``otherwise``, the top of the stack, if these are too short together."""
        free = self.find_pages(PageState.FREE)
        breaks = np.flatnonzero(np.diff(free) != 1) + 1
        firsts = np.concatenate(([0], breaks))
        lengths = np.diff(np.concatenate((firsts, [len(free)])))
        enough = np.flatnonzero(lengths >= num_pages)
        if len(enough):
            runs = enough[[lengths[enough].argmin()]]
        elif lengths.max() * _RUNS < num_pages:
            return otherwise
        else:
            runs = np.arange(len(lengths))
            if len(runs) > _RUNS:
                runs = np.sort(np.argpartition(lengths, -_RUNS)[-_RUNS:])
            if lengths[runs].sum() < num_pages:
                return otherwise
            runs = runs[np.argsort(-lengths[runs], kind="stable")]
        is_left = np.ones(len(free), dtype=np.bool_)
        parts, missing = [], num_pages
        for first, length in zip(firsts[runs].tolist(), lengths[runs].tolist(), strict=True):
            part = slice(first, first + min(length, missing))
            is_left[part] = False
            parts.append(free[part])
            missing -= len(parts[-1])
        self._free[: len(free) - num_pages] = free[is_left][::-1]
        return np.concatenate(parts)

    def free_pages(self, pages: IntArray, state: PageState) -> None:
        """Release pages that are in ``state``."""
        self.move_pages(pages, state, PageState.FREE)
        free = self._counts[PageState.FREE]
        # In descending order, so the lowest page is allocated first.
        self._free[free - len(pages) : free] = np.sort(pages)[::-1]

    def move_pages(self, pages: IntArray, old: PageState, new: PageState) -> None:
        """Change the owner of pages. Each must be in ``old`` and be named once."""
        if len(pages) == 0:
            return
        found = self._states[pages]
        assert (found == old).all(), f"pages {pages[found != old]} are not {old.name}"
        self._places[pages] = places = np.arange(len(pages))
        assert (self._places[pages] == places).all(), f"a page is named twice in {pages}"
        self._states[pages] = new
        self._counts[old] -= len(pages)
        self._counts[new] += len(pages)

    def find_pages(self, state: PageState) -> IntArray:
        """Return all pages in ``state`` in ascending order."""
        return np.flatnonzero(self._states == state).astype(np.int32)

    def check_invariants(self) -> None:
        """Raise AssertionError unless counts, states and the free stack agree."""
        counts = np.bincount(self._states, minlength=len(PageState)).tolist()
        assert counts == self._counts, f"counted {counts}, kept {self._counts}"
        free = np.sort(self._free[: self._counts[PageState.FREE]])
        assert np.array_equal(free, self.find_pages(PageState.FREE)), (
            "free stack differs from states"
        )
