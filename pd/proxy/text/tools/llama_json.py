"""Llama 3 and Gemma 3: JSON instead of a text, which Gemma often puts into a block of code.

::

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import read_call
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

PYTHON_TAG = "<|python_tag|>"
BLOCKS, END_BLOCK = ("```json", "```tool_code"), "```"
ARGUMENT_KEYS = ("parameters", "arguments")


class LlamaJsonParser(CallParser):
    """Reads calls at the beginning of the text and after the special token.

    A JSON object that calls none of the request's functions is content.
    """

    _started = False

    def read_text(self) -> Steps[None]:
        if not self._started:
            self._started = True
            self.source.start_holding()
            yield from self.source.skip_space()
            block = yield from self.source.read_one_of(BLOCKS)
            yield from self.source.skip_space()
            if (yield from self.source.peek_character()) == "{":
                yield from self._read_calls()
                if block:
                    yield from self.source.skip_tag(END_BLOCK)
            else:
                self.emit_text(self.source.take_held())
        while tag := (yield from self.source.pass_until((PYTHON_TAG,), self.emit_text)):
            self.source.start_holding(tag)
            yield from self.source.skip_space()
            yield from self._read_calls()

    def _read_calls(self) -> Steps[None]:
        source = self.source
        if (yield from source.peek_character()) != "{":
            raise MalformedError
        while (yield from source.peek_character()) == "{":
            yield from read_call(self, ARGUMENT_KEYS, known=True)
            source.start_holding()
            yield from source.skip_space()
            yield from source.read_one_of((";",))
            yield from source.skip_space()
        source.take_held()
