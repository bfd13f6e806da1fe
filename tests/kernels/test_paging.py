"""pd.kernels.paging: pages and slots of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from pd.kernels.paging import count_needed_pages, find_token_slots


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_pages_of_so_many_tokens(tokens: int, pages: int) -> None:
    assert count_needed_pages(tokens, 16) == pages


def test_pages_of_several_sequences() -> None:
    assert count_needed_pages(np.array([1, 4, 5]), 4).tolist() == [1, 1, 2]


def test_slots_follow_the_page_table() -> None:
    pages = np.array([7, 0, 3], np.int32)
    slots = find_token_slots(pages, np.array([0, 3, 4, 11]), 4)
    assert slots.tolist() == [28, 31, 0, 15]
    assert slots.dtype == np.int64


def test_slots_of_large_pools_do_not_wrap() -> None:
    pages = np.array([1 << 30], np.int32)
    assert find_token_slots(pages, np.array([5], np.int32), 16).tolist() == [(1 << 34) + 5]
