"""Phi-4-mini: a list of calls in JSON after a mark.

::

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.proxy.text.tools.json_text import read_calls
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

WORD = "functools"
OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"


class PhiParser(CallParser):
    """Reads both forms."""

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((WORD, OPEN), self.emit_text)):
            source.start_holding(tag)
            yield from source.skip_space()
            yield from read_calls(self, ("arguments", "parameters"))
            yield from source.skip_space()
            yield from source.skip_tag(CLOSE)
