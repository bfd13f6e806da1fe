"""What the radix cache promises to its callers, one promise a test."""

import numpy as np
import pytest
from radix_model import as_array, tokens_of

from pd.radix import EVICTION_POLICIES, IntArray, RadixCache, check_invariants

PAGE = 4


def key(letters: str, extra: int = 0) -> IntArray:
    return as_array(tokens_of(PAGE, letters, extra))


def cache_with(*words: str, policy: str = "lru") -> RadixCache:
    """A cache of the given words; the page of the i-th letter of the n-th word is 100 n + i."""
    cache = RadixCache(PAGE, policy=policy)
    for number, word in enumerate(words):
        insert(cache, word, first_page=100 * number)
    return cache


def insert(cache: RadixCache, word: str, first_page: int, namespace: str = "") -> None:
    cache.insert_prefix(key(word), as_array(range(first_page, first_page + len(word))), namespace)


class TestMatch:
    def test_returns_the_longest_cached_prefix(self) -> None:
        cache = cache_with("abc")
        assert cache.match_prefix(key("abxy")).pages.tolist() == [0, 1]
        assert cache.match_prefix(key("abcd")).pages.tolist() == [0, 1, 2]
        assert cache.match_prefix(key("x")).pages.tolist() == []

    def test_returns_whole_pages_only(self) -> None:
        cache = cache_with("abc")
        assert cache.match_prefix(key("ab", extra=PAGE - 1)).num_pages == 2
        assert cache.match_prefix(key("abc")[:-1]).num_pages == 2

    def test_joins_the_pages_of_all_inserts_along_the_way(self) -> None:
        cache = cache_with("ab", "abcd", "abce")
        assert cache.match_prefix(key("abcd")).pages.tolist() == [0, 1, 102, 103]
        assert cache.match_prefix(key("abce")).pages.tolist() == [0, 1, 102, 203]

    @pytest.mark.parametrize(
        ("max_tokens", "pages"),
        [(-1, 0), (0, 0), (PAGE - 1, 0), (PAGE, 1), (2 * PAGE + 3, 2), (99, 3), (None, 3)],
    )
    def test_rounds_max_tokens_down_to_pages(self, max_tokens: int | None, pages: int) -> None:
        cache = cache_with("abc")
        assert cache.match_prefix(key("abc"), max_tokens=max_tokens).num_pages == pages
        assert cache.count_cached(key("abc"), max_tokens=max_tokens) == pages * PAGE

    def test_handle_means_exactly_the_matched_pages(self) -> None:
        cache = cache_with("abcd")
        cache.lock(cache.match_prefix(key("ab")).handle)
        assert (cache.locked_pages, cache.evictable_pages) == (2, 2)

    def test_of_nothing_gives_a_handle_that_can_be_locked(self) -> None:
        cache = cache_with("ab")
        handle = cache.match_prefix(key("x")).handle
        cache.lock(handle)
        assert cache.locked_pages == 0
        check_invariants(cache)
        cache.unlock(handle)
        check_invariants(cache)

    def test_counts_tokens_looked_up_and_hit(self) -> None:
        cache = cache_with("abc")
        cache.match_prefix(key("abx", extra=1))
        cache.match_prefix(key("x"))
        assert cache.lookup_tokens == 3 * PAGE + 1 + PAGE
        assert cache.hit_tokens == 2 * PAGE

    def test_tells_neighbouring_bit_patterns_apart(self) -> None:
        """Keys are compared as memory: equal bytes at another offset must not match."""
        cache = RadixCache(1)
        cache.insert_prefix(as_array([0, 1, 256, -1]), as_array(range(4)))
        assert cache.match_prefix(as_array([0, 1, 256, -1])).num_pages == 4
        assert cache.match_prefix(as_array([0, 1, 1, -1])).num_pages == 2
        assert cache.match_prefix(as_array([1, 256])).num_pages == 0

    def test_accepts_a_strided_view(self) -> None:
        cache = cache_with("abc")
        doubled = np.repeat(key("abc"), 2)
        assert cache.match_prefix(doubled[::2]).num_pages == 3


