"""In which order each policy gives pages up."""

import pytest
from radix_model import as_array

from pd.radix import EVICTION_POLICIES, RadixCache, check_invariants


class Letters:
    """A cache with page size 1 in which a word is a key and its last letter names the page."""

    def __init__(self, policy: str) -> None:
        self.cache = RadixCache(1, policy=policy)

    def insert(self, *words: str, priority: int = 0) -> None:
        for word in words:
            self.cache.insert_prefix(
                as_array(codes(word)), as_array(codes(word)), priority=priority
            )

    def match(self, *words: str) -> None:
        for word in words:
            assert self.cache.match_prefix(as_array(codes(word))).num_pages == len(word)

    def evict_all(self) -> str:
        """All unlocked letters in the order in which they go."""
        order = ""
        while len(freed := self.cache.evict_pages(1)):
            order += chr(freed[0])
            check_invariants(self.cache)
        return order


def codes(word: str) -> list[int]:
    return [ord(letter) for letter in word]


def test_lru_evicts_the_least_recently_used_first() -> None:
    letters = Letters("lru")
    letters.insert("a", "b", "c", "d")
    letters.match("b")
    letters.insert("a")
    assert letters.evict_all() == "cdba"


def test_lru_gives_a_prefix_the_time_of_its_latest_use() -> None:
    letters = Letters("lru")
    letters.insert("p", "pq", "x")
    letters.match("p")
    assert letters.evict_all() == "qxp"


def test_lfu_evicts_the_least_often_matched_first_and_then_the_least_recent() -> None:
    letters = Letters("lfu")
    letters.insert("a", "b", "c", "d")
    letters.match("a", "a", "b", "c", "b")
    assert letters.evict_all() == "dcab"


def test_lfu_does_not_count_inserts_as_hits() -> None:
    letters = Letters("lfu")
    letters.insert("a", "b", "a", "a", "a")
    letters.match("b")
    assert letters.evict_all() == "ab"


def test_fifo_evicts_in_the_order_of_creation_whatever_is_used() -> None:
    letters = Letters("fifo")
    letters.insert("a", "b", "c")
    letters.match("a", "b", "a")
    letters.insert("a")
    assert letters.evict_all() == "abc"


def test_fifo_forgets_no_place_through_a_lock() -> None:
    letters = Letters("fifo")
    letters.insert("a", "b")
    handle = letters.cache.match_prefix(as_array(codes("a"))).handle
    letters.cache.lock(handle)
    letters.cache.unlock(handle)
    assert letters.evict_all() == "ab"


def test_slru_evicts_what_was_never_matched_first() -> None:
    letters = Letters("slru")
    letters.insert("a", "b", "c", "d")
    letters.match("a", "b")
    assert letters.evict_all()[:2] == "cd"


def test_slru_bounds_the_protected_share_so_that_new_pages_get_a_chance() -> None:
    letters = Letters("slru")
    letters.insert(*"abcdefghi")
    letters.match(*"abcdefghi")
    letters.insert("n")
    assert letters.evict_all() == "abcde" + "n" + "fghi"


def test_priority_evicts_the_lowest_first_and_then_the_least_recent() -> None:
    letters = Letters("priority")
    letters.insert("a", priority=2)
    letters.insert("b", priority=-1)
    letters.insert("c", "d")
    letters.match("c")
    assert letters.evict_all() == "bdca"


def test_priority_of_a_prefix_is_the_highest_of_the_inserts_through_it() -> None:
    letters = Letters("priority")
    letters.insert("p", priority=1)
    letters.insert("pq", priority=3)
    letters.insert("pr", priority=0)
    letters.insert("x", priority=2)
    assert letters.evict_all() == "rxqp"


def test_priority_is_raised_by_a_later_insert_and_never_lowered() -> None:
    letters = Letters("priority")
    letters.insert("a", "b")
    letters.insert("a", priority=1)
    letters.insert("a", priority=0)
    assert letters.evict_all() == "ba"


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_prefix_never_goes_before_what_continues_it(policy: str) -> None:
    letters = Letters(policy)
    letters.insert("pq", "pr", "p")
    letters.match("pq", "pq")
    assert letters.evict_all().endswith("p")


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_locked_page_stays_while_everything_else_goes(policy: str) -> None:
    letters = Letters(policy)
    letters.insert("a", "pq", "pr", "b")
    letters.cache.lock(letters.cache.match_prefix(as_array(codes("pq"))).handle)
    assert sorted(letters.evict_all()) == ["a", "b", "r"]
    letters.match("pq")


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_trimmed_leaf_keeps_its_place(policy: str) -> None:
    letters = Letters(policy)
    letters.insert("abc", "xyz")
    assert letters.evict_all() == "cbazyx"
