"""Kimi K2: JSON in tags of special tokens, with ids that the model counts.

::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
    <|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>

There are no line breaks between the tags.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import pass_call
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps
    from pd.proxy.text.tools.reader import CallOptions

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
TAGS = (SECTION, END_SECTION, CALL, END_CALL, ARGUMENTS)
NAMESPACE = "functions."
_CLOSERS = (END_CALL, END_SECTION)
_IN_ID = re.compile(r"[A-Za-z0-9_.:/ -]*")
_MAX_ID = 160
_ID = re.compile(r"(?:functions\.)?(.+?)(?::([0-9]+))?")


class KimiParser(CallParser):
    """Reads calls. The tags around all calls may be missing.

    A call keeps the model's id, because templates show it to the model next to the result. A call
    whose id is missing or came before gets the next number.
    """

    def __init__(self, options: CallOptions) -> None:
        super().__init__(options)
        # Name and number of the next call; no number if the model wrote none.
        self._next: tuple[str, str | None] = "", None
        self._ids: set[str] = set()

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((SECTION, CALL), self.emit_text)):
            source.start_holding(tag)
            if tag == SECTION:
                yield from source.skip_space()
                yield from source.expect_tag(CALL)
            yield from source.skip_space()
            written = yield from source.read_while(_IN_ID, _MAX_ID)
            yield from source.expect_tag(ARGUMENTS)
            match = _ID.fullmatch(written.strip())
            if match is None:
                raise MalformedError
            self._next = match[1], match[2]
            yield from self._read_call(match[1])
            for closing in (END_CALL, END_SECTION):
                yield from source.skip_space()
                yield from source.skip_tag(closing)

    def _read_call(self, name: str) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        if (yield from source.is_followed_by(_CLOSERS)) and not source.is_over:
            self.begin_call(name)
            self.emit_arguments("{}")
            self.end_call()
        else:
            yield from pass_call(self, name, _CLOSERS)

    def make_id(self) -> str:
        name, number = self._next
        numbers = itertools.chain([number] if number else [], itertools.count(len(self._ids)))
        ids = (f"{NAMESPACE}{name}:{each}" for each in numbers)
        call_id = next(each for each in ids if each not in self._ids)
        self._ids.add(call_id)
        return call_id
