"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.text.stop_patterns import StopPatternSearch


class StopSearch:
    """The stop strings of a request, shared by all its choices.

    This is the automaton of Aho and Corasick ("Efficient string matching", 1975): a tree of the
    strings' prefixes, whose state is the longest prefix that the text ends with. It reads each
    character once and never steps back more often than it stepped forward, so similar texts and
    stop strings do not slow it down.

    Attributes:
        firsts: first characters of the stop strings. No other character leaves the root.
    """

    # Most prefixes have a single child, whose number is the next. ``_labels`` holds the character
    # of that child, ``_branches`` any other children. ``_fails`` is the longest proper suffix of a
    # prefix that is a prefix, too. ``_matches`` is the length of the longest stop string that a
    # prefix ends with.
    __slots__ = (
        "_branches",
        "_depths",
        "_fails",
        "_labels",
        "_matches",
        "_stops",
        "firsts",
        "is_absent",
    )

    def __init__(self, stops: Sequence[str]) -> None:
        self.firsts = frozenset(stop[0] for stop in stops)
        # Whether a text has none of these characters. An attribute, because every token asks.
        self.is_absent = self.firsts.isdisjoint
        self._stops = stops
        # Built when one of these characters first occurs in the text.
        self._labels: list[str] = []

    def advance_state(self, state: int, text: str, *, may_match: bool) -> tuple[int, int, int, int]:
        """Read ``text`` from a state, which is 0 at first, up to the end of a stop string.

        Return the new state, the number of characters at the end that may begin a stop string, the
        number of characters read, and the length of the stop string that ends there (0 for none).
        """
        if not self._labels:
            self._build_automaton()
        labels, firsts, matches = self._labels, self.firsts, self._matches
        for end, char in enumerate(text, 1):
            if labels[state] == char:
                state += 1
            elif state or char in firsts:
                state = self._find_next(state, char)
            else:
                continue
            if length := matches[state]:
                if may_match:
                    return 0, 0, end, length
                # Leave whole stop strings without a longer one.
                while state and not labels[state] and state not in self._branches:
                    state = self._fails[state]
        return state, self._depths[state], len(text), 0

    def name_stop(self, state: int, text: str) -> str:
        """Return the name of the stop that ended a text: here the stop string itself."""
        return text

    def _find_next(self, state: int, char: str) -> int:
        labels, branches = self._labels, self._branches
        while labels[state] != char:
            if (others := branches.get(state)) and (child := others.get(char)):
                return child
            if not state:
                return 0
            state = self._fails[state]
        return state + 1

    def _build_automaton(self) -> None:
        self._labels, self._branches = [""], dict[int, dict[str, int]]()
        self._depths, self._matches = array("i", [0]), array("i", [0])
        for stop in self._stops:
            self._add_stop(stop)
        firsts, matches = self.firsts, self._matches
        self._fails = fails = array("i", [0]) * len(self._labels)
        states = [child for _, child in self._list_children(0)]
        for state in states:  # shorter prefixes first
            fail = fails[state]
            if not matches[state]:
                matches[state] = matches[fail]
            for char, child in self._list_children(state):
                if fail or char in firsts:
                    fails[child] = self._find_next(fail, char)
                states.append(child)

    def _add_stop(self, stop: str) -> None:
        """Add the new prefixes of a stop string, as a chain after the known ones."""
        labels, branches = self._labels, self._branches
        state = 0
        for depth, char in enumerate(stop, 1):
            if labels[state] == char:
                state += 1
                continue
            child = branches.get(state, {}).get(char)
            if child is None:
                child = len(labels)
                if state == child - 1:
                    labels[state] = char
                else:
                    branches.setdefault(state, {})[char] = child
                labels += [*stop[depth:], ""]
                self._depths.extend(range(depth, len(stop) + 1))
                state = len(labels) - 1
                self._matches.extend([0] * (state - child + 1))
                break
            state = child
        self._matches[state] = len(stop)

    def _list_children(self, state: int) -> Sequence[tuple[str, int]]:
        label = self._labels[state]
        chain = ((label, state + 1),) if label else ()
        others = self._branches.get(state)
        return (*chain, *others.items()) if others else chain


class StopMatcher:
    """Passes text on up to a stop string, and holds back a possible beginning of one.

    The first complete stop string wins. If several are complete at the same character, the longest
    wins. So the result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_held", "_is_absent", "_keeps", "_search", "_state", "matched")

    def __init__(self, search: StopSearch | StopPatternSearch, *, keeps: bool = False) -> None:
        """``keeps``: show the stop string itself, too."""
        self._search, self._keeps = search, keeps
        self._is_absent = search.is_absent
        self._held = ""
        self._state: Any = 0
        self.matched: str | None = None

    def add_text(self, text: str, *, may_match: bool = True) -> str:
        """Add text, and return the part to show. After a match nothing more is shown.

        Args:
            may_match: if False, a stop string completed by this text passes (before
                ``min_tokens``).
        """
        if not self._held and self._is_absent(text):
            return text  # nearly always, and without stop strings
        self._state, depth, end, length = self._search.advance_state(
            self._state, text, may_match=may_match
        )
        end += len(self._held)
        text = self._held + text
        if length:
            start = end - length
            self.matched = self._search.name_stop(self._state, text[start:end])
            self._held = ""
            return text[:end] if self._keeps else text[:start]
        shown = end - depth
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the held text, because the text ends without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
