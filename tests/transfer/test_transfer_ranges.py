"""Token ranges become the right slots; blocks split without gaps or repeats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd.transfer.ranges import Block, check_pages, find_slot_runs


@st.composite
def page_tables(draw):
    page_size = draw(st.sampled_from([1, 2, 4, 16, 64]))
    pages = draw(st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True))
    stop = draw(st.integers(1, len(pages) * page_size))
    start = draw(st.integers(0, stop - 1))
    return np.array(pages, dtype=np.int32), page_size, start, stop


@given(page_tables())
def test_slot_runs_are_the_slots_of_the_definition_in_token_order(table) -> None:
    pages, size, start, stop = table
    expected = [int(pages[t // size]) * size + t % size for t in range(start, stop)]
    runs = zip(*find_slot_runs(pages, size, start, stop), strict=True)
    assert [slot for first, last in runs for slot in range(first, last)] == expected


@given(page_tables())
def test_slot_runs_merge_adjacent_pages(table) -> None:
    pages, size, start, stop = table
    starts, stops = find_slot_runs(pages, size, start, stop)
    assert all(starts[1:] != stops[:-1])


@given(
    st.integers(0, 50), st.integers(0, 50), st.integers(0, 6), st.integers(0, 6), st.integers(1, 99)
)
def test_split_covers_each_cell_once_within_the_limit(token, tokens, layer, layers, limit) -> None:
    block = Block(token, token + tokens, layer, layer + layers)
    parts = list(block.split(limit))
    cells = [
        (t, n)
        for part in parts
        for n in range(part.layer_start, part.layer_stop)
        for t in range(part.token_start, part.token_stop)
    ]
    assert len(cells) == len(set(cells)) == block.cells
    assert all(token <= t < token + tokens and layer <= n < layer + layers for t, n in cells)
    assert all(0 < part.cells <= limit for part in parts)


@pytest.mark.parametrize(
    ("pages", "start", "stop", "complaint"),
    [
        ([0, 1], 0, 9, "cannot hold"),
        ([0, 4], 0, 8, "outside"),
        ([0, -1], 0, 8, "outside"),
        ([0], 3, 2, "not a range"),
        ([0], -1, 2, "not a range"),
    ],
)
def test_page_tables_that_cannot_be_are_refused(pages, start, stop, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_pages(np.array(pages, dtype=np.int32), 4, 16, start, stop)


def test_pages_below_the_range_are_not_looked_at() -> None:
    check_pages(np.array([-1, 3], dtype=np.int32), 4, 16, 4, 8)
