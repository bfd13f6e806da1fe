"""Llama 3.2 and 4: calls in Python syntax instead of a text.

::

    [get_weather(city="Paris", days=[1, 2]), get_time(zone=None)]

We accept only keywords, and only values whose meaning is certain. Any other Python, such as
``get_weather("Paris")``, ``f"{city}"`` or ``2 * 3``, turns the call into text, if we still hold it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import TYPE_CHECKING

from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import load_json
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.events import Event
    from pd.proxy.text.tools.incoming import Steps
    from pd.proxy.text.tools.reader import CallOptions

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
# Prefixes of strings that are neither bytes nor formatted.
_PREFIXES = ("r", "R", "u", "U")
_CODES = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class PythonicParser(CallParser):
    """Reads a list of calls at the beginning of the text, and converts values to JSON as they come.

    A list whose first item calls none of the request's functions is content. We hold a call until
    it ends or is longer than ``MAX_UNDECIDED``.
    """

    _started = False

    def __init__(self, options: CallOptions) -> None:
        super().__init__(options)
        # Events of the held call.
        self._undecided: list[Event] = []

    def emit_event(self, event: Event) -> None:
        self._undecided.append(event)
        if not self.source.is_undecided:
            self._commit_call()

    def _commit_call(self) -> None:
        """Emit the held call."""
        self.source.close_call()
        self.events += self._undecided
        self._undecided = []

    def read_text(self) -> Steps[None]:
        source = self.source
        if not self._started:
            self._started = True
            source.start_holding()
            yield from source.skip_space()
            yield from source.read_one_of((START,))
            yield from source.skip_space()
            yield from source.expect_tag("[")
            yield from self._read_list()
            yield from source.skip_space()
            yield from source.skip_tag(END)
        yield from source.pass_rest(self.emit_text)

    def _read_list(self) -> Steps[None]:
        source = self.source
        while True:
            yield from source.skip_space()
            if (yield from source.read_one_of(("]",))):
                source.take_held()
                return
            name = yield from source.read_while(_IDENTIFIER, _MAX_WORD)
            yield from source.skip_space()
            yield from source.expect_tag("(")
            if name not in self.options.kinds:
                raise MalformedError
            source.open_call(source.take_held())
            self.begin_call(name)
            try:
                yield from self._read_arguments()
            except MalformedError:
                if source.is_undecided and not source.is_over:
                    self._take_back_call()
                else:
                    self._commit_call()
                raise
            self._commit_call()
            self.end_call()
            source.start_holding()
            yield from source.skip_space()
            yield from source.read_one_of((",",))

    def _take_back_call(self) -> None:
        """Emit the held call as text instead."""
        self._undecided = []
        self._calls -= 1
        self.call_is_open = False
        self.source.take_held()
        self.emit_text(self.source.close_call())

    def _read_arguments(self) -> Steps[None]:
        source, before = self.source, ""
        self.emit_arguments("{")
        while True:
            source.start_holding()
            yield from source.skip_space()
            if (yield from source.read_one_of((")",))):
                source.take_held()
                self.emit_arguments("}")
                return
            name = yield from source.read_while(_IDENTIFIER, _MAX_WORD)
            yield from source.skip_space()
            yield from source.expect_tag("=")
            if not name:
                raise MalformedError
            source.take_held()
            self.emit_arguments(f"{before}{json.dumps(name)}: ")
            yield from self._read_value(0)
            yield from self._read_separator(")")
            before = ", "

    def _read_value(self, depth: int) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        first = yield from source.peek_character()
        if depth > _MAX_DEPTH:
            raise MalformedError
        if first in ('"', "'"):
            yield from self._read_string()
        elif first in ("[", "("):
            source.read_characters(1)
            self.emit_arguments("[")
            yield from self._read_items(_CLOSING[first], depth)
            self.emit_arguments("]")
        elif first == "{":
            source.read_characters(1)
            self.emit_arguments("{")
            yield from self._read_items("}", depth)
            self.emit_arguments("}")
        else:
            source.start_holding()
            word = yield from source.read_while(_WORD, _MAX_WORD)
            if (yield from source.peek_character()) in ('"', "'"):
                if word not in _PREFIXES:
                    raise MalformedError
                source.take_held()
                yield from self._read_string(raw=word in "rR")
                return
            word = _convert_scalar(word)
            source.take_held()
            self.emit_arguments(word)

    def _read_items(self, closing: str, depth: int) -> Steps[None]:
        source, before = self.source, ""
        while True:
            yield from source.skip_space()
            if (yield from source.read_one_of((closing,))):
                return
            self.emit_arguments(before)
            if closing == "}":
                if (yield from source.peek_character()) not in ('"', "'"):
                    raise MalformedError
                yield from self._read_string()
                yield from source.skip_space()
                yield from source.expect_tag(":")
                self.emit_arguments(": ")
            yield from self._read_value(depth + 1)
            yield from self._read_separator(closing)
            before = ", "

    def _read_separator(self, closing: str) -> Steps[None]:
        """Read a comma, unless the closing bracket comes next."""
        yield from self.source.skip_space()
        if (yield from self.source.peek_character()) != closing:
            yield from self.source.expect_tag(",")

    def _read_string(self, *, raw: bool = False) -> Steps[None]:
        source = self.source
        quote = source.read_characters(1)
        self.emit_arguments('"')
        if (yield from source.peek_character()) == quote:
            source.read_characters(1)
            if (yield from source.peek_character()) != quote:
                self.emit_arguments('"')
                return
            source.read_characters(1)
            quote *= 3
        while True:
            end = yield from source.pass_until((quote, "\\"), self._emit_string_part)
            if end != "\\":
                break
            self._emit_string_part(
                (yield from self._read_raw_escape() if raw else self._read_escape())
            )
        if not end:
            raise MalformedError
        self.emit_arguments('"')

    def _read_raw_escape(self) -> Steps[str]:
        """Read a backslash and the next character, which does not end the string."""
        source = self.source
        source.start_holding("\\")
        yield from source.require_text()
        text = "\\" + source.read_characters(1)
        source.take_held()
        return text

    def _read_escape(self) -> Steps[str]:
        source = self.source
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

    def _emit_string_part(self, text: str) -> None:
        # Half a surrogate pair has no bytes, but JSON can name it.
        lone = len(text) == 1 and "\ud800" <= text <= "\udfff"
        self.emit_arguments(json.dumps(text, ensure_ascii=lone)[1:-1])


def _convert_scalar(word: str) -> str:
    """Convert a word or number of Python or JSON to JSON. Raises MalformedError for others."""
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
