"""What the n-gram cache finds, what it costs in memory, and who can take whose place."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
from drafters import SEED
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_for_tests import make_request

from pd.radix import RadixCache
from pd.scheduling.memory import Memory
from pd.speculative import ngram_cache
from pd.speculative.ngram_cache import LONGEST, UNUSED_SECONDS, NgramCache

if TYPE_CHECKING:
    import pytest

    from pd.scheduling.request import Sequence

LENGTHS = (4, 8, 16)
TEXT = list(range(100, 140))


def add(cache: NgramCache, text: list[int], namespace: str = "", start: int = 0) -> None:
    cache.add_text(namespace, np.array(text, np.int32), start)


def find(
    cache: NgramCache, text: list[int], namespace: str = "", longer_than: int = 0, limit: int = 3
) -> list[int]:
    ending = np.array(text[-LONGEST:], np.int32)
    return cache.find_continuation(namespace, ending, longer_than, limit).tolist()


def cache_of(namespaces: int, clock: list[float] | None = None) -> NgramCache:
    """A cache with memory for so many namespaces of the least size."""
    with_one = NgramCache()
    add(with_one, TEXT, "a long name")
    return NgramCache(namespaces * with_one.num_bytes, (lambda: clock[0]) if clock else lambda: 0.0)


def random_text(rng: np.random.Generator, length: int) -> list[int]:
    found: list[int] = rng.integers(0, 1 << 20, length).tolist()
    return found


def test_it_finds_what_followed_an_equal_ending() -> None:
    cache = NgramCache()
    add(cache, TEXT)
    assert find(cache, TEXT[:20]) == TEXT[20:23]
    assert find(cache, [1, 2, *TEXT[5:9]]) == TEXT[9:12]
    assert find(cache, [1, 2, *TEXT[5:8]]) == [], "three equal tokens are chance"
    assert find(cache, [1]) == find(cache, TEXT[:3]) == []


def test_what_follows_ends_with_its_text() -> None:
    cache = NgramCache()
    add(cache, TEXT)
    add(cache, [1, 2, 3, 4, 5])
    assert find(cache, TEXT[:-2], limit=5) == TEXT[-2:]
    assert find(cache, TEXT) == find(cache, [1, 2, 3, 4, 5]) == []


def test_the_longest_ending_counts_and_of_equally_long_ones_the_latest() -> None:
    cache = NgramCache()
    add(cache, [1, 2, 3, 4, 5, 6, 7, 8, 50, 51, 52])
    add(cache, [90, 91, 92, 93, 5, 6, 7, 8, 60, 61, 62])
    assert find(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == [50, 51, 52]
    assert find(cache, [0, 5, 6, 7, 8]) == [60, 61, 62]


def test_only_a_longer_match_than_the_own_is_returned() -> None:
    cache = NgramCache()
    add(cache, TEXT)
    ending = [0, *TEXT[5:15]]
    assert find(cache, ending, longer_than=9) == TEXT[15:18]
    assert find(cache, ending, longer_than=10) == []


def test_a_text_that_comes_in_parts_is_one_text() -> None:
    cache = NgramCache()
    for stop in (1, 7, 8, 30, 31, 40):
        start = {1: 0, 7: 1, 8: 7, 30: 8, 31: 30, 40: 31}[stop]
        add(cache, TEXT[:stop], start=start)
    for end in range(LENGTHS[0], len(TEXT) - 1):
        assert find(cache, TEXT[:end], limit=1) == [TEXT[end]]


def test_namespaces_never_meet() -> None:
    cache = NgramCache()
    add(cache, TEXT, "a")
    assert find(cache, TEXT[:20], "a") == TEXT[20:23]
    assert find(cache, TEXT[:20]) == find(cache, TEXT[:20], "b") == []
    add(cache, [*TEXT[:20], 1, 2, 3], "b")
    assert find(cache, TEXT[:20], "a") == TEXT[20:23]
    assert find(cache, TEXT[:20], "b") == [1, 2, 3]


def test_clear_drops_everything() -> None:
    cache = NgramCache()
    add(cache, TEXT)
    assert cache.num_bytes > 0
    cache.clear_texts()
    assert cache.num_bytes == 0
    assert find(cache, TEXT[:20]) == []
    add(cache, TEXT)
    assert find(cache, TEXT[:20]) == TEXT[20:23]


def test_the_oldest_texts_leave_first() -> None:
    cache, rng = cache_of(2), np.random.default_rng(SEED)
    texts = [random_text(rng, 100) for _ in range(200)]
    for text in texts:
        add(cache, text)
    known = [bool(find(cache, text[:50])) for text in texts]
    assert not any(known[:100])
    # A generation has room for 40 of these; an ending is lost only to another in all three tables.
    assert np.mean(known[-40:]) > 0.75
    assert known[-1]


def test_a_text_beyond_all_room_is_known_by_its_end() -> None:
    cache = cache_of(1)
    text = random_text(np.random.default_rng(SEED), 100_000)
    add(cache, text)
    assert find(cache, text[:-1], limit=1) == [text[-1]]
    assert find(cache, text[:1000]) == []


def test_another_client_cannot_disturb_a_namespace_in_use() -> None:
    """One floods its namespace, and opens as many as it likes."""
    clock, rng = [0.0], np.random.default_rng(SEED)
    cache = cache_of(6, clock)
    victim = [random_text(rng, 60) for _ in range(30)]
    for text in victim:
        add(cache, text, "victim")
    before = [find(cache, text[:end], "victim") for text in victim for end in range(8, 60)]
    assert np.mean([bool(found) for found in before]) > 0.9
    for index in range(200):
        clock[0] += UNUSED_SECONDS / 4
        add(cache, random_text(rng, 3000), "flooded")
        add(cache, random_text(rng, 3000), f"another {index}")
        # The victim uses its namespace every half minute.
        if index % 2:
            find(cache, victim[0], "victim")
    after = [find(cache, text[:end], "victim") for text in victim for end in range(8, 60)]
    assert after == before


def test_an_unused_namespace_gives_way() -> None:
    clock = [0.0]
    cache = cache_of(2, clock)
    add(cache, TEXT, "a")
    add(cache, TEXT, "b")
    clock[0] = UNUSED_SECONDS - 1
    add(cache, TEXT, "c")
    assert find(cache, TEXT[:20], "b") == TEXT[20:23]
    assert find(cache, TEXT[:20], "c") == []
    clock[0] = UNUSED_SECONDS + 1
    add(cache, TEXT, "c")
    assert find(cache, TEXT[:20], "a") == []
    assert find(cache, TEXT[:20], "b") == find(cache, TEXT[:20], "c") == TEXT[20:23]


def test_memory_is_bounded_with_many_namespaces() -> None:
    clock, rng = [0.0], np.random.default_rng(SEED)
    limit = 4 << 20
    cache = NgramCache(limit, lambda: clock[0])
    most = 0
    for index in range(1500):
        clock[0] += rng.exponential(5.0)
        namespace = "x" * 100 + str(rng.integers(0, 300))
        add(cache, random_text(rng, int(rng.integers(1, 6000))), namespace)
        most = max(most, cache.num_bytes)
        assert cache.num_bytes <= limit, index
    assert most > limit / 2
    # It is what the arrays take, too.
    taken = 0
    for used in cache._namespaces.values():
        for generation in used.generations:
            arrays = [generation._tokens, *generation._places.values()]
            taken += sum(array.nbytes for array in arrays)
    assert 0.9 * cache.num_bytes < taken <= cache.num_bytes


def test_one_namespace_grows_up_to_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_cache, "_MOST_TOKENS", 1 << 14)
    cache, rng = NgramCache(), np.random.default_rng(SEED)
    sizes = []
    for _ in range(200):
        add(cache, random_text(rng, 1000))
        sizes.append(cache.num_bytes)
    assert sizes[0] < sizes[40] == max(sizes) == sizes[-1]


tokens = st.integers(0, 3)
fed = st.tuples(
    st.sampled_from("ab"), st.lists(tokens, min_size=1, max_size=50), st.integers(0, 49)
)


@settings(deadline=None)
@given(st.lists(fed, max_size=8), st.lists(tokens, min_size=1, max_size=20), st.integers(0, 16))
def test_it_finds_what_a_search_through_all_texts_finds(
    texts: list[tuple[str, list[int], int]], sequence: list[int], longer_than: int
) -> None:
    cache = NgramCache()
    # Room in which hardly any two endings share a slot.
    with patch.object(ngram_cache, "_LEAST_TOKENS", 1 << 18):
        for namespace, text, cut in texts:
            cut = min(cut, len(text))
            add(cache, text[:cut], namespace)
            add(cache, text, namespace, start=cut)
    found = find(cache, sequence, "a", longer_than, limit=1)
    # Every place's equal tokens and what follows.
    places = []
    for namespace, text, _ in texts:
        for end in range(len(text) - 1) if namespace == "a" else ():
            pairs = zip(reversed(text[: end + 1]), reversed(sequence[-LONGEST:]), strict=False)
            equal = 0
            for one, other in pairs:
                if one != other:
                    break
                equal += 1
            places.append((equal, text[end + 1]))
    enough = [(equal, token) for equal, token in places if equal > longer_than]
    if found:
        assert found[0] in [token for equal, token in enough if equal >= LENGTHS[0]]
    else:
        # The latest place of an ending hides earlier ones with more tokens before it, until these
        # are as many as the next length.
        missed = [equal for equal, _ in enough if equal in LENGTHS]
        latest = {length: [e for e, _ in places if e >= length] for length in LENGTHS}
        assert not [equal for equal in missed if latest[equal] and latest[equal][-1] > longer_than]


def test_searches_while_others_add_are_right() -> None:
    cache, rng = NgramCache(1 << 20), np.random.default_rng(SEED)
    # In each text a token is followed by its successor.
    starts = rng.integers(0, 1 << 20, 2000).tolist()
    done = threading.Event()

    def feed() -> None:
        for index, start in enumerate(starts):
            add(cache, list(range(start, start + 50)))
            if index % 500 == 499:
                cache.clear_texts()
        done.set()

    thread = threading.Thread(target=feed)
    thread.start()
    while not done.is_set():
        start = starts[int(rng.integers(len(starts)))]
        ids = list(range(start, start + 20))
        found = find(cache, ids)
        assert found == list(range(start + 20, start + 20 + len(found)))
    thread.join()


class Recorder(NgramCache):
    """Notes which tokens it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, list[int]]] = []

    def add_text(self, namespace: str, ids: np.ndarray, start: int) -> None:
        """See :class:`NgramCache`."""
        self.given.append((namespace, ids[start:].tolist()))
        super().add_text(namespace, ids, start)


