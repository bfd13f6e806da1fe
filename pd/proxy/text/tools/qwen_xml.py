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

import re
from typing import TYPE_CHECKING

from pd.proxy.text.tools.tagged_values import TaggedValueParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_IN_NAME = re.compile(r"[^<>]*")
_MAX_NAME = 256


class QwenXmlParser(TaggedValueParser):
    """Reads calls in tags, even without ``<tool_call>``."""

    parameter = PARAMETER
    closers = (END_FUNCTION, CLOSE)
    # The line breaks around a value belong to the tags.
    value_begin = "\n"
    value_ends = ("\n" + END_PARAMETER, END_PARAMETER)
    # A JSON string has no line breaks, so if one seems to, the value is a text with quotes.
    ends_in_strings = (END_PARAMETER,)

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((OPEN, FUNCTION), self.emit_text)):
            source.start_holding(tag)
            if tag == OPEN:
                yield from source.skip_space()
                yield from source.expect_tag(FUNCTION)
            name = yield from self.read_key()
            yield from self.read_parameters(name, must_close=False)
            yield from source.skip_space()
            yield from source.skip_tag(CLOSE)

    def read_key(self) -> Steps[str]:
        name = yield from self.source.read_while(_IN_NAME, _MAX_NAME)
        yield from self.source.expect_tag(">")
        return name.strip()
