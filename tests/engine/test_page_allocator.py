"""Every page has one owner at every moment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.engine.page_allocator import PageAllocator, PageState

FREE, IN_TREE, OWNED, RESERVED, QUARANTINED = PageState


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_fresh_pages_are_adjacent_and_ascending() -> None:
    allocator = PageAllocator(8)
    assert allocator.allocate_pages(3, OWNED).tolist() == [0, 1, 2]
    assert allocator.allocate_pages(2, RESERVED).tolist() == [3, 4]


def test_freed_pages_are_handed_out_again_lowest_first() -> None:
    allocator = PageAllocator(8)
    allocator.allocate_pages(8, OWNED)
    allocator.free_pages(pages(6, 1, 4), OWNED)
    assert allocator.allocate_pages(3, OWNED).tolist() == [1, 4, 6]
    allocator.check_invariants()


@pytest.mark.parametrize(
    "allocated",
    [
        [[7, 8, 9], [16, 17, 18]],  # of the shortest run that has enough
        [[16, 17, 18, 19, 7, 8], [3, 9, 12]],  # of as few as possible
    ],
)
def test_many_pages_are_of_few_runs(allocated: list[list[int]]) -> None:
    allocator = PageAllocator(20)
    allocator.allocate_pages(20, OWNED)
    for freed in (pages(3), pages(16, 17, 18, 19), pages(7, 8, 9), pages(12)):
        allocator.free_pages(freed, OWNED)
    for expected in allocated:
        assert allocator.allocate_pages(len(expected), OWNED).tolist() == expected
        allocator.check_invariants()


def test_pages_of_many_short_runs_are_not_put_together() -> None:
    allocator = PageAllocator(100)
    allocator.allocate_pages(100, OWNED)
    allocator.free_pages(np.arange(50, 100, 2, dtype=np.int32), OWNED)
    allocator.free_pages(np.arange(0, 50, 2, dtype=np.int32), OWNED)
    assert allocator.allocate_pages(9, OWNED).tolist() == list(range(0, 18, 2))
    allocator.check_invariants()


def test_few_pages_of_a_large_pool_are_not_searched_for() -> None:
    allocator = PageAllocator(1000)
    allocator.allocate_pages(1000, OWNED)
    allocator.free_pages(pages(10, 11, 12), OWNED)
    allocator.free_pages(pages(1, 3), OWNED)
    assert allocator.allocate_pages(3, OWNED).tolist() == [1, 3, 10]


def test_counts_add_up_in_every_state() -> None:
    allocator = PageAllocator(10)
    owned, reserved = allocator.allocate_pages(3, OWNED), allocator.allocate_pages(4, RESERVED)
    allocator.move_pages(owned[:2], OWNED, IN_TREE)
    allocator.move_pages(reserved[:1], RESERVED, QUARANTINED)
    assert [allocator.count_pages(state) for state in PageState] == [3, 2, 1, 3, 1]
    assert allocator.find_pages(IN_TREE).tolist() == [0, 1]
    allocator.check_invariants()


def test_what_was_allocated_is_the_callers_copy() -> None:
    allocator = PageAllocator(4)
    allocator.allocate_pages(2, OWNED)[:] = 3
    allocator.check_invariants()


@pytest.mark.parametrize("state", [FREE, IN_TREE, RESERVED, QUARANTINED])
def test_a_page_in_another_state_is_not_freed(state: PageState) -> None:
    allocator = PageAllocator(4)
    mine = allocator.allocate_pages(2, OWNED)
    if state is FREE:
        allocator.free_pages(mine[:1], OWNED)
    else:
        allocator.move_pages(mine[:1], OWNED, state)
    with pytest.raises(AssertionError, match=r"\[0\] are not OWNED"):
        allocator.free_pages(mine, OWNED)


def test_a_page_named_twice_is_refused() -> None:
    allocator = PageAllocator(4)
    allocator.allocate_pages(2, OWNED)
    with pytest.raises(AssertionError, match="named twice"):
        allocator.free_pages(pages(1, 0, 1), OWNED)
    allocator.check_invariants()


@pytest.mark.parametrize("count", [-1, 5])
def test_more_than_there_is_cannot_be_allocated(count: int) -> None:
    with pytest.raises(AssertionError, match="asked for, 4 free"):
        PageAllocator(4).allocate_pages(count, OWNED)


def test_no_pages_are_no_work() -> None:
    allocator = PageAllocator(4)
    assert len(allocator.allocate_pages(0, OWNED)) == 0
    allocator.free_pages(pages(), OWNED)
    allocator.move_pages(pages(), RESERVED, QUARANTINED)
    allocator.check_invariants()


@pytest.mark.parametrize("damage", ["counts", "stack"])
def test_check_notices_books_that_do_not_agree(damage: str) -> None:
    allocator = PageAllocator(4)
    if damage == "counts":
        allocator._counts[OWNED] += 1
    else:
        allocator._free[0] = allocator._free[1]
    with pytest.raises(AssertionError):
        allocator.check_invariants()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.sampled_from(PageState))))
def test_books_agree_with_a_model_after_any_history(
    steps: list[tuple[int, int, PageState]],
) -> None:
    allocator, owners = PageAllocator(12), [FREE] * 12
    for old_number, count, new in steps:
        old = PageState(old_number)
        mine = [page for page, owner in enumerate(owners) if owner is old][:count]
        if old is FREE and new is not FREE:
            mine = allocator.allocate_pages(len(mine), new).tolist()
            assert all(owners[page] is FREE for page in mine)
        elif new is FREE and old is not FREE:
            allocator.free_pages(pages(*mine), old)
        else:
            allocator.move_pages(pages(*mine), old, old if FREE in (old, new) else new)
            new = old if FREE in (old, new) else new
        for page in mine:
            owners[page] = new
        allocator.check_invariants()
        for state in PageState:
            assert allocator.count_pages(state) == owners.count(state)
