"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopSearch:
    """The stop strings of one request, which all its choices share.

    They make an automaton (Aho and Corasick, "Efficient string matching", 1975): a tree of their
    prefixes, in which the state is the longest one that the text ends with. However alike the text
    and the stop strings are, it looks at a character once, and goes back as often as it went
    forward at most.

    Attributes:
        firsts: the characters that stop strings begin with; in the root no other leads anywhere.
    """

    # The children of most prefixes are one, whose number is the next; ``_labels`` has the character
    # that leads there, and ``_branches`` has the other children. ``_fails`` is the longest proper
    # suffix of a prefix that is a prefix too, and ``_matches`` the length of the longest stop
    # string that it ends with.
    __slots__ = ("_branches", "_depths", "_fails", "_labels", "_matches", "_stops", "firsts")

    def __init__(self, stops: Sequence[str]) -> None:
        self.firsts = frozenset(stop[0] for stop in stops)
        self._stops = stops
        # Made when the text first has one of these characters.
        self._labels: list[str] = []

    def advance(self, state: int, text: str, *, may_match: bool) -> tuple[int, int, int, int]:
        """Read ``text`` in a state, which is 0 at the beginning, up to the end of a stop string.

        Returns the new state, how many characters at the end may begin a stop string, how many of
        ``text`` were read, and the length of the stop string that ends there (0 if none does).
        """
        if not self._labels:
            self._build()
        labels, firsts, matches = self._labels, self.firsts, self._matches
        for end, char in enumerate(text, 1):
            if labels[state] == char:
                state += 1
            elif state or char in firsts:
                state = self._next(state, char)
            else:
                continue
            if length := matches[state]:
                if may_match:
                    return 0, 0, end, length
                while state and self._is_leaf(state):
                    state = self._fails[state]
        return state, self._depths[state], len(text), 0

    def _next(self, state: int, char: str) -> int:
        labels, branches = self._labels, self._branches
        while labels[state] != char:
            if (others := branches.get(state)) and (child := others.get(char)):
                return child
            if not state:
                return 0
            state = self._fails[state]
        return state + 1

    def _is_leaf(self, state: int) -> bool:
        """Whether no stop string goes on behind this prefix, which therefore is a whole one."""
        return not self._labels[state] and state not in self._branches

    def _build(self) -> None:
        self._labels, self._branches = [""], dict[int, dict[str, int]]()
        self._depths, self._matches = array("i", [0]), array("i", [0])
        for stop in self._stops:
            self._add(stop)
        firsts, matches = self.firsts, self._matches
        self._fails = fails = array("i", [0]) * len(self._labels)
        states = [child for _, child in self._children(0)]
        for state in states:  # the shorter ones first
            fail = fails[state]
            if not matches[state]:
                matches[state] = matches[fail]
            for char, child in self._children(state):
                if fail or char in firsts:
                    fails[child] = self._next(fail, char)
                states.append(child)

    def _add(self, stop: str) -> None:
        """Add the prefixes of a stop string that are new, a chain at the end of the known ones."""
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

    def _children(self, state: int) -> Sequence[tuple[str, int]]:
        label = self._labels[state]
        chain = ((label, state + 1),) if label else ()
        others = self._branches.get(state)
        return (*chain, *others.items()) if others else chain


class StopMatcher:
    """Passes text on up to a stop string, and holds back what may turn out to be a part of one.

    The stop string that is complete first counts; if several are complete at the same character,
    the longest does. So the result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_firsts", "_held", "_keeps", "_search", "_state", "matched")

    def __init__(self, search: StopSearch, *, keeps: bool = False) -> None:
        """``keeps``: the stop string itself is shown."""
        self._search, self._keeps = search, keeps
        self._firsts = search.firsts
        self._held = ""
        self._state = 0
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add text and return what may be shown. Once ``matched`` is set nothing more is.

        Args:
            may_match: False passes stop strings on that this text completes (before
                ``min_tokens``).
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text  # nearly always; also without stop strings
        self._state, depth, end, length = self._search.advance(
            self._state, text, may_match=may_match
        )
        end += len(self._held)
        text = self._held + text
        if length:
            start = end - length
            self.matched = text[start:end]
            self._held = ""
            return text[:end] if self._keeps else text[:start]
        shown = end - depth
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text that was held back; called when the text ends without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
