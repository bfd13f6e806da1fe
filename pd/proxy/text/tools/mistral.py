"""Mistral: calls after a special token.

::

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]   until 2024
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}                          since then
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import pass_arguments, read_call, read_calls
from pd.proxy.text.tools.reader import CallParser, make_short_id

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_MAX_NAME = 128


class MistralParser(CallParser):
    """Reads both forms."""

    def make_id(self) -> str:
        return make_short_id()

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((OPEN,), self.emit_text)):
            source.start_holding(tag)
            yield from source.skip_space()
            first = yield from source.peek_character()
            if first == "[":
                yield from read_calls(self, ("arguments",))
            elif first == "{":
                yield from read_call(self, ("arguments",))
            else:
                yield from self._read_named()

    def _read_named(self) -> Steps[None]:
        source = self.source
        name = yield from source.read_while(_NAME, _MAX_NAME)
        if (yield from source.read_one_of((CALL_ID,))):
            yield from source.read_while(_NAME, _MAX_NAME)
        tag = yield from source.read_one_of((ARGS,))
        yield from source.skip_space()
        first = yield from source.peek_character()
        if first != "{" and not (tag and first in ('"', "n", "N")):
            raise MalformedError
        yield from pass_arguments(self, name)
        self.end_call()
