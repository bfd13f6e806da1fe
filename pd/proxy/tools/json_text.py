"""Reads JSON that models write, without parsing it: values are passed on as they are."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pd.proxy.tools.incoming import MalformedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.proxy.tools.incoming import Incoming, Steps
    from pd.proxy.tools.reader import CallParser

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r"[^\s,:;{}\[\]\"<]*")
_MAX_SCALAR = 256
_SURROGATE = re.compile("[\ud800-\udfff]")
# Characters of the longest escape.
_ESCAPE = 6


class Nesting:
    """Depth of brackets in which a text of JSON ends, and whether it ends in a string."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def follow(self, text: str, at: int, end: int) -> int:
        """Go on from ``at`` to where the outermost bracket or string closes; or to ``end``."""
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self.in_string else _OUTSIDE).search(text, at, end)
            if found is None:
                return end
            at = found.end()
            self._count(found[0])
            if self.closed:
                return at
        return at

    @property
    def closed(self) -> bool:
        return self.depth <= 0 and not self.in_string

    def _count(self, char: str) -> None:
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = not self.in_string
        else:
            self.depth += 1 if char in "{[" else -1


def pass_value(source: Incoming, show: Callable[[str], None]) -> Steps[None]:
    """Show one value: brackets that close, a string, or a word. Raises MalformedError for none."""
    first = yield from source.peek()
    if first not in ("{", "[", '"'):
        word = yield from source.while_in(_SCALAR, _MAX_SCALAR)
        if not word:
            raise MalformedError
        show(word)
        return
    nesting = Nesting()
    while True:
        yield from source.need()
        end = nesting.follow(source.text, source.at, len(source.text))
        show(source.take(end - source.at))
        if nesting.closed:
            return


def read_string(source: Incoming) -> Steps[str]:
    """Read a string. Raises MalformedError if there is none."""
    if (yield from source.peek()) != '"':
        raise MalformedError
    parts: list[str] = []
    yield from pass_value(source, parts.append)
    return str(_load("".join(parts)))


def read_call(parser: CallParser, argument_keys: Sequence[str], known: bool = False) -> Steps[None]:
    """Read ``{"name": "f", "arguments": {…}}`` as a call; the text is held from before it.

    Args:
        argument_keys: names of the member with the arguments.
        known: only functions of the request are calls.

    Raises MalformedError where it is no call.
    """
    source = parser.source
    name, early, begun = None, "", False
    yield from source.expect("{")
    while True:
        yield from source.skip_space()
        if (yield from source.one_of((",", "}"))) == "}":
            break
        yield from source.skip_space()
        key = yield from read_string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(source)
            if known and name not in parser.options.kinds:
                raise MalformedError
            if early:
                parser.begin_call(name)
                parser.arguments(early)
                begun = True
                source.hold()
        elif key in argument_keys and not begun and name is not None:
            parser.begin_call(name)
            begun = True
            yield from _pass_arguments(parser)
            source.hold()
        else:
            skipped: list[str] = []
            yield from pass_value(source, skipped.append)
            early = _unwrapped("".join(skipped)) if key in argument_keys else early
    if not begun:
        if name is None:
            raise MalformedError
        parser.begin_call(name)
        parser.arguments("{}")
    parser.end_call()


def _pass_arguments(parser: CallParser) -> Steps[None]:
    """Report the value that comes next as arguments; a text that is an object of JSON as that."""
    source = parser.source
    if (yield from source.peek()) != '"':
        yield from pass_value(source, parser.arguments)
        return
    parts: list[str] = []
    try:
        yield from pass_value(source, parts.append)
    except MalformedError:  # the text has ended
        parser.arguments(_beginning("".join(parts)))
        raise
    parser.arguments(_unwrapped("".join(parts)))


def _unwrapped(value: str) -> str:
    """The object that a value is which is a string with its text; any other value as it is."""
    try:
        inside = load_json(value) if value.startswith('"') else None
        if isinstance(inside, str) and isinstance(load_json(inside), dict):
            return _with_escapes(inside)
    except ValueError:  # one of the two is no JSON
        pass
    return value


def _beginning(string: str) -> str:
    """The same of the beginning of a string."""
    for end in range(len(string), max(0, len(string) - _ESCAPE), -1):
        try:
            inside = load_json(string[:end] + '"')
        except ValueError:  # it ends in an escape, or is no string of JSON
            continue
        return _with_escapes(inside) if inside.lstrip().startswith("{") else string
    return string


def _with_escapes(text: str) -> str:
    """A text of JSON in which halves of characters, which have no bytes, are escapes."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def load_json(text: str) -> Any:
    """Parse a text strictly. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is too deep") from None


def _load(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError:
        raise MalformedError from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