class TestPeek:
    def test_does_not_split(self) -> None:
        cache = cache_with("abcd")
        before = len(list(cache.iter_nodes()))
        assert cache.count_cached(key("abx")) == 2 * PAGE
        assert len(list(cache.iter_nodes())) == before

    @pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
    def test_does_not_count_as_use(self, policy: str) -> None:
        cache = cache_with("a", "b", policy=policy)
        cache.count_cached(key("a"))
        assert cache.evict_pages(1).tolist() == [0]

    def test_leaves_the_statistics_alone(self) -> None:
        cache = cache_with("a")
        cache.count_cached(key("a"))
        assert cache.lookup_tokens == 0


class TestInsert:
    def test_reports_what_existed_and_keeps_the_older_pages(self) -> None:
        cache = cache_with("ab")
        result = cache.insert_prefix(key("abcd"), as_array([50, 51, 52, 53]))
        assert result.existing_pages == 2
        assert result.pages.tolist() == [0, 1, 52, 53]
        assert sorted(cache.list_pages().tolist()) == [0, 1, 52, 53]

    def test_of_a_cached_prefix_adds_nothing(self) -> None:
        cache = cache_with("abcd")
        result = cache.insert_prefix(key("ab"), as_array([50, 51]))
        assert result.existing_pages == 2
        assert result.pages.tolist() == [0, 1]
        assert cache.evictable_pages == 4

    def test_handle_means_exactly_the_inserted_key(self) -> None:
        cache = cache_with("abcd")
        cache.lock(cache.insert_prefix(key("ab"), as_array([50, 51])).handle)
        assert cache.locked_pages == 2

    def test_of_nothing_is_allowed(self) -> None:
        result = cache_with("a").insert_prefix(key(""), as_array([]))
        assert (result.existing_pages, len(result.pages)) == (0, 0)

    def test_copies_the_tokens(self) -> None:
        cache = RadixCache(PAGE)
        tokens = key("ab")
        cache.insert_prefix(tokens, as_array([3, 4]))
        tokens[:] = 0
        assert cache.match_prefix(key("ab")).pages.tolist() == [3, 4]

    def test_keeps_no_large_array_of_pages_alive_for_a_small_part_of_it(self) -> None:
        cache = RadixCache(PAGE)
        table = as_array(list(range(100)))
        cache.insert_prefix(key("ab"), table[3:5])
        assert cache.match_prefix(key("ab")).pages.base is not table

    @pytest.mark.parametrize("num_tokens", [2 * PAGE - 1, 2 * PAGE + 1, 0])
    def test_refuses_tokens_that_do_not_fill_the_pages(self, num_tokens: int) -> None:
        with pytest.raises(ValueError, match=f"{num_tokens} tokens do not fill 2 pages of {PAGE}"):
            RadixCache(PAGE).insert_prefix(key("abc")[:num_tokens], as_array([0, 1]))


class TestSplit:
    def test_does_not_change_what_an_older_handle_means(self) -> None:
        cache = cache_with("abcd")
        handle = cache.match_prefix(key("abcd")).handle
        cache.match_prefix(key("ab"))
        cache.lock(handle)
        assert cache.locked_pages == 4

    def test_keeps_a_lock_taken_before_it(self) -> None:
        cache = cache_with("abcd")
        handle = cache.match_prefix(key("abcd")).handle
        cache.lock(handle)
        insert(cache, "abxy", first_page=50)
        assert cache.locked_pages == 4
        assert sorted(cache.clear().tolist()) == [52, 53]
        cache.unlock(handle)
        check_invariants(cache)
        assert cache.locked_pages == 0

    def test_leaves_no_large_memory_behind_a_small_rest(self) -> None:
        cache = RadixCache(1)
        cache.insert_prefix(as_array(range(10_000)), as_array(range(10_000)))
        cache.match_prefix(as_array(range(2)))
        cache.evict_pages(9_998)
        (rest,) = (node for node in cache.iter_nodes() if node.parent is not None)
        assert len(rest.key) == 2 * 4
        assert rest.pages.base is None


