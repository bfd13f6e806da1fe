"""Reads JSON of models, and passes values on without parsing them."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

from pd.proxy.text.tools.incoming import MalformedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.proxy.text.tools.incoming import Incoming, Steps
    from pd.proxy.text.tools.reader import CallParser

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_OUTSIDE_OR_TAG = re.compile(r'["{}\[\]<]')
_SCALAR = re.compile(r"[^\s,:;{}\[\]\"<]*")
_MAX_SCALAR = 256
# JSON's and Python's null, and no text at all.
_NOTHING = ("null", "None", "")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Length of the longest escape.
_ESCAPE = 6


class BrokenValueError(MalformedError):
    """A call's arguments end inside a bracket."""


class Nesting:
    """Tracks the depth of brackets in a JSON text, and whether the text is inside a string."""

    def __init__(self, *, stops_at_tags: bool = False) -> None:
        """``stops_at_tags``: stop before ``<`` outside strings, too."""
        self.depth = 0
        self.in_string = False
        self._escaped = False
        self._outside = _OUTSIDE_OR_TAG if stops_at_tags else _OUTSIDE

    def follow_text(self, text: str, at: int, end: int) -> int:
        """Continue from ``at`` to the end of the outermost bracket or string, or to ``end``."""
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING if self.in_string else self._outside).search(text, at, end)
            if match is None:
                return end
            char = match[0]
            if char == "<":
                return match.start()
            at = match.end()
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = not self.in_string
            else:
                self.depth += 1 if char in "{[" else -1
            if self.is_closed:
                return at
        return at

    @property
    def is_closed(self) -> bool:
        return self.depth <= 0 and not self.in_string


def pass_value(
    source: Incoming, show: Callable[[str], None], closers: Sequence[str] = ()
) -> Steps[None]:
    """Show one value: brackets up to the closing one, a string, or a word.

    Args:
        closers: tags that end brackets even if some are open, unless they are inside a string.

    Raises MalformedError if there is no value, and BrokenValueError before a closer.
    """
    first = yield from source.peek_character()
    if first not in ("{", "[", '"'):
        word = yield from source.read_while(_SCALAR, _MAX_SCALAR)
        if not word:
            raise MalformedError
        show(word)
        return
    nesting = Nesting(stops_at_tags=bool(closers))
    while True:
        yield from source.require_text()
        end = nesting.follow_text(source.text, source.at, len(source.text))
        if end > source.at:
            show(source.read_characters(end - source.at))
        elif (yield from source.is_followed_by(closers)):
            raise BrokenValueError
        else:
            show(source.read_characters(1))
        if nesting.is_closed:
            return


def read_string(source: Incoming) -> Steps[str]:
    """Read a string. Raises MalformedError if there is none."""
    if (yield from source.peek_character()) != '"':
        raise MalformedError
    parts: list[str] = []
    yield from pass_value(source, parts.append)
    return str(_load_or_reject("".join(parts)))


def read_call(parser: CallParser, argument_keys: Sequence[str], known: bool = False) -> Steps[None]:
    """Read ``{"name": "f", "arguments": {…}}`` as a call. The caller holds the text.

    Args:
        argument_keys: names of the member with the arguments.
        known: accept only functions of the request.

    Raises MalformedError if it is not a call.
    """
    source = parser.source
    name, early, begun = None, "", False
    yield from source.expect_tag("{")
    while True:
        yield from source.skip_space()
        if (yield from source.read_one_of((",", "}"))) == "}":
            break
        yield from source.skip_space()
        key = yield from read_string(source)
        yield from source.skip_space()
        yield from source.expect_tag(":")
        yield from source.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(source)
            if known and name not in parser.options.kinds:
                raise MalformedError
            if early:
                parser.begin_call(name)
                parser.emit_arguments(early)
                parser.end_arguments()
                begun = True
                source.start_holding()
        elif key in argument_keys and not begun and name is not None:
            yield from pass_arguments(parser, name)
            begun = True
            source.start_holding()
        else:
            skipped: list[str] = []
            yield from pass_value(source, skipped.append)
            early = _unwrap_arguments("".join(skipped)) if key in argument_keys else early
    if not begun:
        if name is None:
            raise MalformedError
        parser.begin_call(name)
        parser.emit_arguments("{}")
    parser.end_call()


def read_calls(parser: CallParser, argument_keys: Sequence[str]) -> Steps[None]:
    """Read a JSON list of calls. The caller holds the text. Raises MalformedError."""
    source = parser.source
    yield from source.expect_tag("[")
    while True:
        yield from source.skip_space()
        if (yield from source.read_one_of((",", "]"))) == "]":
            source.take_held()
            return
        yield from source.skip_space()
        yield from read_call(parser, argument_keys)
        source.start_holding()


def pass_arguments(parser: CallParser, name: str, closers: Sequence[str] = ()) -> Steps[None]:
    """Begin a call, and emit the next value as its arguments.

    A string with a JSON object becomes this object. Raises MalformedError if there is no value,
    and BrokenValueError like :func:`pass_value`.
    """
    source, parts = parser.source, list[str]()
    first = yield from source.peek_character()
    if first in ("{", "["):
        parser.begin_call(name)
        yield from pass_value(source, parser.emit_arguments, closers)
    elif first == '"':
        parser.begin_call(name)
        try:
            yield from pass_value(source, parts.append)
        except MalformedError:  # the text has ended
            begun = _unwrap_beginning("".join(parts))
            parser.emit_arguments(begun)
            with contextlib.suppress(ValueError):
                load_json(begun)
                parser.end_arguments()  # it is complete
            raise
        parser.emit_arguments(_unwrap_arguments("".join(parts)))
    else:
        yield from pass_value(source, parts.append)
        arguments = _unwrap_arguments("".join(parts))
        _load_or_reject(arguments)
        parser.begin_call(name)
        parser.emit_arguments(arguments)
    parser.end_arguments()


def pass_call(parser: CallParser, name: str, closers: Sequence[str]) -> Steps[None]:
    """Emit a call whose arguments come next. The caller reads its closing tag.

    Args:
        closers: tags that end the call even inside brackets. Its arguments then stay incomplete.

    Raises MalformedError if there is no value.
    """
    try:
        yield from pass_arguments(parser, name, closers)
    except BrokenValueError:
        parser.leave_call()
    else:
        parser.end_call()


def _unwrap_arguments(value: str) -> str:
    """Return a call's arguments from the value written by a model.

    A string with an object becomes the object. Nothing becomes an empty object, because clients
    expect one. Any other value stays.
    """
    if value in _NOTHING:
        return "{}"
    try:
        inside = load_json(value) if value.startswith('"') else None
        if isinstance(inside, str):
            if inside.strip() in _NOTHING:
                return "{}"
            if isinstance(load_json(inside), dict):
                return _escape_surrogates(inside)
    except ValueError:  # the value or the string in it is not JSON
        pass
    return value


def _unwrap_beginning(string: str) -> str:
    """Return the known arguments in the beginning of a string."""
    for end in range(len(string), max(0, len(string) - _ESCAPE), -1):
        try:
            inside = load_json(string[:end] + '"')
        except ValueError:  # the string ends inside an escape, or is not JSON
            continue
        if not inside.strip():
            return "{"
        return _escape_surrogates(inside) if inside.lstrip().startswith("{") else string
    return string


def _escape_surrogates(text: str) -> str:
    """Escape halves of surrogate pairs in a JSON text, because they have no bytes."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def load_json(text: str) -> Any:
    """Parse a text strictly. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is too deep") from None


def _load_or_reject(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError:
        raise MalformedError from None


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
