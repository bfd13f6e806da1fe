"""Llama 3: JSON instead of a text.

::

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.proxy.tools.incoming import MalformedError
from pd.proxy.tools.json_text import read_call
from pd.proxy.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.tools.incoming import Steps

PYTHON_TAG = "<|python_tag|>"
ARGUMENT_KEYS = ("parameters", "arguments")


class LlamaJsonParser(CallParser):
    """Reads calls at the beginning of the text and behind the special token. An object of JSON
    that calls none of the request's functions is content."""

    _started = False

    def read(self) -> Steps[None]:
        if not self._started:
            self._started = True
            self.source.hold()
            yield from self.source.skip_space()
            if (yield from self.source.peek()) == "{":
                yield from self._read_calls()
            else:
                self.text(self.source.release())
        while tag := (yield from self.source.pass_until((PYTHON_TAG,), self.text)):
            self.source.hold(tag)
            yield from self.source.skip_space()
            yield from self._read_calls()

    def _read_calls(self) -> Steps[None]:
        source = self.source
        if (yield from source.peek()) != "{":
            raise MalformedError
        while (yield from source.peek()) == "{":
            yield from read_call(self, ARGUMENT_KEYS, known=True)
            source.hold()
            yield from source.skip_space()
            yield from source.one_of((";",))
            yield from source.skip_space()
        source.release()
