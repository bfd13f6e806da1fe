"""Qwen3-Coder and Qwen 3.5: tags, with texts as they are.

::

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import Nesting, load_json
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# The line break before a closing tag belongs to the tag.
_ENDS = ("\n" + END_PARAMETER, END_PARAMETER)
_AFTER_PARAMETER = (PARAMETER, END_FUNCTION, CLOSE)
_IN_NAME = re.compile(r"[^<>]*")
MAX_NAME = 256
# Python's spelling of JSON's words.
_WORDS = {"True": "true", "False": "false", "None": "null"}


class QwenXmlParser(CallParser):
    """Reads calls in tags, even without ``<tool_call>``.

    A parameter whose schema allows only strings is passed on as it is written. We hold any other
    parameter until it is complete, and treat it as a string if it is not JSON.

    Values are not escaped, so a closing tag counts only if the text continues like a call.
    """

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((OPEN, FUNCTION), self.emit_text)):
            source.start_holding(tag)
            if tag == OPEN:
                yield from source.skip_space()
                yield from source.expect_tag(FUNCTION)
            name = yield from self._read_name()
            yield from self._read_parameters(name)
            yield from source.skip_space()
            yield from source.skip_tag(CLOSE)

    def _read_name(self) -> Steps[str]:
        name = yield from self.source.read_while(_IN_NAME, MAX_NAME)
        yield from self.source.expect_tag(">")
        return name.strip()

    def _read_parameters(self, function: str) -> Steps[None]:
        source, before = self.source, "{"
        kinds = self.options.kinds.get(function, {})
        while True:
            yield from source.skip_space()
            tag = yield from source.read_one_of(_AFTER_PARAMETER)
            if tag != PARAMETER:
                break
            name = yield from self._read_name()
            if before == "{":
                self.begin_call(function)
            source.take_held()
            self.emit_arguments(f"{before}{json.dumps(name)}: ")
            before = ", "
            if kinds.get(name) == "text":
                yield from self._read_text_value()
            else:
                yield from self._read_json_value()
            source.start_holding()
        rest = source.text[source.at :] if source.ended and not tag else None
        if rest is not None and any(each.startswith(rest) for each in _AFTER_PARAMETER):
            source.read_characters(len(rest))
            if before != "{":
                source.take_held()
            raise MalformedError  # cut off; the model may have meant to write more parameters
        if before == "{":
            self.begin_call(function)
        self.emit_arguments("{}" if before == "{" else "}")
        self.end_call()

    def _read_text_value(self) -> Steps[None]:
        source = self.source
        self.emit_arguments('"')
        yield from source.read_one_of(("\n",))
        while True:
            end = yield from source.pass_until(_ENDS, self._emit_string_part)
            if not end:
                raise MalformedError
            if (yield from source.is_followed_by(_AFTER_PARAMETER)):
                break
            self._emit_string_part(end)
        self.emit_arguments('"')

    def _emit_string_part(self, text: str) -> None:
        self.emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _read_json_value(self) -> Steps[None]:
        parts: list[str] = []
        yield from self.source.skip_space()
        quoted = (yield from self.source.peek_character()) in ("{", "[", '"')
        nesting = Nesting()

        def follow(text: str) -> None:
            at = 0
            while at < len(text):
                at = nesting.follow_text(text, at, len(text))
            parts.append(text)

        while True:
            end = yield from self.source.pass_until(_ENDS, follow)
            if not end:
                self.emit_text("".join(parts))
                raise MalformedError
            # A JSON string has no line breaks, so if one seems to, the value is a text with quotes.
            is_in_string = quoted and nesting.in_string and end == END_PARAMETER
            if not is_in_string and (yield from self.source.is_followed_by(_AFTER_PARAMETER)):
                break
            follow(end)
        self.emit_arguments(_convert_value("".join(parts)))


def _convert_value(written: str) -> str:
    value = written.strip()
    value = _WORDS.get(value, value)
    try:
        load_json(value)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    return value
