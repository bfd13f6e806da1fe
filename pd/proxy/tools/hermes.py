"""Hermes, Qwen 2.5 and Qwen 3: JSON in tags.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.proxy.tools.json_text import read_call
from pd.proxy.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.tools.incoming import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ARGUMENT_KEYS = ("arguments", "parameters")


class HermesParser(CallParser):
    """Reads calls in ``<tool_call>`` tags. Several calls may share a tag, and the closing tag may
    be missing."""

    def read(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((OPEN,), self.text)):
            source.hold(tag)
            yield from source.skip_space()
            yield from read_call(self, ARGUMENT_KEYS)
            yield from source.skip_space()
            while (yield from source.peek()) == "{":
                source.hold()
                yield from read_call(self, ARGUMENT_KEYS)
                yield from source.skip_space()
            yield from source.skip_tag(CLOSE)