class TestLock:
    def test_covers_the_whole_path(self) -> None:
        cache = cache_with("ab", "abcd", "abxy")
        cache.lock(cache.match_prefix(key("abcd")).handle)
        assert sorted(cache.clear().tolist()) == [202, 203]
        assert cache.match_prefix(key("abcd")).num_pages == 4

    def test_needs_as_many_unlocks(self) -> None:
        cache = cache_with("ab")
        handle = cache.match_prefix(key("ab")).handle
        cache.lock(handle)
        cache.lock(handle)
        cache.unlock(handle)
        assert len(cache.evict_pages(2)) == 0
        cache.unlock(handle)
        assert len(cache.evict_pages(2)) == 2

    def test_of_one_branch_outlives_the_unlock_of_another(self) -> None:
        cache = cache_with("abc", "abx")
        first, second = cache.match_prefix(key("abc")).handle, cache.match_prefix(key("abx")).handle
        cache.lock(first)
        cache.lock(second)
        cache.unlock(first)
        assert cache.clear().tolist() == [2]
        assert cache.locked_pages == 3

    def test_survives_inserts_below_it(self) -> None:
        cache = cache_with("ab")
        handle = cache.match_prefix(key("ab")).handle
        cache.lock(handle)
        insert(cache, "abcd", first_page=50)
        cache.unlock(handle)
        assert sorted(cache.clear().tolist()) == [0, 1, 52, 53]

    def test_unlock_without_lock_is_a_bug_of_the_caller(self) -> None:
        cache = cache_with("ab")
        with pytest.raises(AssertionError, match="not locked"):
            cache.unlock(cache.match_prefix(key("ab")).handle)

    def test_unlock_of_a_prefix_that_only_a_longer_lock_holds_is_refused(self) -> None:
        cache = cache_with("ab", "abcd")
        inner = cache.match_prefix(key("ab")).handle
        cache.lock(cache.match_prefix(key("abcd")).handle)
        with pytest.raises(AssertionError, match="not locked"):
            cache.unlock(inner)
        check_invariants(cache)

    def test_of_an_evicted_handle_is_refused(self) -> None:
        cache = cache_with("ab")
        handle = cache.match_prefix(key("ab")).handle
        cache.evict_pages(1)
        with pytest.raises(AssertionError, match="evicted"):
            cache.lock(handle)


class TestEvict:
    @pytest.mark.parametrize("policy", EVICTION_POLICIES)
    def test_frees_exactly_what_is_asked_for(self, policy: str) -> None:
        cache = cache_with("abcdef", "abxyz", policy=policy)
        for wanted in (1, 3, 2):
            assert len(cache.evict_pages(wanted)) == wanted
            check_invariants(cache)
        assert cache.evicted_pages == 6

    def test_trims_the_last_victim_from_its_tail(self) -> None:
        cache = cache_with("abcd")
        assert cache.evict_pages(1).tolist() == [3]
        assert cache.match_prefix(key("abcd")).pages.tolist() == [0, 1, 2]

    def test_cascades_to_parents_that_become_leaves(self) -> None:
        cache = cache_with("ab", "abcd", "abxy")
        assert sorted(cache.evict_pages(6).tolist()) == [0, 1, 102, 103, 202, 203]
        assert cache.evictable_pages == 0

    def test_returns_what_there_is_when_asked_for_more(self) -> None:
        cache = cache_with("ab", "xyz")
        cache.lock(cache.match_prefix(key("ab")).handle)
        assert sorted(cache.evict_pages(100).tolist()) == [100, 101, 102]
        assert cache.evict_pages(100).tolist() == []

    @pytest.mark.parametrize("num_pages", [0, -1])
    def test_of_nothing_frees_nothing(self, num_pages: int) -> None:
        cache = cache_with("ab")
        assert len(cache.evict_pages(num_pages)) == 0
        assert (cache.evictable_pages, cache.evicted_pages) == (2, 0)

    def test_never_walks_the_tree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = cache_with("ab", "abcd", "abxy", "x")
        monkeypatch.delattr(RadixCache, "iter_nodes")
        assert len(cache.evict_pages(5)) == 5


