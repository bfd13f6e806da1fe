"""FunctionGemma and Gemma 4: objects without quotes, whose texts have a delimiter of one token.

::

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

There is nothing between calls. Models often deviate from this: they leave out the delimiter before
a text (``{city:Paris, France<|"|>}``), quote texts and names as in JSON or Python, or write ``=``
instead of the colon. We read all of this.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, ClassVar

from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import BrokenValueError
from pd.proxy.text.tools.quoted_texts import escape_text, pass_quoted
from pd.proxy.text.tools.reader import CallParser
from pd.proxy.text.tools.tagged_values import convert_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.proxy.text.tools.functions import ParameterKind
    from pd.proxy.text.tools.incoming import Steps

WORD = "call:"
_IN_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_IN_KEY = re.compile(r"[^:=,{}\[\]<\n]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_NAME, _MAX_KEY = 128, 256
_MAX_DEPTH = 64
_AFTER_KEY = (":", "=")


class GemmaParser(CallParser):
    """Base of the parsers of both models. The closing tag of a call may be missing.

    Attributes:
        opening: tag before a call.
        closing: tag after it. Outside a text it ends the call even inside brackets.
        delimiter: tag before and after a text.
    """

    opening: ClassVar[str]
    closing: ClassVar[str]
    delimiter: ClassVar[str]

    def read_text(self) -> Steps[None]:
        source = self.source
        while tag := (yield from source.pass_until((self.opening,), self.emit_text)):
            source.start_holding(tag)
            yield from source.skip_space()
            yield from source.expect_tag(WORD)
            yield from source.skip_space()
            name = yield from source.read_while(_IN_NAME, _MAX_NAME)
            yield from source.skip_space()
            begin = yield from source.read_one_of(("{", self.closing))
            if not begin:
                raise MalformedError
            self.begin_call(name)
            if begin == self.closing:
                self.emit_arguments("{}")
                self.end_call()
                continue
            try:
                yield from self._read_object(0, self.options.kinds.get(name, {}))
            except BrokenValueError:
                self.leave_call()
                continue
            self.end_call()
            yield from source.skip_space()
            yield from source.skip_tag(self.closing)

    def _read_object(self, depth: int, kinds: Mapping[str, ParameterKind]) -> Steps[None]:
        """Read the members of an object and its closing bracket.

        Args:
            kinds: how its members are written, as far as that is known.
        """
        self.emit_arguments("{")
        before = ""
        key = yield from self._read_key()
        while key is not None:
            self.emit_arguments(f"{before}{json.dumps(key)}: ")
            before = ", "
            if (yield from self._read_marked_value(depth)):
                has_more = yield from self._read_separator("}")
                key = (yield from self._read_key()) if has_more else None
            else:
                key = yield from self._read_bare_member(kinds.get(key) == "text")
        self.emit_arguments("}")

    def _read_list(self, depth: int) -> Steps[None]:
        """Read the items of a list and its closing bracket."""
        self.emit_arguments("[")
        before = ""
        while True:
            self.source.start_holding()
            yield from self.source.skip_space()
            if (yield from self.source.read_one_of(("]",))):
                break
            self.source.take_held()
            self.emit_arguments(before)
            before = ", "
            if (yield from self._read_marked_value(depth)):
                if not (yield from self._read_separator("]")):
                    break
            elif not (yield from self._read_bare_item()):
                break
        self.source.take_held()
        self.emit_arguments("]")

    def _read_key(self) -> Steps[str | None]:
        """Read a member's name and the colon; return None for the closing bracket."""
        source, parts = self.source, list[str]()
        source.start_holding()
        yield from source.skip_space()
        end = yield from source.read_one_of(("}", self.closing, self.delimiter))
        if end == "}":
            source.take_held()
            return None
        if end == self.closing:
            raise BrokenValueError
        if end:
            yield from source.pass_until((self.delimiter,), parts.append)
        elif (yield from source.peek_character()) in ('"', "'"):
            quote = source.read_characters(1)
            yield from source.pass_until((quote,), parts.append)
        else:
            parts.append((yield from source.read_while(_IN_KEY, _MAX_KEY)))
        yield from source.skip_space()
        key = "".join(parts).strip()
        if not key or not (yield from source.read_one_of(_AFTER_KEY)):
            raise MalformedError
        source.take_held()
        return key

    def _read_marked_value(self, depth: int) -> Steps[bool]:
        """Read a value whose beginning tells its type. Read nothing of any other, and return
        False.
        """
        source = self.source
        yield from source.skip_space()
        yield from source.require_text()
        if (yield from source.read_one_of((self.delimiter,))):
            self.emit_arguments('"')
            if not (yield from source.pass_until((self.delimiter,), self._emit_text_part)):
                raise MalformedError
            self.emit_arguments('"')
            return True
        first = yield from source.peek_character()
        if first in ('"', "'"):
            self.emit_arguments('"')
            yield from pass_quoted(source, self.emit_arguments, may_triple=False)
            self.emit_arguments('"')
        elif first in ("{", "["):
            if depth == _MAX_DEPTH:
                raise MalformedError
            source.read_characters(1)
            read = self._read_list(depth + 1) if first == "[" else self._read_object(depth + 1, {})
            yield from read
        return first in ('"', "'", "{", "[")

    def _read_separator(self, closing: str) -> Steps[bool]:
        """Read a comma and return True, or read the closing bracket."""
        source = self.source
        source.start_holding()
        yield from source.skip_space()
        end = yield from source.read_one_of((",", closing, self.closing))
        if end == self.closing:
            raise BrokenValueError
        if not end:
            raise MalformedError
        source.take_held()
        return end == ","

    def _read_bare_item(self) -> Steps[bool]:
        """Read an item without quotes. Return whether a comma comes after it."""
        parts = list[str]()
        self.source.start_holding()
        ends = (self.delimiter, self.closing, ",", "]")
        end = yield from self.source.pass_until(ends, parts.append)
        self._end_bare_value("".join(parts), end, is_text=False)
        if end == self.delimiter:
            return (yield from self._read_separator("]"))
        return end == ","

    def _read_bare_member(self, is_text: bool) -> Steps[str | None]:
        """Read a value without quotes. Return the next member's name; None if none comes.

        A comma is a part of a text unless a name and a colon come after it.

        Args:
            is_text: it is a text, even if it looks like something else.
        """
        source, parts = self.source, list[str]()
        source.start_holding()
        ends = (self.delimiter, self.closing, ",", "}")
        end = yield from source.pass_until(ends, parts.append)
        while end == ",":
            value, segment = "".join(parts), list[str]()
            end = yield from source.pass_until((*_AFTER_KEY, *ends), segment.append)
            if end == self.delimiter and not "".join(segment).strip():
                segment.append(end)
                segment.append((yield from source.pass_until((end,), segment.append)))
                yield from source.skip_space()
                end = yield from source.read_one_of(_AFTER_KEY)
            key = self._find_key("".join(segment), after_text=is_text or _is_text(value))
            if end in _AFTER_KEY and key:
                self._end_bare_value(value, ",", is_text=is_text)
                return key
            if end == "}" and not key and not _is_text(value):
                break  # a comma after the last member
            parts += (",", *segment)
            if end in _AFTER_KEY:
                parts.append(end)
                end = yield from source.pass_until(ends, parts.append)
        self._end_bare_value("".join(parts), end, is_text=is_text)
        if end == self.delimiter and (yield from self._read_separator("}")):
            return (yield from self._read_key())
        return None

    def _find_key(self, segment: str, *, after_text: bool) -> str:
        """Find the name in the text between a comma and a colon; empty if there is none.

        Args:
            after_text: a text without quotes comes before the comma, so both may belong to it.
        """
        key = segment.strip()
        for quote in (self.delimiter, '"', "'"):
            if len(key) > 2 * len(quote) and key.startswith(quote) and key.endswith(quote):
                return key[len(quote) : -len(quote)]
        pattern = _IDENTIFIER if after_text else _IN_KEY
        return key if pattern.fullmatch(key) else ""

    def _end_bare_value(self, value: str, end: str, *, is_text: bool) -> None:
        """Emit a value that ends at a tag. Raises MalformedError if there is none."""
        if not end:
            raise MalformedError
        self.source.take_held()
        is_text = is_text or end == self.delimiter
        text = json.dumps(value.strip(), ensure_ascii=False)
        self.emit_arguments(text if is_text else convert_value(value))
        if end == self.closing:
            raise BrokenValueError

    def _emit_text_part(self, text: str) -> None:
        self.emit_arguments(escape_text(text))


def _is_text(value: str) -> bool:
    """Tell whether a value without quotes is a text, and no number or constant."""
    return convert_value(value).startswith('"')


class FunctionGemmaParser(GemmaParser):
    opening, closing, delimiter = "<start_function_call>", "<end_function_call>", "<escape>"


class Gemma4Parser(GemmaParser):
    opening, closing, delimiter = "<|tool_call>", "<tool_call|>", '<|"|>'
