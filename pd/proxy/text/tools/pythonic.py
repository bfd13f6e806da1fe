"""Llama 3.2 and 4, and Gemma 3: calls in Python syntax instead of a text.

::

    [get_weather(city="Paris", days=[1, 2]), get_time(zone=None)]

Gemma 3 often puts them into a block of code, in a list or not, even after a text::

    ```tool_code
    get_weather(city="Paris")
    ```

We accept only keywords, and only values whose meaning is certain. Any other Python, such as
``get_weather("Paris")``, ``f"{city}"`` or ``2 * 3``, turns the call into text, if we still hold it.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING

from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import load_json
from pd.proxy.text.tools.quoted_texts import pass_quoted
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.events import Event
    from pd.proxy.text.tools.incoming import Steps
    from pd.proxy.text.tools.reader import CallOptions

START, END = "<|python_start|>", "<|python_end|>"
BLOCK, END_BLOCK = "```tool_code", "```"
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.-]*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_MAX_WORD = 128
_MAX_DEPTH = 64
_WORDS = {"True": "true", "False": "false", "None": "null"}
# Prefixes of strings that are neither bytes nor formatted.
_PREFIXES = ("r", "R", "u", "U")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class PythonicParser(CallParser):
    """Reads a list of calls at the beginning of the text, and blocks with calls anywhere. Converts
    values to JSON as they come.

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
            if (yield from source.read_one_of((START, BLOCK))) == BLOCK:
                yield from self._read_block()
            else:
                yield from source.skip_space()
                yield from source.expect_tag("[")
                yield from self._read_calls("]")
                yield from source.skip_space()
                yield from source.skip_tag(END)
        while tag := (yield from source.pass_until((BLOCK,), self.emit_text)):
            source.start_holding(tag)
            yield from self._read_block()

    def _read_block(self) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        if not (yield from source.read_one_of(("[",))):
            yield from self._read_calls(END_BLOCK)
            return
        yield from self._read_calls("]")
        yield from source.skip_space()
        yield from source.skip_tag(END_BLOCK)

    def _read_calls(self, closing: str) -> Steps[None]:
        source = self.source
        while True:
            yield from source.skip_space()
            if (yield from source.read_one_of((closing,))):
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
        self.emit_arguments('"')
        yield from pass_quoted(self.source, self.emit_arguments, raw=raw)
        self.emit_arguments('"')


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
