"""Llama 3.2 and 4: calls as Python writes them, instead of a text.

::

    [get_weather(city="Paris", days=[1, 2]), get_time(zone=None)]

Only keywords and values whose meaning is certain are arguments. What else Python would read, as
in ``get_weather("Paris")``, ``f"{city}"`` or ``2 * 3``, makes a call a text, if it is still held.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import TYPE_CHECKING

from pd.proxy.tools.incoming import MalformedError
from pd.proxy.tools.json_text import load_json
from pd.proxy.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.tools.events import Event
    from pd.proxy.tools.incoming import Steps
    from pd.proxy.tools.reader import CallOptions

START, END = "<|python_start|>", "<|python_end|>"
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.-]*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_DIGITS = re.compile(r"[0-9A-Fa-f]*")
_OCTAL = re.compile(r"[0-7]*")
_MAX_WORD = 128
_MAX_DEPTH = 64
_WORDS = {"True": "true", "False": "false", "None": "null"}
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
# Prefixes of strings that are no bytes and have no values of variables in them.
_PREFIXES = ("r", "R", "u", "U")
_CODES = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class PythonicParser(CallParser):
    """Reads a list of calls at the beginning of the text, and turns values into JSON as they come.
    A list whose first item calls none of the request's functions is content.

    A call is held until it ends, or is longer than ``MAX_UNDECIDED``."""

    _started = False

    def __init__(self, options: CallOptions) -> None:
        super().__init__(options)
        # Events of the call that is held.
        self._undecided: list[Event] = []

    def emit(self, event: Event) -> None:
        self._undecided.append(event)
        if not self.source.is_undecided:
            self._decide()

    def _decide(self) -> None:
        """What is held is a call."""
        self.source.close_call()
        self.events += self._undecided
        self._undecided = []

    def read(self) -> Steps[None]:
        source = self.source
        if not self._started:
            self._started = True
            source.hold()
            yield from source.skip_space()
            yield from source.one_of((START,))
            yield from source.skip_space()
            yield from source.expect("[")
            yield from self._read_list()
            yield from source.skip_space()
            yield from source.skip_tag(END)
        yield from source.pass_rest(self.text)

    def _read_list(self) -> Steps[None]:
        source = self.source
        while True:
            yield from source.skip_space()
            if (yield from source.one_of(("]",))):
                source.release()
                return
            name = yield from source.while_in(_IDENTIFIER, _MAX_WORD)
            yield from source.skip_space()
            yield from source.expect("(")
            if name not in self.options.kinds:
                raise MalformedError
            source.open_call(source.release())
            self.begin_call(name)
            try:
                yield from self._arguments()
            except MalformedError:
                if source.is_undecided and not source.is_over:
                    self._take_back()
                else:
                    self._decide()
                raise
            self._decide()
            self.end_call()
            source.hold()
            yield from source.skip_space()
            yield from source.one_of((",",))

    def _take_back(self) -> None:
        """What is held is a text."""
        self._undecided = []
        self._calls -= 1
        self.source.release()
        self.text(self.source.close_call())

    def _arguments(self) -> Steps[None]:
        self.arguments("{")
        yield from self._keywords()
        self.arguments("}")

    def _keywords(self) -> Steps[None]:
        source, before = self.source, ""
        while True:
            source.hold()
            yield from source.skip_space()
            if (yield from source.one_of((")",))):
                source.release()
                return
            name = yield from source.while_in(_IDENTIFIER, _MAX_WORD)
            yield from source.skip_space()
            yield from source.expect("=")
            if not name:
                raise MalformedError
            source.release()
            self.arguments(f"{before}{json.dumps(name)}: ")
            yield from self._value(0)
            yield from self._separator(")")
            before = ", "

    def _value(self, depth: int) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        first = yield from source.peek()
        if depth > _MAX_DEPTH:
            raise MalformedError
        if first in ('"', "'"):
            yield from self._string()
        elif first in ("[", "("):
            source.take(1)
            self.arguments("[")
            yield from self._items(_CLOSING[first], depth)
            self.arguments("]")
        elif first == "{":
            source.take(1)
            self.arguments("{")
            yield from self._items("}", depth)
            self.arguments("}")
        else:
            source.hold()
            word = yield from source.while_in(_WORD, _MAX_WORD)
            if (yield from source.peek()) in ('"', "'"):
                if word not in _PREFIXES:
                    raise MalformedError
                source.release()
                yield from self._string(raw=word in "rR")
                return
            word = _scalar(word)
            source.release()
            self.arguments(word)

    def _items(self, closing: str, depth: int) -> Steps[None]:
        source, before = self.source, ""
        while True:
            yield from source.skip_space()
            if (yield from source.one_of((closing,))):
                return
            self.arguments(before)
            if closing == "}":
                if (yield from source.peek()) not in ('"', "'"):
                    raise MalformedError
                yield from self._string()
                yield from source.skip_space()
                yield from source.expect(":")
                self.arguments(": ")
            yield from self._value(depth + 1)
            yield from self._separator(closing)
            before = ", "

    def _separator(self, closing: str) -> Steps[None]:
        """Read a comma; nothing if the closing bracket comes next."""
        yield from self.source.skip_space()
        if (yield from self.source.peek()) != closing:
            yield from self.source.expect(",")

    def _string(self, *, raw: bool = False) -> Steps[None]:
        source = self.source
        quote = source.take(1)
        self.arguments('"')
        if (yield from source.peek()) == quote:
            source.take(1)
            if (yield from source.peek()) != quote:
                self.arguments('"')
                return
            source.take(1)
            quote *= 3
        while True:
            end = yield from source.pass_until((quote, "\\"), self._string_part)
            if end != "\\":
                break
            self._string_part((yield from self._raw_escape() if raw else self._escape()))
        if not end:
            raise MalformedError
        self.arguments('"')

    def _raw_escape(self) -> Steps[str]:
        """A backslash and what follows, which does not end the string."""
        source = self.source
        source.hold("\\")
        yield from source.need()
        text = "\\" + source.take(1)
        source.release()
        return text

    def _escape(self) -> Steps[str]:
        source = self.source
        source.hold("\\")
        yield from source.need()
        char = source.take(1)
        if char in _CODES:
            digits = yield from source.while_in(_DIGITS, _CODES[char])
            if len(digits) < _CODES[char] or int(digits, 16) > sys.maxunicode:
                raise MalformedError
            text = chr(int(digits, 16))
        elif char in "01234567":
            text = chr(int(char + (yield from source.while_in(_OCTAL, 2)), 8))
        else:
            # Python leaves the backslash of an escape that it does not know.
            text = _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
        source.release()
        return text

    def _string_part(self, text: str) -> None:
        # Half a surrogate pair has no bytes, but JSON can name it.
        lone = len(text) == 1 and "\ud800" <= text <= "\udfff"
        self.arguments(json.dumps(text, ensure_ascii=lone)[1:-1])


def _scalar(word: str) -> str:
    """A word or number of Python or JSON as JSON. Raises MalformedError for others."""
    word = _WORDS.get(word, word)
    try:
        load_json(word)
    except ValueError:
        pass
    else:
        return word
    for read in (lambda word: int(word, 0), int, float):
        try:
            number = read(word)
        except ValueError:
            continue
        if math.isfinite(number):
            return json.dumps(number)
    raise MalformedError
