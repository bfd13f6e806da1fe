"""What the n-gram drafter drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.speculative.ngram import NgramDrafter
from pd.speculative.ngram_cache import NgramCache


def ask(ids: list[int], limit: int, namespace: str = "") -> Any:
    request = SimpleNamespace(namespace=namespace)
    sequence = SimpleNamespace(ids=np.array(ids, np.int32), request=request)
    return SimpleNamespace(sequence=sequence, limit=limit)


def draft(ids: list[int], limit: int = 3) -> list[int]:
    (found,) = drafts([ask(ids, limit)])
    return found


def drafts(asks: list[Any], cache: NgramCache | None = None) -> list[list[int]]:
    made = NgramDrafter(torch.device("cpu"), cache).draft_tokens(asks, 0)
    return [[] if each is None else each.tokens.tolist() for each in made]


def test_it_drafts_what_followed_the_longest_equal_ending() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 2, 3, 7, 7, 1, 2, 3]) == [4, 5, 9]


def test_of_equally_long_ones_the_latest_counts() -> None:
    assert draft([1, 2, 5, 5, 5, 1, 2, 6, 6, 6, 1, 2]) == [6, 6, 6]


def test_a_sequence_that_repeats_is_taken_to_go_on_repeating() -> None:
    assert draft([1, 2, 3, 4, 5, 1, 2], 7) == [3, 4, 5, 1, 2, 3, 4]
    assert draft([7, 7, 7]) == [7, 7, 7]
    assert draft([8, 9, 8, 9, 8]) == [9, 8, 9]


def test_one_equal_token_is_chance() -> None:
    assert draft([1, 2, 3, 1]) == []
    assert draft([1]) == draft([1, 1]) == draft([1, 2]) == []


def test_sequences_are_drafted_one_by_one() -> None:
    asks = [ask([1, 2, 3, 1, 2], 1), ask([5], 1), ask([4, 4, 4, 4], 2)]
    assert drafts(asks) == [[3], [], [4, 4]]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_every_draft_followed_an_equal_ending(ids: list[int], limit: int) -> None:
    tokens = draft(ids, limit)
    places = [
        end for end in range(1, len(ids) - 1) if ids[end - 1 : end + 1] == ids[-2:] and len(ids) > 2
    ]
    assert bool(tokens) == bool(places)
    if tokens:
        assert len(tokens) == limit
        found = [ids[end + 1 :][:limit] for end in places]
        assert any(tokens[: len(following)] == following for following in found)


def cache_of(*texts: list[int], namespace: str = "") -> NgramCache:
    cache = NgramCache()
    for text in texts:
        cache.add_text(namespace, np.array(text, np.int32), 0)
    return cache


def test_the_longer_match_wins_and_the_own_one_if_they_are_equal() -> None:
    cache = cache_of([10, 11, 12, 13, 14, 15, 50, 51, 52])
    # Two, five and six equal tokens in the sequence itself; six in the cache.
    assert drafts([ask([14, 15, 60, 61, 10, 11, 12, 13, 14, 15], 2)], cache) == [[50, 51]]
    five = [11, 12, 13, 14, 15, 60, 61]
    assert drafts([ask([*five, 10, 11, 12, 13, 14, 15], 2)], cache) == [[50, 51]]
    assert drafts([ask([10, *five, 10, 11, 12, 13, 14, 15], 2)], cache) == [[60, 61]]
    assert drafts([ask([1, 2, 3, 1, 2], 2)], cache) == [[3, 1]]


def test_an_own_match_of_more_than_eight_tokens_counts_in_full() -> None:
    ending = list(range(10, 22))
    cache = cache_of([9, *ending, 50])
    assert drafts([ask([*ending, 60, 61, *ending], 1)], cache) == [[60]]
    assert drafts([ask([*ending, 60, 9, *ending], 1)], cache) == [[50]]


def test_other_namespaces_are_not_looked_at() -> None:
    text = list(range(10, 30))
    cache = cache_of(text, namespace="a")
    asks = [ask(text[:10], 3, "a"), ask(text[:10], 3, "b"), ask(text[:10], 3)]
    assert drafts(asks, cache) == [[20, 21, 22], [], []]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), max_size=4),
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 8),
)
def test_a_cache_never_makes_the_match_shorter(
    texts: list[list[int]], ids: list[int], limit: int
) -> None:
    def longest(token: int, places: list[list[int]]) -> int:
        """Most equal tokens, up to 16, of a place that ``token`` follows; -1 without one."""
        most = -1
        for text in places:
            for end in range(len(text) - 1):
                if text[end + 1] == token:
                    equal = 0
                    while (
                        equal < min(end + 1, len(ids), 16) and text[end - equal] == ids[-1 - equal]
                    ):
                        equal += 1
                    most = max(most, equal)
        return most

    own, (found,) = draft(ids, limit), drafts([ask(ids, limit)], cache_of(*texts))
    assert len(found) <= limit
    if own:
        assert longest(found[0], [*texts, ids]) >= longest(own[0], [ids])
    elif found:
        assert longest(found[0], texts) >= 4
