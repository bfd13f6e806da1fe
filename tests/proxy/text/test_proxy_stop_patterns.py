"""Stop patterns against Python's ``re``, in random pieces."""

from __future__ import annotations

import random
import re
import time

import pytest

from pd.core.errors import InvalidRequestError
from pd.proxy.text.stop_patterns import MAX_MATCH_CHARACTERS, MAX_STATES, StopPatternSearch
from pd.proxy.text.stop_strings import StopMatcher


def find_first_end(patterns: list[str], text: str) -> tuple[int, int] | None:
    """Return the match that ends first, with the leftmost start."""
    compiled = [re.compile(pattern) for pattern in patterns]
    for end in range(1, len(text) + 1):
        for start in range(end):
            if any(pattern.fullmatch(text, start, end) for pattern in compiled):
                return start, end
    return None


def draw_pattern(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", "b", "c", "[ab]", "[^a]", r"\d", r"\w", ".", "1", "(?:)"])
    kind = rng.randrange(5)
    inner = draw_pattern(rng, depth - 1)
    if kind == 0:
        return inner + draw_pattern(rng, depth - 1)
    if kind == 1:
        return f"(?:{inner}|{draw_pattern(rng, depth - 1)})"
    if kind == 2:
        return f"(?:{inner})" + rng.choice(["*", "+", "?", "*?", "+?", "??"])
    if kind == 3:
        return f"({inner})" + rng.choice(["{2}", "{1,3}", "{0,2}", "{2,}"])
    return inner


@pytest.mark.parametrize("part", range(3))
def test_the_first_complete_match_ends_the_text(seed: int, part: int) -> None:
    rng = random.Random(f"{seed}-{part}")
    searched = 0
    while searched < 300:
        patterns = [draw_pattern(rng, rng.randrange(4)) for _ in range(rng.choice([1, 1, 2]))]
        if any(re.fullmatch(pattern, "") for pattern in patterns):
            with pytest.raises(InvalidRequestError, match="matches the empty text"):
                StopPatternSearch(patterns)
            continue
        searched += 1
        text = "".join(rng.choice("abc1\n") for _ in range(rng.randrange(30)))
        keeps = rng.random() < 0.3
        matcher = StopMatcher(StopPatternSearch(patterns), keeps=keeps)
        shown, place = "", 0
        while place < len(text) and matcher.matched is None:
            size = rng.randrange(1, 6)
            shown += matcher.add_text(text[place : place + size])
            place += size
        match = find_first_end(patterns, text)
        context = (seed, part, patterns, text)
        if match is None:
            assert matcher.matched is None, context
            assert shown + matcher.flush() == text, context
        else:
            assert matcher.matched in patterns, context
            assert shown == text[: match[1] if keeps else match[0]], context


def test_text_is_held_back_from_where_a_match_may_begin() -> None:
    matcher = StopMatcher(StopPatternSearch([r"\d{3}x"]))
    assert matcher.add_text("ab1234") == "ab1"
    assert matcher.add_text("5") == "2"
    assert matcher.add_text("y9") == "345y"
    assert matcher.add_text("99x and more") == ""
    assert matcher.matched == r"\d{3}x"


def test_stop_strings_are_found_next_to_patterns() -> None:
    matcher = StopMatcher(StopPatternSearch([r"\d+!"], ["END.", "(x)"]))
    assert matcher.add_text("7 (x") == "7 "
    assert matcher.add_text(")") == ""
    assert matcher.matched == "(x)"


def test_a_match_before_the_minimum_of_tokens_passes() -> None:
    matcher = StopMatcher(StopPatternSearch(["ab"]))
    assert matcher.add_text("ab", may_match=False) == "ab"
    assert matcher.add_text("cab") == "c"
    assert matcher.matched == "ab"


def test_inline_flags_of_the_whole_pattern_count() -> None:
    matcher = StopMatcher(StopPatternSearch(["(?is)end.x"]))
    assert matcher.add_text("the END\nX") == "the "


def test_a_match_of_more_than_the_limit_is_not_found() -> None:
    matcher = StopMatcher(StopPatternSearch(["a.*b"]))
    text = "a" + "x" * (2 * MAX_MATCH_CHARACTERS)
    shown = "".join(matcher.add_text(text[i : i + 7]) for i in range(0, len(text), 7))
    assert len(text) - len(shown) <= MAX_MATCH_CHARACTERS
    assert matcher.add_text("b") and matcher.matched is None
    assert not matcher.add_text("ab") and matcher.matched == "a.*b"


@pytest.mark.parametrize("end", ["$", r"\Z"])
def test_an_end_of_the_text_is_wherever_the_pattern_matches(end: str) -> None:
    """SGLang searches the text so far, so its users write ``$`` for the moment."""
    matcher = StopMatcher(StopPatternSearch([rf"[.!?]\s{end}"]))
    assert matcher.add_text("Is it? yes") == "Is it" and matcher.matched == rf"[.!?]\s{end}"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a*", "matches the empty text"),
        ("(", "is no regular expression"),
        ("[z-a]", "is no regular expression"),
        ("^a", "an anchor"),
        ("(a$|b)c", "an anchor"),
        ("$", "matches the empty text"),
        (r"\ba", "an anchor"),
        ("(?=a)b", "a lookahead"),
        ("(?<!a)b", "a lookahead"),
        (r"(a)\1", "a back reference"),
        ("(a)?(?(1)b|c)", "a conditional group"),
        ("(?>a)b", "an atomic group"),
        ("a++b", "a possessive repetition"),
        ("(?i:a)", "inline flags"),
        ("a{1000}", "is too large"),
        ("(?:a{20}){20}", "is too large"),
        ("(?:(?:(?:x?){99}){99}){99}y", "is too large"),
        ("a{1,4294967294}", "is too large"),
        ("(" * 500 + "a" + ")" * 500, "is nested too deeply"),
        ("(?:" * 60 + "a?b?" + ")*" * 60 + "x", None),
        ("(?:(?:){1000000}){1000000}x", None),
    ],
)
def test_hostile_patterns_are_refused_or_cheap(pattern: str, reason: str | None) -> None:
    began = time.process_time()
    if reason is None:
        state, *_ = StopPatternSearch([pattern]).advance_state(0, "ab" * 50, may_match=True)
        assert len(state) <= MAX_STATES
    else:
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            StopPatternSearch([pattern])
        assert caught.value.param == "stop_regex"
    assert time.process_time() - began < 1


def test_many_answers_need_a_small_pattern() -> None:
    StopPatternSearch(["a{60}"], answers=64)
    with pytest.raises(InvalidRequestError, match="with n=64 at most 64"):
        StopPatternSearch(["a{100}"], answers=64)
