"""Reads calls whose parameters are texts in tags, without escapes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import Nesting, load_json
from pd.proxy.text.tools.reader import CallParser

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps

# Python's spelling of JSON's words.
_WORDS = {"True": "true", "False": "false", "None": "null"}


class TaggedValueParser(CallParser):
    """Base of parsers that read a list of parameters, and convert their values to JSON.

    A parameter whose schema allows only strings is passed on as it is written. We hold any other
    parameter until it is complete, and treat it as a string if it is not JSON.

    Values are not escaped, so a closing tag counts only if the text continues like a call.

    Attributes:
        parameter: tag that begins a parameter.
        closers: tags that come after the last parameter.
        value_begin: white space that belongs to the tag before a value.
        value_ends: tags that end a value.
        ends_in_strings: those that may be a part of a string in JSON.
    """

    parameter: ClassVar[str]
    closers: ClassVar[tuple[str, ...]]
    value_begin: ClassVar[str] = ""
    value_ends: ClassVar[tuple[str, ...]]
    ends_in_strings: ClassVar[tuple[str, ...]] = ()

    def read_key(self) -> Steps[str]:
        """Read a parameter's name and the tag before its value. Raises MalformedError."""
        raise NotImplementedError

    def read_parameters(self, function: str, *, must_close: bool) -> Steps[None]:
        """Read a call's parameters and the tag after them, and emit the call.

        Args:
            must_close: a call without parameters needs a closing tag.

        Raises MalformedError.
        """
        source, before = self.source, "{"
        kinds = self.options.kinds.get(function, {})
        while True:
            yield from source.skip_space()
            tag = yield from source.read_one_of((self.parameter, *self.closers))
            if tag != self.parameter:
                break
            name = yield from self.read_key()
            if before == "{":
                self.begin_call(function)
            source.take_held()
            self.emit_arguments(f"{before}{json.dumps(name)}: ")
            before = ", "
            if kinds.get(name) == "text":
                yield from self._read_text_value()
            else:
                yield from self._read_json_value()
            source.start_holding()
        rest = source.text[source.at :] if source.ended and not tag else None
        if rest is not None and any(
            each.startswith(rest) for each in (self.parameter, *self.closers)
        ):
            source.read_characters(len(rest))
            if before != "{":
                source.take_held()
            raise MalformedError  # cut off; the model may have meant to write more parameters
        if before == "{":
            if must_close and not tag:
                raise MalformedError
            self.begin_call(function)
        self.emit_arguments("{}" if before == "{" else "}")
        self.end_call()

    def _read_text_value(self) -> Steps[None]:
        source = self.source
        self.emit_arguments('"')
        if self.value_begin:
            yield from source.read_one_of((self.value_begin,))
        while True:
            end = yield from source.pass_until(self.value_ends, self._emit_string_part)
            if not end:
                raise MalformedError
            if (yield from source.is_followed_by((self.parameter, *self.closers))):
                break
            self._emit_string_part(end)
        self.emit_arguments('"')

    def _emit_string_part(self, text: str) -> None:
        self.emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _read_json_value(self) -> Steps[None]:
        parts: list[str] = []
        yield from self.source.skip_space()
        quoted = (yield from self.source.peek_character()) in ("{", "[", '"')
        nesting = Nesting()

        def follow(text: str) -> None:
            at = 0
            while at < len(text):
                at = nesting.follow_text(text, at, len(text))
            parts.append(text)

        while True:
            end = yield from self.source.pass_until(self.value_ends, follow)
            if not end:
                self.emit_text("".join(parts))
                raise MalformedError
            is_in_string = quoted and nesting.in_string and end in self.ends_in_strings
            after = (self.parameter, *self.closers)
            if not is_in_string and (yield from self.source.is_followed_by(after)):
                break
            follow(end)
        self.emit_arguments(convert_value("".join(parts)))


def convert_value(written: str) -> str:
    """Convert a value to JSON. It is a string if it is not JSON and no word of Python."""
    value = written.strip()
    value = _WORDS.get(value, value)
    try:
        load_json(value)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    return value
