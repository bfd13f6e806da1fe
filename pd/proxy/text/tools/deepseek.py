"""DeepSeek V3, R1 and V3.1: JSON in tags of special tokens, written here as ``<calls_begin>``.

::

    <calls_begin><call_begin>function<sep>get_weather
    ```json
    {"city": "Paris"}
    ```<call_end><calls_end>                                              V3 and R1
    <calls_begin><call_begin>get_weather<sep>{"city": "Paris"}<call_end><calls_end>    V3.1
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pd.proxy.text.tools.json_text import pass_call
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
TAGS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
FENCE, _LANGUAGE = "```", "json"
_CLOSERS = (CALL_END, CALLS_END)
_WORD = re.compile(r"[A-Za-z0-9_.:/-]*")
_MAX_WORD = 128


class DeepSeekParser(CallParser):
    """Reads both forms. The tags around all calls, and closing tags, may be missing."""

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((CALLS_BEGIN, CALL_BEGIN), self.emit_text)):
            source.start_holding(tag)
            if tag == CALLS_BEGIN:
                yield from source.skip_space()
                yield from source.expect_tag(CALL_BEGIN)
            yield from self._read_call()
            for closing in (FENCE, CALL_END, CALLS_END):
                yield from source.skip_space()
                yield from source.skip_tag(closing)

    def _read_call(self) -> Steps[None]:
        source = self.source
        name = yield from source.read_while(_WORD, _MAX_WORD)
        yield from source.expect_tag(SEPARATOR)
        yield from source.skip_space()
        if (yield from source.peek_character()) not in ("{", '"', "<"):
            # The first word was the kind of call.
            name = yield from source.read_while(_WORD, _MAX_WORD)
            yield from source.skip_space()
            if (yield from source.read_one_of((FENCE,))):
                yield from source.read_one_of((_LANGUAGE,))
            yield from source.skip_space()
        if (yield from source.is_followed_by((FENCE, *_CLOSERS))) and not source.is_over:
            self.begin_call(name)
            self.emit_arguments("{}")
            self.end_call()
        else:
            yield from pass_call(self, name, _CLOSERS)
