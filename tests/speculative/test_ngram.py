"""What the n-gram drafter drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.speculative.ngram import NgramDrafter


def ask(ids: list[int], limit: int) -> Any:
    return SimpleNamespace(sequence=SimpleNamespace(ids=np.array(ids, np.int32)), limit=limit)


def draft(ids: list[int], limit: int = 3) -> list[int]:
    (found,) = drafts([ask(ids, limit)])
    return found


def drafts(asks: list[Any]) -> list[list[int]]:
    made = NgramDrafter(torch.device("cpu")).draft(asks, 0)
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
