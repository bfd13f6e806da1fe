"""Mistral: calls behind a special token.

::

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]   until 2024
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}                          since then
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pd.proxy.tools.incoming import MalformedError
from pd.proxy.tools.json_text import pass_value, read_call
from pd.proxy.tools.reader import CallParser, short_id

if TYPE_CHECKING:
    from pd.proxy.tools.incoming import Steps

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_MAX_NAME = 128


class MistralParser(CallParser):
    """Reads both forms."""

    new_id = staticmethod(short_id)

    def read(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((OPEN,), self.text)):
            source.hold(tag)
            yield from source.skip_space()
            first = yield from source.peek()
            if first == "[":
                yield from self._read_list()
            elif first == "{":
                yield from read_call(self, ("arguments",))
            else:
                yield from self._read_named()

    def _read_list(self) -> Steps[None]:
        source = self.source
        yield from source.expect("[")
        while True:
            yield from source.skip_space()
            if (yield from source.one_of((",", "]"))) == "]":
                source.release()
                return
            yield from source.skip_space()
            yield from read_call(self, ("arguments",))
            source.hold()

    def _read_named(self) -> Steps[None]:
        source = self.source
        name = yield from source.while_in(_NAME, _MAX_NAME)
        if (yield from source.one_of((CALL_ID,))):
            yield from source.while_in(_NAME, _MAX_NAME)
        yield from source.one_of((ARGS,))
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise MalformedError
        self.begin_call(name)
        yield from pass_value(source, self.arguments)
        self.end_call()
