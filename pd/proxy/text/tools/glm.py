"""GLM 4.5 to 4.7: names of parameters and their values in tags, with texts as they are.

::

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>                                                                    4.5 and 4.6
    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>   4.7
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pd.proxy.text.tools.tagged_values import TaggedValueParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
TAGS = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
_IN_NAME = re.compile(r"[^<>\n]*")
_MAX_NAME = 256


class GlmParser(TaggedValueParser):
    """Reads both forms."""

    parameter = KEY
    closers = (CLOSE,)
    value_ends = (END_VALUE,)

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((OPEN,), self.emit_text)):
            source.start_holding(tag)
            yield from source.skip_space()
            name = yield from source.read_while(_IN_NAME, _MAX_NAME)
            yield from self.read_parameters(name.strip(), must_close=True)

    def read_key(self) -> Steps[str]:
        source = self.source
        name = yield from source.read_while(_IN_NAME, _MAX_NAME)
        yield from source.expect_tag(END_KEY)
        yield from source.skip_space()
        yield from source.expect_tag(VALUE)
        return name.strip()
