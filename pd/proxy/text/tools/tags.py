"""Structural tags (xgrammar's formats) that keep a model from writing invalid calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.errors import InvalidRequestError
from pd.core.grammar import MAX_GRAMMAR_BYTES, Grammar
from pd.proxy.text.tools.functions import (
    name_parameters_field,
)
from pd.structured.lenient_schemas import drop_unenforced
from pd.structured.schema_check import find_unenforced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.proxy.text.tools.functions import Function

Format = dict[str, Any]

EMPTY: Format = {"type": "const_string", "value": ""}


class UnfitError(Exception):
    """A function's arguments cannot be constrained in this form. The message names the reason."""


def make_text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def any_text(*excludes: str) -> Format:
    return {"type": "any_text", "excludes": list(excludes)}


def make_sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def make_choice(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def make_optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def make_tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_value(schema: object) -> Format:
    # With unlimited white space a model could write nothing else.
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def make_format(grammar: Grammar) -> Format:
    """Make the format of a response."""
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "ebnf":
        return {"type": "grammar", "grammar": grammar.text}
    content = json.loads(grammar.text)
    return content["format"] if grammar.kind == "structural_tag" else json_value(content)


def make_grammar(content: Format, param: str) -> Grammar:
    """Make the grammar of a format.

    We stop writing at the size limit, because shared definitions are repeated, so the grammar may
    be far larger than the request.

    Args:
        param: name of the field, for errors.

    Raises InvalidRequestError.
    """
    parts: list[str] = []
    size = 0
    whole = {"type": "structural_tag", "format": content}
    try:
        for part in json.JSONEncoder(ensure_ascii=False).iterencode(whole):
            size += len(part)
            if size > MAX_GRAMMAR_BYTES:
                break
            parts.append(part)
    except RecursionError:
        raise InvalidRequestError(f"{param}: a schema is nested too deeply", param=param) from None
    grammar = Grammar("structural_tag", "".join(parts))
    if size > MAX_GRAMMAR_BYTES or len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"{param}: the grammar of these schemas has more than {MAX_GRAMMAR_BYTES} bytes; send "
            "fewer or smaller ones",
            param=param,
        )
    return grammar


class CallForm(NamedTuple):
    """The form of a family's calls.

    Attributes:
        begin: text before the arguments; ``%s`` stands for the function's name.
        end: text after the arguments.
        make_arguments: makes the format of the arguments. Raises UnfitError.
        separator: text between calls.
        opening: text before all calls.
        closing: text after all calls.
        trigger: text that begins calls and nothing else; empty if calls begin the answer.
        forbidden: other texts that the parser would read as calls.
        is_single: an answer has at most one call.
        answer: text before an answer that is not a call.
        add_text: makes the format of calls or text from that of calls, for families with messages;
            None for the others.
    """

    begin: str
    end: str
    make_arguments: Callable[[Function], Format]
    separator: str
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    forbidden: tuple[str, ...] = ()
    is_single: bool = False
    answer: str = ""
    add_text: Callable[[Format], Format] | None = None

    def find_function(self, begin: object) -> str | None:
        """Find the function that a tag with this beginning calls, if any."""
        before, after = self.begin.split("%s")
        for start in (before, before.removeprefix(self.trigger)):  # see ``skip`` below
            if isinstance(begin, str) and begin.startswith(start) and begin.endswith(after):
                return begin[len(start) : len(begin) - len(after)]
        return None

    def make_calls(self, functions: Sequence[Function], *, several: bool, skip: int = 0) -> Format:
        """Make the format of calls, without their first ``skip`` characters. Raises UnfitError."""

        def make_call(function: Function, drop: int) -> Format:
            begin = (self.begin % function.name)[drop:]
            return make_tag(begin, self.make_arguments(function), self.end)

        def make_list(drop: int, separator: str) -> Format:
            return {
                "type": "tags_with_separator",
                "tags": [make_call(function, drop) for function in functions],
                "separator": separator,
                "at_least_one": True,
                "stop_after_first": self.is_single or not several,
            }

        if not self.opening:
            if skip:
                return make_choice(*(make_call(function, skip) for function in functions))
            return make_list(0, self.separator)
        return make_sequence(
            make_text(self.opening[skip:]),
            make_list(0, self.separator),
            make_text(self.closing),
        )

    def make_calls_or_text(self, functions: Sequence[Function], *, several: bool) -> Format:
        """Make the format of calls mixed with other text. Raises UnfitError."""
        if self.add_text is not None:
            return self.add_text(self.make_calls(functions, several=several))
        if self.trigger:
            calls = self.make_calls(functions, several=several, skip=len(self.trigger))
            return {
                "type": "dispatch",
                "rules": [[self.trigger, calls]],
                "loop": several,
                "excludes": list(self.forbidden),
            }
        # A call begins otherwise, so this must be text.
        begin = {"type": "regex", "pattern": r"[^{\[\s<`]"}
        free = make_sequence(begin, any_text(*self.forbidden))
        return make_choice(self.make_calls(functions, several=several), free, EMPTY)


def check_enforced(functions: Sequence[Function], numbers: dict[str, int]) -> None:
    """Raise InvalidRequestError for a keyword of a schema that we cannot enforce.

    Args:
        numbers: positions of the functions in the request.
    """
    for function in functions:
        if function.strict is False:
            continue
        try:
            keyword = find_unenforced(function.schema)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise make_refusal(function, numbers, f"is not a JSON schema: {error}") from None
        if keyword is not None:
            raise make_refusal(
                function, numbers, f"{keyword} is not enforced by this server", separator=":"
            )


def drop_ambiguous_keywords(function: Function) -> Function:
    """Drop keywords that we cannot enforce, if the client set ``strict`` to false.

    Raises InvalidRequestError.
    """
    if function.strict is not False:
        return function
    try:
        return function._replace(schema=drop_unenforced(function.schema))
    except RecursionError:
        raise InvalidRequestError("tools: a schema is nested too deeply", param="tools") from None


def make_refusal(
    function: Function, numbers: dict[str, int], reason: str, *, separator: str = ""
) -> InvalidRequestError:
    """Make the error for a function whose arguments cannot be constrained."""
    name = name_parameters_field(numbers[function.name])
    advice = "; set strict to false to ignore it" if separator else ""
    return InvalidRequestError(f"{name}{separator} {reason}{advice}", param=name)
