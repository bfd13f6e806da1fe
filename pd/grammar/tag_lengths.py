"""Lengths of strings in structural tags, counted in a second grammar (:mod:`pd.grammar.lengths`).

To count, we must know in which string the output is. A structural tag must therefore make every
choice by its first characters. Its free text must end at a trigger or at the end of its tag. In all
other structural tags the lengths stay in the grammar.
"""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.grammar.lengths import (
    CONTROL,
    PROBE,
    PROBES,
    drop_lengths,
    has_lengths,
    is_clear,
    split_repetitions,
)
from pd.structured.pattern_parts import decode_character, list_members
from pd.structured.schema_walk import SCHEMA_OF_TAG, walk_tag_schemas

if TYPE_CHECKING:
    from collections.abc import Iterable

_JSON_BEGINS = tuple('{["-0123456789tfn')
_ONE_CHARACTER = re.compile(r"\[\^(?:\\.|[^\]\\])+\]", re.DOTALL)
_SPACES = " \t\n\v\f\r"
# Limit on the texts to distinguish at one place.
_MAX_BEGINNINGS = 4096
# Fields of a format that we understand. Others might allow more outputs.
_FIELDS = {
    "const_string": {"value"},
    "any_text": {"excludes"},
    "json_schema": {SCHEMA_OF_TAG, "max_whitespace_cnt"},
    "regex": {"pattern"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "tag": {"begin", "content", "end"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "dispatch": {"rules", "loop", "excludes"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
}


class SplitTag(NamedTuple):
    """A structural tag in two forms.

    Attributes:
        free: without lengths of strings.
        counted: with lengths.
        gates: texts that end free text, and first bytes of its alternatives. A token that begins in
            free text and leaves it contains the end of a gate.
    """

    free: object
    counted: object
    gates: tuple[bytes, ...]


def split_tag_lengths(structural_tag: Any) -> SplitTag | None:
    """Split a structural tag.

    Args:
        structural_tag: from :func:`pd.structured.schema_rewriting.rewrite_tag`. We do not change
            it.

    Returns:
        None if no string has a length, or if we may not know in which string the output is.
    """
    schemas = [part[SCHEMA_OF_TAG] for _, part in walk_tag_schemas(structural_tag)]
    bounded = [schema for schema in schemas if has_lengths(schema)]
    if not bounded or not all(map(is_clear, bounded)):
        return None
    gates: set[bytes] = set()
    try:
        _read_format(structural_tag["format"]).check_clear(_END, gates)
    except (_UnclearError, TypeError, KeyError, AttributeError, ValueError, RecursionError):
        return None  # xgrammar reports errors in the tag
    free, counted = copy.deepcopy(structural_tag), copy.deepcopy(structural_tag)
    for form, change in ((free, drop_lengths), (counted, split_repetitions)):
        for _, part in walk_tag_schemas(form):
            part[SCHEMA_OF_TAG] = change(part[SCHEMA_OF_TAG])
    return SplitTag(free, counted, tuple(sorted(gates)))


class _UnclearError(Exception):
    """Two ways to parse an output may lead into different strings."""


class _Beginnings(NamedTuple):
    """The possible beginnings of a text.

    Attributes:
        texts: it may begin with one of these.
        others: excluded characters: it may begin with any character outside one of these sets.
        any: it may begin with anything.
        joined: we prepend a preceding text to each of ``texts``.
    """

    texts: tuple[str, ...] = ()
    others: tuple[frozenset[str], ...] = ()
    any: bool = False
    joined: bool = False

    def __or__(self, other: _Beginnings) -> _Beginnings:
        joined = self.joined and other.joined
        return _Beginnings(
            self.texts + other.texts, self.others + other.others, self.any or other.any, joined
        )


_END, _ANY = _Beginnings(), _Beginnings(any=True)


def _check_distinct(choices: list[_Beginnings]) -> None:
    """Raise _UnclearError unless a text's beginning identifies its choice."""
    choices = [each for each in choices if each != _END]
    if len(choices) < 2:
        return
    texts = sorted(text for each in choices for text in each.texts)
    others = [each for choice in choices for each in choice.others]
    if any(each.any for each in choices) or len(texts) > _MAX_BEGINNINGS or len(others) > 1:
        raise _UnclearError
    for text, after in pairwise(texts):
        if after.startswith(text):
            raise _UnclearError
    if others and not all(text[0] in others[0] for text in texts):
        raise _UnclearError


class _TagPart:
    """A part of a structural tag."""

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        """Return the beginnings of this part followed by a rest with the given beginnings."""
        raise NotImplementedError

    def check_clear(self, rest: _Beginnings, gates: set[bytes]) -> None:
        """Raise _UnclearError if we may not know where in this part an output is.

        Adds texts that end free text to ``gates``.
        """


class _Text(_TagPart):
    def __init__(self, text: str) -> None:
        self.text = text
        _check_text(text)
        # Two adjacent texts must have fewer probe characters than we recognise a string by.
        if PROBE * (PROBES // 2) in text or (text and not text.strip(PROBE)):
            raise _UnclearError

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        if not self.text:
            return rest
        texts = tuple(self.text + each for each in rest.texts) if rest.joined else (self.text,)
        return _Beginnings(texts, joined=True)

    def check_clear(self, rest: _Beginnings, gates: set[bytes]) -> None:
        if self.text.endswith(PROBE) and (rest.any or rest.others):
            raise _UnclearError  # nothing distinguishes the end of this text from free text


class _Json(_TagPart):
    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        return _Beginnings(_JSON_BEGINS)


class _Blank(_TagPart):
    """Line ends outside strings."""

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        return _Beginnings(("\n",)) | rest._replace(joined=False)


class _Character(_TagPart):
    def __init__(self, excluded: frozenset[str]) -> None:
        self.excluded = excluded
        _check_text("".join(excluded))

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        return _Beginnings(others=(self.excluded,))

    def check_clear(self, rest: _Beginnings, gates: set[bytes]) -> None:
        if not rest.any:
            raise _UnclearError  # nothing distinguishes it from free text


class _FreeText(_TagPart):
    """Any text, up to an ``end`` if it is not empty."""

    def __init__(self, excludes: Iterable[str], end: str) -> None:
        self.end = end
        for each in (*excludes, end):
            _check_text(each)

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        return _ANY

    def check_clear(self, rest: _Beginnings, gates: set[bytes]) -> None:
        if self.end:
            gates.add(self.end.encode())
        elif rest != _END:
            raise _UnclearError


class _Sequence(_TagPart):
    def __init__(self, parts: list[_TagPart]) -> None:
        self.parts = parts

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        for part in reversed(self.parts):
            rest = part.list_beginnings(rest)
        return rest

    def check_clear(self, rest: _Beginnings, gates: set[bytes]) -> None:
        for part in reversed(self.parts):
            part.check_clear(rest, gates)
            rest = part.list_beginnings(rest)


class _Choice(_TagPart):
    def __init__(self, parts: list[_TagPart]) -> None:
        self.parts = parts

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        first, *others = (part.list_beginnings(rest) for part in self.parts)
        for each in others:
            first |= each
        return first

    def check_clear(self, rest: _Beginnings, gates: set[bytes]) -> None:
        begins = [part.list_beginnings(rest) for part in self.parts]
        _check_distinct(begins)
        if any(each.others for each in begins):  # these look like free text
            gates |= {text.encode()[:1] for each in begins for text in each.texts}
        for part in self.parts:
            part.check_clear(rest, gates)


class _Repeated(_TagPart):
    """A part repeated any number of times."""

    def __init__(self, part: _TagPart) -> None:
        self.part = part

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        return self.part.list_beginnings(_ANY) | rest

    def check_clear(self, rest: _Beginnings, gates: set[bytes]) -> None:
        once = self.part.list_beginnings(_ANY)
        _check_distinct([once, rest])
        if once.others or rest.others:
            raise _UnclearError
        self.part.check_clear(once | rest, gates)


class _Triggered(_TagPart):
    """Free text with triggers. Each trigger begins a part."""

    def __init__(self, rules: list[tuple[str, _TagPart]], excludes: Iterable[str]) -> None:
        self.rules = rules
        triggers = [trigger for trigger, _ in rules]
        for each in (*excludes, *triggers):
            _check_text(each)
        if not all(triggers) or len(triggers) > len(_JSON_BEGINS):
            raise _UnclearError
        for number, trigger in enumerate(triggers):
            if any(trigger in other for other in triggers[:number] + triggers[number + 1 :]):
                raise _UnclearError

    def list_beginnings(self, rest: _Beginnings) -> _Beginnings:
        return _ANY

    def check_clear(self, rest: _Beginnings, gates: set[bytes]) -> None:
        if rest != _END:
            raise _UnclearError
        for trigger, part in self.rules:
            gates.add(trigger.encode())
            part.check_clear(_ANY, gates)


def _check_text(text: object) -> None:
    """Raise _UnclearError unless this is a text without the character that marks free text."""
    if not isinstance(text, str) or CONTROL in text:
        raise _UnclearError


def _read_format(written: dict[str, Any]) -> _TagPart:
    """Read a format.

    Raises _UnclearError for an unknown one, and various errors for a wrong one.
    """
    kind = written["type"]
    if not set(written) <= {"type", *_FIELDS.get(kind, ())}:
        raise _UnclearError
    if kind == "const_string":
        return _Text(written["value"])
    if kind == "any_text":
        return _FreeText(written.get("excludes", ()), "")
    if kind == "json_schema":
        return _Json()
    if kind == "regex":
        return _read_pattern(written["pattern"])
    if kind == "sequence":
        return _Sequence(list(map(_read_format, written["elements"])))
    if kind == "or":
        return _Choice(list(map(_read_format, written["elements"])))
    if kind == "optional":
        return _Choice([_read_format(written["content"]), _Text("")])
    if kind == "tag":
        return _read_tag(written)
    if kind == "tags_with_separator":
        return _read_separated(written)
    if kind == "dispatch":
        rules = [(trigger, _read_format(content)) for trigger, content in written["rules"]]
        return _Triggered(rules, written.get("excludes", ()))
    if kind == "triggered_tags":
        return _read_triggered(written)
    raise _UnclearError


def _read_pattern(pattern: str) -> _TagPart:
    if pattern == r"\n{0,2}":  # after reasoning
        return _Blank()
    if not _ONE_CHARACTER.fullmatch(pattern):
        raise _UnclearError
    excluded = set[str]()
    for first, last in list_members(pattern):
        code = decode_character(first)
        if last or (code is None and first != r"\s"):
            raise _UnclearError
        excluded |= set(_SPACES) if code is None else {chr(code)}
    return _Character(frozenset(excluded))


def _read_tag(written: dict[str, Any], without: str = "") -> _TagPart:
    """Read a tag whose beginning lacks the trigger ``without``."""
    begin, content, end = (
        _Text(written["begin"][len(without) :]),
        written["content"],
        written["end"],
    )
    inside = _read_format(content)
    if isinstance(inside, _FreeText) and end:
        return _Sequence([begin, _FreeText(content.get("excludes", ()), end)])
    return _Sequence([begin, inside, _Text(end)])


def _read_separated(written: dict[str, Any]) -> _TagPart:
    tags = _Choice([_read_tag(each) for each in written["tags"]])
    parts: list[_TagPart] = [tags]
    if not written.get("stop_after_first"):
        parts.append(_Repeated(_Sequence([_Text(written["separator"]), tags])))
    some = _Sequence(parts)
    return some if written.get("at_least_one") else _Choice([some, _Text("")])


def _read_triggered(written: dict[str, Any]) -> _TagPart:
    tags, rules = written["tags"], list[tuple[str, _TagPart]]()
    for trigger in written["triggers"]:
        own = [each for each in tags if each["begin"].startswith(trigger)]
        rules.append((trigger, _Choice([_read_tag(each, trigger) for each in own])))
    text: _TagPart = _Triggered(rules, written.get("excludes", ()))
    if not written.get("at_least_one"):
        return text
    first = _Choice([_read_tag(each) for each in tags])
    return first if written.get("stop_after_first") else _Sequence([first, text])
