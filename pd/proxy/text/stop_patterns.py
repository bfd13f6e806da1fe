"""Finds regular expressions in a text that arrives in pieces, for ``stop_regex``."""

from __future__ import annotations

import re

# The standard library's own parser of patterns. It has had this private name since Python 3.11.
from re import _parser as parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.brief import short_repr
from pd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_PATTERN_CHARACTERS = 1024
# States of all patterns of a request. Each character of an answer visits a state at most once.
MAX_STATES = 256
MAX_TRANSITIONS = 2048
# States times answers, because each answer is searched.
MAX_STATES_OF_ANSWERS = 4096
# A longer match is not found, so we never hold back more text.
MAX_MATCH_CHARACTERS = 4096

_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_ENDS = ("AT_END", "AT_END_STRING")
_REFUSED = {
    "AT": "an anchor or a word boundary",
    "ASSERT": "a lookahead or lookbehind",
    "ASSERT_NOT": "a lookahead or lookbehind",
    "GROUPREF": "a back reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


class _SearchState(NamedTuple):
    """A state of the automaton: it reads one character, or it ends a pattern.

    Attributes:
        test: is true of the character that leads to ``after``, or None at the end of a pattern.
        after: the states that follow the character.
        pattern: index of the pattern of an end.
    """

    test: Callable[[str], object] | None
    after: tuple[int, ...] = ()
    pattern: int = 0


class StopPatternSearch:
    """The regular expressions and stop strings of a request, shared by all its choices.

    This is Thompson's simulation ("Regular expression search algorithm", 1968): it reads each
    character once and follows all states together, so no pattern makes it backtrack. A thread of
    the simulation carries its start, because we hold back the text from the leftmost start on.

    It has the interface of :class:`pd.proxy.text.stop_strings.StopSearch`. A state of the search is
    a dict from live states to the number of characters since their start.
    """

    def __init__(
        self, patterns: Sequence[str], stops: Sequence[str] = (), *, answers: int = 1
    ) -> None:
        """Build the automaton.

        Args:
            stops: strings to find, too.
            answers: number of answers to search.

        Raises:
            InvalidRequestError: a pattern is wrong, cannot be searched or is too large.
        """
        self._states: list[_SearchState] = []
        self._names = [*patterns, *stops]
        self._num_loops = 0
        self._flags = 0
        firsts: list[int] = []
        for number, name in enumerate(self._names):
            source = name if number < len(patterns) else re.escape(name)
            try:
                firsts.extend(self._add_pattern(source, number))
            except re.error as error:
                raise _refuse(name, f"is no regular expression: {error}") from error
            except (RecursionError, OverflowError) as error:
                raise _refuse(name, "is nested too deeply or repeats too often") from error
            except _RefusedError as error:
                raise _refuse(name, str(error)) from error
        self._firsts = tuple(dict.fromkeys(firsts))
        if answers * len(self._states) > MAX_STATES_OF_ANSWERS:
            raise InvalidRequestError(
                f"stop_regex has {len(self._states)} characters and classes; with n={answers} at "
                f"most {MAX_STATES_OF_ANSWERS // answers} are supported",
                param="stop_regex",
            )

    def is_absent(self, text: str) -> bool:
        """Return whether no match can begin in ``text``. Only a search can say that."""
        return False

    def name_stop(self, state: int, text: str) -> str:
        """Return the pattern or stop string that ended a text."""
        return self._names[state]

    def advance_state(self, state: Any, text: str, *, may_match: bool) -> tuple[Any, int, int, int]:
        """Read ``text`` from a state, which is 0 at first, up to the end of a match.

        Return the new state, the number of characters at the end that may begin a match, the number
        of characters read, and the length of the match that ends there (0 for none). At a match the
        state is the number of its pattern.
        """
        live: dict[int, int] = state or {}
        states, firsts = self._states, self._firsts
        for position, char in enumerate(text, 1):
            following: dict[int, int] = {}
            # Older threads come first, so each state keeps its leftmost start.
            for number, length in (*live.items(), *((first, 0) for first in firsts)):
                test, after, _ = states[number]
                if test is not None and length < MAX_MATCH_CHARACTERS and test(char):
                    for successor in after:
                        following.setdefault(successor, length + 1)
            live = {}
            for number, length in following.items():
                if states[number].test is not None:
                    live[number] = length
                elif may_match:
                    return states[number].pattern, 0, position, length
        return live, max(live.values(), default=0), len(text), 0

    def _add_pattern(self, source: str, number: int) -> tuple[int, ...]:
        """Add the states of a pattern, and return the states that it begins with."""
        parsed = parser.parse(source)
        self._flags = parsed.state.flags
        end = self._add_state(_SearchState(None, pattern=number))
        items = list(parsed)
        # The text ends as soon as it matches, so an end of the text asks for nothing more.
        while items and str(items[-1][0]) == "AT" and str(items[-1][1]) in _ENDS:
            items.pop()
        entry = self._add_sequence(items, (end,))
        if end in entry:
            raise _RefusedError("matches the empty text, so it would end every answer at once")
        if sum(len(state.after) for state in self._states) > MAX_TRANSITIONS:
            raise _RefusedError("has too many nested repetitions")
        return entry

    def _add_state(self, state: _SearchState) -> int:
        if len(self._states) >= MAX_STATES:
            raise _RefusedError(f"is too large (at most {MAX_STATES} characters and classes)")
        self._states.append(state)
        return len(self._states) - 1

    def _add_sequence(self, items: Any, after: tuple[int, ...]) -> tuple[int, ...]:
        """Add the states of a parsed sequence, and return the states that it begins with."""
        for operation, argument in reversed(list(items)):
            after = self._add_item(str(operation), argument, after)
        return after

    def _add_item(self, name: str, argument: Any, after: tuple[int, ...]) -> tuple[int, ...]:
        if name in _REFUSED:
            raise _RefusedError(
                f"uses {_REFUSED[name]}, which cannot be searched in a growing text"
            )
        if name == "SUBPATTERN":
            _, added, removed, items = argument
            if added or removed:
                raise _RefusedError("has inline flags, which are not supported")
            return self._add_sequence(items, after)
        if name == "BRANCH":
            _, branches = argument
            entries = [self._add_sequence(branch, after) for branch in branches]
            return _merge_states(entries)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, items = argument
            return self._add_repetition(least, most, items, after)
        if name == "LITERAL" and not self._flags & re.IGNORECASE:
            test: Callable[[str], object] = chr(argument).__eq__
        else:
            test = re.compile(_write_class(name, argument), self._flags).match
        return (self._add_state(_SearchState(test, after)),)

    def _add_repetition(
        self, least: int, most: Any, items: Any, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        is_open = most is parser.MAXREPEAT
        leave = after
        if is_open:
            after = self._add_loop(items, after)
        for number in range(least if is_open else int(most)):
            before = len(self._states)
            entry = self._add_sequence(items, after)
            is_optional = not is_open and number < int(most) - least
            after = _merge_states([entry, leave]) if is_optional else entry
            if len(self._states) == before:
                break  # the repeated part is empty
        return after

    def _add_loop(self, items: Any, leave: tuple[int, ...]) -> tuple[int, ...]:
        """Add any number of repetitions of ``items``, none included."""
        self._num_loops += 1
        beginning = -self._num_loops  # stands for the loop's first states, until they exist
        before = len(self._states)
        entry = self._add_sequence(items, (beginning, *leave))
        loop = tuple(number for number in entry if number != beginning)
        loop = _merge_states([loop, leave])
        for number in range(before, len(self._states)):
            state = self._states[number]
            if beginning in state.after:
                others = [other for other in state.after if other != beginning]
                self._states[number] = state._replace(after=_merge_states([loop, others]))
        return loop


class _RefusedError(ValueError):
    """The reason for which a pattern is refused."""


def _refuse(pattern: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"stop_regex {short_repr(pattern)} {reason}", param="stop_regex")


def _merge_states(entries: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number for entry in entries for number in entry))


def _write_class(name: str, argument: Any) -> str:
    """Write the pattern of one character from a parsed item."""
    if name == "ANY":
        return "."
    if name == "LITERAL":
        return _write_character(argument)
    if name == "NOT_LITERAL":
        return f"[^{_write_character(argument)}]"
    if name != "IN":
        raise _RefusedError(f"uses {name.lower()}, which is not supported")
    return f"[{''.join(_write_member(str(kind), value) for kind, value in argument)}]"


def _write_member(kind: str, value: Any) -> str:
    if kind == "NEGATE":
        return "^"
    if kind == "CATEGORY":
        return _CATEGORIES[str(value)]
    if kind == "RANGE":
        return f"{_write_character(value[0])}-{_write_character(value[1])}"
    return _write_character(value)


def _write_character(code: int) -> str:
    return f"\\U{code:08x}"
