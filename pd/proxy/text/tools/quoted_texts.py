"""Texts in quotes, as Python and JSON write them."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

from pd.proxy.text.tools.incoming import MalformedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.text.tools.incoming import Incoming, Steps

_DIGITS = re.compile(r"[0-9A-Fa-f]*")
_OCTAL = re.compile(r"[0-7]*")
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\n": "",
    "/": "/",  # only in JSON
}
_CODES = {"x": 2, "u": 4, "U": 8}


def escape_text(text: str) -> str:
    """Escape a part of a text for a string in JSON.

    Half a surrogate pair alone is named, because it has no bytes.
    """
    is_half = len(text) == 1 and "\ud800" <= text <= "\udfff"
    return json.dumps(text, ensure_ascii=is_half)[1:-1]


def pass_quoted(
    source: Incoming, show: Callable[[str], None], *, raw: bool = False, may_triple: bool = True
) -> Steps[None]:
    """Read a text whose opening quote comes next, and show it without quotes, escaped for JSON.

    Args:
        raw: backslashes are a part of the text.
        may_triple: three quotes are a quote, too.

    Raises MalformedError if it does not end, or for a wrong escape.
    """
    quote = source.read_characters(1)
    if may_triple and (yield from source.peek_character()) == quote:
        source.read_characters(1)
        if (yield from source.peek_character()) != quote:
            return
        source.read_characters(1)
        quote *= 3
    while True:
        end = yield from source.pass_until((quote, "\\"), lambda text: show(escape_text(text)))
        if end != "\\":
            break
        show(escape_text((yield from _read_raw_escape(source) if raw else _read_escape(source))))
    if not end:
        raise MalformedError


def _read_raw_escape(source: Incoming) -> Steps[str]:
    """Read a backslash and the next character, which does not end the text."""
    source.start_holding("\\")
    yield from source.require_text()
    text = "\\" + source.read_characters(1)
    source.take_held()
    return text


def _read_escape(source: Incoming) -> Steps[str]:
    source.start_holding("\\")
    yield from source.require_text()
    char = source.read_characters(1)
    if char in _CODES:
        digits = yield from source.read_while(_DIGITS, _CODES[char])
        if len(digits) < _CODES[char] or int(digits, 16) > sys.maxunicode:
            raise MalformedError
        text = chr(int(digits, 16))
    elif char in "01234567":
        text = chr(int(char + (yield from source.read_while(_OCTAL, 2)), 8))
    else:
        # Python keeps the backslash of an unknown escape.
        text = _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
    source.take_held()
    return text
