"""Lengths of strings in structural tags, counted beside the grammar.

See :mod:`pd.grammar.lengths`.

Counting needs to know which string is being written. In a structural tag that is so if every choice
is made by its first characters, and if free text ends where a tag begins: at a trigger, or at the
end of the tag that has the text. A structural tag of which that cannot be said has the lengths in
its grammar.
"""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.json_schemas import SCHEMA_OF_TAG, schemas_of_tags
from pd.core.patterns import character, members
from pd.grammar.lengths import (
    CONTROL,
    PROBE,
    PROBES,
    has_lengths,
    is_clear,
    with_lengths,
    without_lengths,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_JSON_BEGINS = tuple('{["-0123456789tfn')
_ONE_CHARACTER = re.compile(r"\[\^(?:\\.|[^\]\\])+\]", re.DOTALL)
_SPACES = " \t\n\v\f\r"
# Texts that are told apart at one place.
_MAX_BEGINS = 4096
# Fields of a format that are read here. Others might let more be written.
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
        free: without the lengths of its strings.
        counted: with them.
        gates: texts that end free text, and the first byte of what may come instead of it. A token
            that begins in free text and goes on in something else has the end of one.
    """

    free: object
    counted: object
    gates: tuple[bytes, ...]


def split_tag_lengths(structural_tag: Any) -> SplitTag | None:
    """Split a structural tag.

    Args:
        structural_tag: from :func:`pd.grammar.json_schemas.prepare_tags`. It is not changed.

    Returns:
        None if no string has a length, or if it may be unknown which string is being written.
    """
    schemas = [part[SCHEMA_OF_TAG] for _, part in schemas_of_tags(structural_tag)]
    bounded = [schema for schema in schemas if has_lengths(schema)]
    if not bounded or not all(map(is_clear, bounded)):
        return None
    gates: set[bytes] = set()
    try:
        _part(structural_tag["format"]).check(_END, gates)
    except (_UnclearError, TypeError, KeyError, AttributeError, ValueError, RecursionError):
        return None  # what is wrong with it xgrammar says
    free, counted = copy.deepcopy(structural_tag), copy.deepcopy(structural_tag)
    for form, change in ((free, without_lengths), (counted, with_lengths)):
        for _, part in schemas_of_tags(form):
            part[SCHEMA_OF_TAG] = change(part[SCHEMA_OF_TAG])
    return SplitTag(free, counted, tuple(sorted(gates)))


class _UnclearError(Exception):
    """Two readings of an output may be in different strings."""


class _Begins(NamedTuple):
    """How a text may begin.

    Attributes:
        texts: one of these.
        others: sets of characters: it begins with a character that one of them lacks.
        any: or with anything.
        joined: whether a text before it and each of ``texts`` are looked at as one.
    """

    texts: tuple[str, ...] = ()
    others: tuple[frozenset[str], ...] = ()
    any: bool = False
    joined: bool = False

    def __or__(self, other: _Begins) -> _Begins:
        joined = self.joined and other.joined
        return _Begins(
            self.texts + other.texts, self.others + other.others, self.any or other.any, joined
        )


_END, _ANY = _Begins(), _Begins(any=True)


def _check_apart(choices: list[_Begins]) -> None:
    """Raise _UnclearError unless the beginning tells of which choice a text is."""
    choices = [each for each in choices if each != _END]
    if len(choices) < 2:
        return
    texts = sorted(text for each in choices for text in each.texts)
    others = [each for choice in choices for each in choice.others]
    if any(each.any for each in choices) or len(texts) > _MAX_BEGINS or len(others) > 1:
        raise _UnclearError
    for text, after in pairwise(texts):
        if after.startswith(text):
            raise _UnclearError
    if others and not all(text[0] in others[0] for text in texts):
        raise _UnclearError


class _TagPart:
    """A part of a structural tag."""

    def begins(self, behind: _Begins) -> _Begins:
        """How this and what is behind it may begin together."""
        raise NotImplementedError

    def check(self, behind: _Begins, gates: set[bytes]) -> None:
        """Raise _UnclearError if it may be unknown where in this part an output is. Texts that
        end free text are added to ``gates``."""


class _Text(_TagPart):
    def __init__(self, text: str) -> None:
        self.text = text
        _check_text(text)
        # Texts behind each other have fewer of the character than a string is told by.
        if PROBE * (PROBES // 2) in text or (text and not text.strip(PROBE)):
            raise _UnclearError

    def begins(self, behind: _Begins) -> _Begins:
        if not self.text:
            return behind
        texts = tuple(self.text + each for each in behind.texts) if behind.joined else (self.text,)
        return _Begins(texts, joined=True)

    def check(self, behind: _Begins, gates: set[bytes]) -> None:
        if self.text.endswith(PROBE) and (behind.any or behind.others):
            raise _UnclearError  # the end of this and free text are told apart by nothing


class _Json(_TagPart):
    def begins(self, behind: _Begins) -> _Begins:
        return _Begins(_JSON_BEGINS)


class _Blank(_TagPart):
    """Some line ends, which are no part of any string."""

    def begins(self, behind: _Begins) -> _Begins:
        return _Begins(("\n",)) | behind._replace(joined=False)


class _Character(_TagPart):
    def __init__(self, excluded: frozenset[str]) -> None:
        self.excluded = excluded
        _check_text("".join(excluded))

    def begins(self, behind: _Begins) -> _Begins:
        return _Begins(others=(self.excluded,))

    def check(self, behind: _Begins, gates: set[bytes]) -> None:
        if not behind.any:
            raise _UnclearError  # it is told from free text by nothing


class _FreeText(_TagPart):
    """Any text; with an ``end``, up to that."""

    def __init__(self, excludes: Iterable[str], end: str) -> None:
        self.end = end
        for each in (*excludes, end):
            _check_text(each)

    def begins(self, behind: _Begins) -> _Begins:
        return _ANY

    def check(self, behind: _Begins, gates: set[bytes]) -> None:
        if self.end:
            gates.add(self.end.encode())
        elif behind != _END:
            raise _UnclearError


class _Sequence(_TagPart):
    def __init__(self, parts: list[_TagPart]) -> None:
        self.parts = parts

    def begins(self, behind: _Begins) -> _Begins:
        for part in reversed(self.parts):
            behind = part.begins(behind)
        return behind

    def check(self, behind: _Begins, gates: set[bytes]) -> None:
        for part in reversed(self.parts):
            part.check(behind, gates)
            behind = part.begins(behind)


class _Choice(_TagPart):
    def __init__(self, parts: list[_TagPart]) -> None:
        self.parts = parts

    def begins(self, behind: _Begins) -> _Begins:
        first, *others = (part.begins(behind) for part in self.parts)
        for each in others:
            first |= each
        return first

    def check(self, behind: _Begins, gates: set[bytes]) -> None:
        begins = [part.begins(behind) for part in self.parts]
        _check_apart(begins)
        if any(each.others for each in begins):  # which looks like free text
            gates |= {text.encode()[:1] for each in begins for text in each.texts}
        for part in self.parts:
            part.check(behind, gates)


class _Repeated(_TagPart):
    """Any number of times."""

    def __init__(self, part: _TagPart) -> None:
        self.part = part

    def begins(self, behind: _Begins) -> _Begins:
        return self.part.begins(_ANY) | behind

    def check(self, behind: _Begins, gates: set[bytes]) -> None:
        once = self.part.begins(_ANY)
        _check_apart([once, behind])
        if once.others or behind.others:
            raise _UnclearError
        self.part.check(once | behind, gates)


class _Triggered(_TagPart):
    """Free text in which each trigger begins a part."""

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

    def begins(self, behind: _Begins) -> _Begins:
        return _ANY

    def check(self, behind: _Begins, gates: set[bytes]) -> None:
        if behind != _END:
            raise _UnclearError
        for trigger, part in self.rules:
            gates.add(trigger.encode())
            part.check(_ANY, gates)


def _check_text(text: object) -> None:
    """Raise _UnclearError for what is no text, or has the character by which free text is told."""
    if not isinstance(text, str) or CONTROL in text:
        raise _UnclearError


def _part(written: dict[str, Any]) -> _TagPart:
    """Read a format. Raises _UnclearError for one that is not known here, and errors of all kinds
    for what is none."""
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
        return _of_pattern(written["pattern"])
    if kind == "sequence":
        return _Sequence(list(map(_part, written["elements"])))
    if kind == "or":
        return _Choice(list(map(_part, written["elements"])))
    if kind == "optional":
        return _Choice([_part(written["content"]), _Text("")])
    if kind == "tag":
        return _tag(written)
    if kind == "tags_with_separator":
        return _separated(written)
    if kind == "dispatch":
        rules = [(trigger, _part(content)) for trigger, content in written["rules"]]
        return _Triggered(rules, written.get("excludes", ()))
    if kind == "triggered_tags":
        return _triggered_tags(written)
    raise _UnclearError


def _of_pattern(pattern: str) -> _TagPart:
    if pattern == r"\n{0,2}":  # behind reasoning
        return _Blank()
    if not _ONE_CHARACTER.fullmatch(pattern):
        raise _UnclearError
    excluded = set[str]()
    for first, last in members(pattern):
        code = character(first)
        if last or (code is None and first != r"\s"):
            raise _UnclearError
        excluded |= set(_SPACES) if code is None else {chr(code)}
    return _Character(frozenset(excluded))


def _tag(written: dict[str, Any], without: str = "") -> _TagPart:
    """A tag, whose beginning lacks a text that was read before."""
    begin, content, end = (
        _Text(written["begin"][len(without) :]),
        written["content"],
        written["end"],
    )
    inside = _part(content)
    if isinstance(inside, _FreeText) and end:
        return _Sequence([begin, _FreeText(content.get("excludes", ()), end)])
    return _Sequence([begin, inside, _Text(end)])


def _separated(written: dict[str, Any]) -> _TagPart:
    tags = _Choice([_tag(each) for each in written["tags"]])
    parts: list[_TagPart] = [tags]
    if not written.get("stop_after_first"):
        parts.append(_Repeated(_Sequence([_Text(written["separator"]), tags])))
    some = _Sequence(parts)
    return some if written.get("at_least_one") else _Choice([some, _Text("")])


def _triggered_tags(written: dict[str, Any]) -> _TagPart:
    tags, rules = written["tags"], list[tuple[str, _TagPart]]()
    for trigger in written["triggers"]:
        begun = [each for each in tags if each["begin"].startswith(trigger)]
        rules.append((trigger, _Choice([_tag(each, trigger) for each in begun])))
    text: _TagPart = _Triggered(rules, written.get("excludes", ()))
    if not written.get("at_least_one"):
        return text
    first = _Choice([_tag(each) for each in tags])
    return first if written.get("stop_after_first") else _Sequence([first, text])