def compute(memory: Memory, sequence: Sequence, num_tokens: int) -> None:
    assert memory.grow_pages(sequence, num_tokens)
    sequence.num_computed = num_tokens
    memory.cache_tokens(sequence)


def test_memory_gives_it_each_computed_token_once() -> None:
    recorder = Recorder()
    memory = Memory(64, 4, RadixCache(4), recorder)
    first = make_request(list(range(20)), namespace="a").sequence
    compute(memory, first, 3)  # less than a page
    compute(memory, first, 11)
    memory.cache_tokens(first)
    compute(memory, first, 20)
    memory.release_pages(first)
    expected = [list(range(3)), list(range(3, 11)), list(range(11, 20))]
    assert recorder.given == [("a", each) for each in expected]
    # What is matched is not computed.
    recorder.given.clear()
    second = make_request([*range(20), 30, 31, 32], namespace="a").sequence
    assert memory.match_prefix(second, 22) == 20
    compute(memory, second, 23)
    assert recorder.given == [("a", [30, 31, 32])]
    memory.release_pages(second)


def test_a_text_is_given_again_if_it_is_computed_again() -> None:
    """Answers that are asked for again and again stay among the latest."""
    recorder = Recorder()
    memory = Memory(64, 4, RadixCache(4), recorder)
    for _ in range(2):
        sequence = make_request(list(range(8))).sequence
        memory.match_prefix(sequence, 4)
        compute(memory, sequence, 8)
        memory.release_pages(sequence)
    assert recorder.given == [("", list(range(8))), ("", list(range(4, 8)))]


def test_flushing_the_prefix_cache_empties_it() -> None:
    cache = NgramCache()
    memory = Memory(64, 4, RadixCache(4), cache)
    sequence = make_request(TEXT).sequence
    compute(memory, sequence, len(TEXT))
    memory.release_pages(sequence)
    assert find(cache, TEXT[:20]) == TEXT[20:23]
    memory.flush_cache()
    assert find(cache, TEXT[:20]) == []
