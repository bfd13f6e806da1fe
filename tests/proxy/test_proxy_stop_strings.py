"""A stop string is found wherever it begins, and nothing of it is ever shown."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pd.proxy.stop_strings import StopMatcher

letters = st.text("ab\u00e9", min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Look at the text one character more at a time."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=1000, deadline=None)
@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters, min_size=1, max_size=3))
def test_any_cut_of_the_text_gives_what_the_whole_text_gives(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    text = ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
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
    matcher = StopMatcher(())
    assert matcher.push("any") + matcher.push("thing") + matcher.flush() == "anything"


def test_before_min_tokens_a_stop_string_is_ordinary_text() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", may_match=False) == "xab"
    assert matcher.push("a") == ""
    assert matcher.push("b") == ""
    assert matcher.matched == "ab"


def test_the_longest_of_two_that_end_together_wins() -> None:
    matcher = StopMatcher(["b", "ab"])
    assert matcher.push("xab") == "x"
    assert matcher.matched == "ab"
