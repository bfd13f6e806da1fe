"""A stop string is found wherever it begins, and nothing of it is ever shown."""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.proxy.text.stop_strings import StopMatcher, StopSearch

if TYPE_CHECKING:
    from types import FrameType

letters = st.text("ab\u00e9", min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Look at the text one character more at a time."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters, min_size=1, max_size=3))
def test_any_cut_of_the_text_gives_what_the_whole_text_gives(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(StopSearch(stops))
    shown = ""
    text = ""
    for piece in pieces:
        text += piece
        shown += matcher.add_text(piece)
        # What was shown can never be taken back.
        assert naive("".join(pieces), stops)[0].startswith(shown)
        if matcher.matched is not None:
            break
        # Held back is only what may still become a stop string.
        assert any(stop.startswith(text[len(shown) :]) for stop in stops)
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == naive("".join(pieces), stops)


def test_text_passes_unchanged_without_stop_strings() -> None:
    matcher = StopMatcher(StopSearch(()))
    assert matcher.add_text("any") + matcher.add_text("thing") + matcher.flush() == "anything"


def test_before_min_tokens_a_stop_string_is_ordinary_text() -> None:
    matcher = StopMatcher(StopSearch(["ab"]))
    assert matcher.add_text("xab", may_match=False) == "xab"
    assert matcher.add_text("a") == ""
    assert matcher.add_text("b") == ""
    assert matcher.matched == "ab"


def test_the_longest_of_two_that_end_together_wins() -> None:
    matcher = StopMatcher(StopSearch(["b", "ab"]))
    assert matcher.add_text("xab") == "x"
    assert matcher.matched == "ab"


def reference(
    pieces: list[tuple[str, bool]], stops: list[str], keeps: bool
) -> tuple[list[str], str | None]:
    """What each piece shows, and the last of the text, by looking at everything at each
    character."""
    text, parts, shown = "", [], 0
    for piece, may_match in pieces:
        for char in piece:
            text += char
            found = [stop for stop in stops if may_match and text.endswith(stop)]
            if found:
                longest = max(found, key=len)
                end = len(text) if keeps else len(text) - len(longest)
                return [*parts, text[shown:end]], longest
        begins = {stop[:size] for stop in stops for size in range(len(stop))}
        held = next(i for i in range(shown, len(text) + 1) if text[i:] in begins)
        parts.append(text[shown:held])
        shown = held
    return [*parts, text[shown:]], None


@pytest.mark.parametrize("alphabet", ["a", "ab", "ab\u6f22", "abcd "])
def test_random_texts_and_stop_strings_give_what_a_slow_search_gives(alphabet: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)

    def word(most: int) -> str:
        return "".join(rng.choices(alphabet, k=rng.randint(0, most)))

    for _ in range(1500):
        stops = [word(rng.choice((3, 6, 12))) or "a" for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.5:  # one is made of others
            stops.append(rng.choice(stops) + rng.choice(stops))
            stops.append(stops[-1][rng.randrange(len(stops[-1])) :])
        begins = rng.choice((0, 0, 5))
        pieces = []
        for number in range(rng.randint(0, 12)):
            piece = rng.choice(stops)[: rng.randint(1, 12)] if rng.random() < 0.4 else word(5)
            pieces.append((piece, number >= begins))
        search, keeps = StopSearch(stops), rng.random() < 0.3
        expected, matched = reference(pieces, stops, keeps)
        for _ in range(2):  # choices of one request share the search
            matcher = StopMatcher(search, keeps=keeps)
            shown = []
            for piece, may_match in pieces:
                shown.append(matcher.add_text(piece, may_match=may_match))
                if matcher.matched is not None:
                    break
            else:
                shown.append(matcher.flush())
            assert (shown, matcher.matched) == (expected, matched), (stops, pieces)


def test_what_was_complete_before_min_tokens_is_not_found_behind_it() -> None:
    matcher = StopMatcher(StopSearch(["ab", "abcd"]))
    assert matcher.add_text("xab", may_match=False) == "x"
    assert matcher.add_text("c") == ""
    assert matcher.add_text("x") == "abcx"
    assert matcher.matched is None


HOSTILE = {
    "nearly all of a text": ["a" * 2400 + "c"] + [f"{'a' * (i + 1)}c" for i in range(56)],
    "ends that differ": ["a" * 63 + chr(0x4E00 + i) for i in range(64)],
    "long and alike": ["a" * 1300 + "c" + "a" * i for i in range(3)],
}


@pytest.mark.parametrize("stops", HOSTILE.values(), ids=HOSTILE.keys())
def test_work_grows_with_the_text_alone_however_alike_stop_strings_are(stops: list[str]) -> None:
    """Counts lines of the module that run; each does a bounded amount of work."""
    assert sum(map(len, stops)) <= 4096
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal lines
        if not frame.f_code.co_filename.endswith("stop_strings.py"):
            return None
        lines += event == "line"
        return trace

    search = StopSearch(stops)
    text = ["a" * 8] * 400 + ["b"] + ["a", "c", "ad"] * 300
    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        search.advance_state(0, "a", may_match=True)
        built, lines = lines, 0
        matcher = StopMatcher(search)
        for piece in text:
            matcher.add_text(piece, may_match=False)
    finally:
        sys.settrace(before)
    assert built <= 30 * sum(map(len, stops))
    assert lines <= 30 * sum(map(len, text))


def test_a_token_costs_microseconds_while_a_long_beginning_is_held_back() -> None:
    stops = ["a" * 2400 + "c"] + ["a" * (10 + i % 8) + "c" + "a" * 10 for i in range(63)]
    matcher = StopMatcher(StopSearch(stops))
    began = time.process_time()
    for _ in range(4000):
        assert matcher.add_text("a" * 8) in ("", "a" * 8) or matcher.matched is None
    assert time.process_time() - began < 2.0
