"""Hermes, Qwen 2.5 and Qwen 3: JSON in tags.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.proxy.text.tools.json_text import read_call
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ARGUMENT_KEYS = ("arguments", "parameters")


class HermesParser(CallParser):
    """Reads calls in ``<tool_call>`` tags.

    Several calls may share a tag, and the closing tag may be missing.
    """

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((OPEN,), self.emit_text)):
            source.start_holding(tag)
            yield from source.skip_space()
            yield from read_call(self, ARGUMENT_KEYS)
            yield from source.skip_space()
            while (yield from source.peek_character()) == "{":
                source.start_holding()
                yield from read_call(self, ARGUMENT_KEYS)
                yield from source.skip_space()
            yield from source.skip_tag(CLOSE)
