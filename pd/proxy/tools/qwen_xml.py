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

from pd.proxy.tools.incoming import MalformedError
from pd.proxy.tools.json_text import Nesting, load_json
from pd.proxy.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.tools.incoming import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_AFTER_PARAMETER = (PARAMETER, END_FUNCTION, CLOSE)
_IN_NAME = re.compile(r"[^<>]*")
MAX_NAME = 256
# JSON's words as Python writes them.
_WORDS = {"True": "true", "False": "false", "None": "null"}


class QwenXmlParser(CallParser):
    """Reads calls in tags, also where ``<tool_call>`` is missing. Parameters whose schema takes
    strings alone come as they are written; each of the others is held until it is whole, and is
    a string if it is no JSON."""

    def read(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((OPEN, FUNCTION), self.text)):
            source.hold(tag)
            if tag == OPEN:
                yield from source.skip_space()
                yield from source.expect(FUNCTION)
            name = yield from self._name()
            self.begin_call(name)
            yield from self._parameters(name)
            yield from source.skip_space()
            yield from source.skip_tag(CLOSE)

    def _name(self) -> Steps[str]:
        name = yield from self.source.while_in(_IN_NAME, MAX_NAME)
        yield from self.source.expect(">")
        return name.strip()

    def _parameters(self, function: str) -> Steps[None]:
        kinds = self.options.kinds.get(function, {})
        before = "{"
        while True:
            self.source.hold()
            yield from self.source.skip_space()
            tag = yield from self.source.one_of(_AFTER_PARAMETER)
            if tag != PARAMETER:
                break
            name = yield from self._name()
            self.source.release()
            self.arguments(f"{before}{json.dumps(name)}: ")
            before = ", "
            if kinds.get(name) == "text":
                yield from self._text_value()
            else:
                yield from self._json_value()
        held = self.source.release()
        rest = self.source.text[self.source.at :] if self.source.ended and not tag else None
        if rest is not None and any(each.startswith(rest) for each in _AFTER_PARAMETER):
            self.source.take(len(rest))
            raise MalformedError  # cut off, so the model may have meant to write more parameters
        self.arguments("{}" if before == "{" else "}")
        self.end_call()
        if not tag:
            self.text(held)

    def _text_value(self) -> Steps[None]:
        self.arguments('"')
        yield from self.source.one_of(("\n",))
        ends = ("\n" + END_PARAMETER, END_PARAMETER)
        if not (yield from self.source.pass_until(ends, self._string_part)):
            raise MalformedError
        self.arguments('"')

    def _string_part(self, text: str) -> None:
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _json_value(self) -> Steps[None]:
        parts: list[str] = []
        yield from self.source.skip_space()
        quoted = (yield from self.source.peek()) in ("{", "[", '"')
        nesting = Nesting()

        def follow(text: str) -> None:
            at = 0
            while at < len(text):
                at = nesting.follow(text, at, len(text))
            parts.append(text)

        while True:
            end = yield from self.source.pass_until((END_PARAMETER,), follow)
            if not end:
                self.text("".join(parts))
                raise MalformedError
            if not (quoted and nesting.in_string):
                break
            follow(end)
        self.arguments(_as_json("".join(parts)))


def _as_json(written: str) -> str:
    value = written.strip()
    value = _WORDS.get(value, value)
    try:
        load_json(value)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    return value
