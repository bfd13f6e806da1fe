"""The page tables of a step, looked up without a loop over sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.kernels.paging import count_needed_pages, find_token_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.attention.base import Int64Array, IntArray, PagedKV


class PageTables:
    """The pages that each sequence's tokens need, one sequence after another.

    Attributes:
        flat: int32, all tables.
        counts: number of pages of each sequence, int64.
        offsets: start of each sequence's pages in ``flat``, int64.
    """

    def __init__(self, pages: Sequence[IntArray], totals: Int64Array, page_size: int) -> None:
        """``totals``: number of tokens of each sequence, at least 1. Pages after them are left
        out."""
        self.page_size = page_size
        self.counts = count_needed_pages(totals, page_size)
        self.offsets = np.cumsum(self.counts) - self.counts
        trimmed = [table[:n] for table, n in zip(pages, self.counts.tolist(), strict=True)]
        self.flat: IntArray = np.concatenate(trimmed, dtype=np.int32)

    def find_slots(
        self, sequences: Int64Array, starts: Int64Array, lengths: Int64Array
    ) -> Int64Array:
        """Return the slots of positions ``[starts[i], starts[i] + lengths[i])`` of each
        sequence."""
        skipped = np.cumsum(lengths) - lengths
        # Positions as if all tables together belonged to one sequence.
        firsts = self.offsets[sequences] * self.page_size + starts
        positions = np.arange(lengths.sum()) + np.repeat(firsts - skipped, lengths)
        return find_token_slots(self.flat, positions, self.page_size)

    def pad_tables(self, sequences: Int64Array) -> Int64Array:
        """Return the pages of each sequence as rows of a matrix. Rows are filled up with the first
        page: a mask hides the values read there, but they must belong to the sequence."""
        counts = self.counts[sequences]
        columns = np.arange(counts.max())
        columns = np.where(columns < counts[:, None], columns, 0)
        pages: Int64Array = self.flat[self.offsets[sequences][:, None] + columns].astype(np.int64)
        return pages

    def get_table(self, sequence: int) -> Int64Array:
        """Return the pages of one sequence."""
        offset = self.offsets[sequence]
        return self.flat[offset : offset + self.counts[sequence]].astype(np.int64)


def pad_decode(
    pool: PagedKV, rows: int, starts: Int64Array, pages: Sequence[IntArray]
) -> tuple[Int64Array, PageTables]:
    """Plan ``rows`` sequences of one new token each: those given, then padding in the pool's extra
    page.

    Returns:
        int64 ``[rows]``, the number of tokens of each in the pool, and tables for one token more.
    """
    missing = rows - len(starts)
    assert missing >= 0, "more sequences than the graph has rows"
    starts = extend_array(starts, missing, 0)
    return starts, make_padded_tables(pool, pages, starts + 1)


def make_padded_tables(pool: PagedKV, pages: Sequence[IntArray], totals: Int64Array) -> PageTables:
    """Make tables of ``totals`` tokens. After the given tables come paddings of one token each, in
    the pool's extra page."""
    extra = np.array([pool.num_pages], np.int32)
    missing = len(totals) - len(pages)
    return PageTables([*pages, *[extra] * missing], totals, pool.page_size)


def extend_array(values: Int64Array, count: int, value: int) -> Int64Array:
    """Append ``value`` to an array ``count`` times."""
    return np.concatenate([values, np.full(count, value, np.int64)])