class TestNamespaces:
    def test_share_nothing(self) -> None:
        cache = RadixCache(PAGE)
        insert(cache, "ab", first_page=0)
        insert(cache, "abc", first_page=10, namespace="tenant")
        assert cache.match_prefix(key("abc")).pages.tolist() == [0, 1]
        assert cache.match_prefix(key("abc"), "tenant").pages.tolist() == [10, 11, 12]
        assert cache.count_cached(key("abc"), "other") == 0

    def test_are_not_confused_with_tokens(self) -> None:
        cache = RadixCache(1)
        cache.insert_prefix(as_array([ord("a"), 1]), as_array([0, 1]), "")
        assert cache.count_cached(as_array([1]), "a\0\0\0") == 0

    def test_may_be_any_string(self) -> None:
        cache = RadixCache(PAGE)
        insert(cache, "ab", first_page=0, namespace="\ud800 \0")
        assert cache.count_cached(key("ab"), "\ud800 \0") == 2 * PAGE

    def test_leave_nothing_behind_once_evicted(self) -> None:
        cache = RadixCache(PAGE)
        for number in range(100):
            insert(cache, "a", first_page=number, namespace=f"tenant {number}")
            cache.match_prefix(key("b"), f"visitor {number}")
        cache.clear()
        (root,) = cache.iter_nodes()
        assert not root.children


class TestDepth:
    def test_is_not_limited_by_recursion(self) -> None:
        depth = 5_000
        tokens = as_array(range(depth))
        cache = RadixCache(1)
        cache.insert_prefix(tokens, tokens)
        for length in range(depth - 1, 0, -1):
            cache.match_prefix(tokens, max_tokens=length)
        assert len(list(cache.iter_nodes())) == depth + 1
        result = cache.match_prefix(tokens)
        assert result.pages.tolist() == tokens.tolist()
        cache.lock(result.handle)
        check_invariants(cache)
        cache.unlock(result.handle)
        assert cache.clear().tolist() == tokens[::-1].tolist()


class TestBadInput:
    @pytest.mark.parametrize("page_size", [0, -16])
    def test_names_a_bad_page_size(self, page_size: int) -> None:
        with pytest.raises(ValueError, match=f"page_size is {page_size}"):
            RadixCache(page_size)

    def test_names_an_unknown_policy_and_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"'mru'.*lru, lfu, fifo, slru, priority"):
            RadixCache(16, policy="mru")

    @pytest.mark.parametrize(
        "tokens",
        [
            np.zeros(4, dtype=np.int64),
            np.zeros((1, 4), dtype=np.int32),
            np.zeros(4, dtype=">i4"),
            [0, 0, 0, 0],
        ],
        ids=["int64", "2-D", "byte order", "list"],
    )
    def test_refuses_keys_that_are_not_int32_arrays(self, tokens: IntArray) -> None:
        cache = RadixCache(PAGE)
        for attempt in (
            lambda: cache.match_prefix(tokens),
            lambda: cache.count_cached(tokens),
            lambda: cache.insert_prefix(tokens, as_array([0])),
            lambda: cache.insert_prefix(key("a"), tokens),
        ):
            with pytest.raises(TypeError, match="must be a 1-D int32 array"):
                attempt()
