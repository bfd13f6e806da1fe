"""Structural tags (formats of xgrammar) that make a model write valid calls."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.brief import brief
from pd.core.errors import InvalidRequestError
from pd.core.grammar import MAX_GRAMMAR_BYTES, Grammar
from pd.proxy.grammar_fields import parameters_field
from pd.proxy.json_schemas import read_over, what_is_not_enforced
from pd.proxy.tools.definitions import kind_of, properties_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.proxy.tools.definitions import Function

Format = dict[str, Any]

EMPTY: Format = {"type": "const_string", "value": ""}
_ANY_OBJECT = {"type": "object"}
# Keywords of a function's schema that a list of parameters cannot follow, since each parameter is
# constrained by itself.
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_COUNTED = ("maxProperties", "propertyNames")
# A text in XML ends at the first closing tag, so no pattern may let a model write one.
_MAY_WRITE_TAGS = re.compile(r"(?<!\\)\.|\[\^|\\[SWDP]|<")
# As ranges, because xgrammar takes bytes that are no UTF-8 for characters outside of a class.
_NO_TAG = "[ -;=-~\u00a0-\ud7ff\ue000-\uffff\U00010000-\U0010ffff]"
# Parameters in Python of which none is required; their format has the square of so many parts.
_MAX_OPTIONAL = 64
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_XML_NAME = re.compile(r"[^\s<>](?:[^<>\n]{0,254}[^\s<>])?")


class UnfitError(Exception):
    """A function's arguments cannot be constrained in this form; the message says what prevents
    it."""


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def any_text(*excludes: str) -> Format:
    return {"type": "any_text", "excludes": list(excludes)}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_value(schema: object) -> Format:
    # White space without end would let a model write nothing else.
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def format_of(grammar: Grammar) -> Format:
    """The format of a response."""
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "ebnf":
        return {"type": "grammar", "grammar": grammar.text}
    content = json.loads(grammar.text)
    return content["format"] if grammar.kind == "structural_tag" else json_value(content)


def grammar_of(content: Format, param: str) -> Grammar:
    """The grammar of a format. Definitions that many parameters share repeat in it, so it may be
    far larger than the request, and is not written down any further than it may be long.

    Args:
        param: the field, for messages.

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


# ---- arguments


def json_arguments(function: Function) -> Format:
    """Arguments as an object of JSON."""
    schema = function.schema
    if "type" not in schema and not any(keyword in schema for keyword in _WHOLE):
        schema = schema | _ANY_OBJECT
    return json_value(schema)


def xml_arguments(function: Function) -> Format:
    """Arguments as Qwen3-Coder writes them. Raises UnfitError."""

    def parameter(name: str, schema: object, required: bool) -> Format:
        begin = f"<parameter={name}>\n"
        written = sequence(_xml_value(begin, schema, function), text("\n"))
        return written if required else optional(written)

    required = _required(function)
    parts = [
        parameter(name, schema, name in required)
        for name, schema in _parameters(function, _XML_NAME).items()
    ]
    return sequence(*parts) if parts else EMPTY


def _xml_value(begin: str, schema: object, function: Function) -> Format:
    """The format of one parameter. Raises UnfitError."""
    end = "</parameter>"
    if kind_of(schema) == "json":
        return tag(begin, json_value(schema), "\n" + end)
    assert isinstance(schema, dict)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return tag(begin, one_of(*map(text, values)), "\n" + end)
    if values is not None and function.strict is not False:
        raise UnfitError(f"the 'enum' {brief(values)} of a parameter")
    pattern = _text_pattern(schema) if function.strict is not False else None
    if pattern is None:
        return tag(begin, any_text(), end)
    return tag(begin, {"type": "regex", "pattern": pattern}, "\n" + end)


def _text_pattern(schema: dict[str, Any]) -> str | None:
    """The expression of a string without quotes; None for any string. Raises UnfitError."""
    if "format" in schema:
        raise UnfitError("the keyword 'format' of a parameter")
    pattern = schema.get("pattern")
    if pattern is not None:
        if _MAY_WRITE_TAGS.search(pattern):
            raise UnfitError(f"the pattern {brief(pattern)}, which lets '<' be written,")
        return str(pattern)
    if "minLength" in schema or "maxLength" in schema:
        return f"{_NO_TAG}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return None


def python_arguments(function: Function) -> Format:
    """Arguments as keywords of a call in Python, with values of JSON. Raises UnfitError."""
    required = _required(function)
    parameters = _parameters(function, _IDENTIFIER)
    # Required parameters come first, so that at most one other may begin the list.
    names = sorted(parameters, key=lambda name: name not in required)
    values = [sequence(text(f"{name}="), json_value(parameters[name])) for name in names]

    def rest(start: int) -> list[Format]:
        parts = [sequence(text(", "), value) for value in values[start:]]
        return [
            part if name in required else optional(part)
            for name, part in zip(names[start:], parts, strict=True)
        ]

    if not values:
        return EMPTY
    if required:
        return sequence(values[0], *rest(1))
    if len(values) > _MAX_OPTIONAL:
        raise UnfitError(f"{len(values)} parameters of which none is required")
    each = [sequence(value, *rest(i + 1)) for i, value in enumerate(values)]
    return optional(one_of(*each))


def _parameters(function: Function, writable: re.Pattern[str]) -> dict[str, Any]:
    """The schemas of a function's parameters, each by itself.

    Args:
        writable: matches names that can be written. Where the schema is not strict, parameters
            with others are left out.

    Raises UnfitError.
    """
    schema = function.schema
    if function.strict is not False:
        for keyword in (*_WHOLE, *_COUNTED):
            if keyword in schema:
                raise UnfitError(f"the keyword {keyword!r} of its parameters as a whole")
        least = schema.get("minProperties", 0)
        if not isinstance(least, int) or least > len(_required(function)):
            raise UnfitError("the keyword 'minProperties' of its parameters as a whole")
        for name in properties_of(schema):
            if not writable.fullmatch(name):
                raise UnfitError(f"the parameter {brief(name)}, whose name cannot be written,")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        name: part | shared if isinstance(part, dict) and shared else part
        for name, part in properties_of(schema).items()
        if writable.fullmatch(name)
    }


def _required(function: Function) -> set[str]:
    required, names = function.schema.get("required"), properties_of(function.schema)
    return {name for name in names if isinstance(required, list) and name in required}


# ---- calls


class CallForm(NamedTuple):
    """Form in which a family writes calls.

    Attributes:
        begin, end: text around the arguments of a call; ``%s`` stands for the function's name.
        arguments: their format. Raises UnfitError.
        separator: between calls.
        opening, closing: text around all calls.
        trigger: begins calls, and nothing else; "" where they begin a text.
        forbidden: texts that the parser takes for calls, too, and that must not come.
    """

    begin: str
    end: str
    arguments: Callable[[Function], Format]
    separator: str
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    forbidden: tuple[str, ...] = ()

    def called_by(self, begin: object) -> str | None:
        """The function that a tag with this beginning calls, if it calls one."""
        before, after = self.begin.split("%s")
        for start in (before, before.removeprefix(self.trigger)):  # see ``skip`` below
            if isinstance(begin, str) and begin.startswith(start) and begin.endswith(after):
                return begin[len(start) : len(begin) - len(after)]
        return None

    def calls(self, functions: Sequence[Function], *, several: bool, skip: int = 0) -> Format:
        """Calls and nothing else, without the first ``skip`` characters. Raises UnfitError."""

        def call(function: Function, drop: int) -> Format:
            begin = (self.begin % function.name)[drop:]
            return tag(begin, self.arguments(function), self.end)

        def listed(drop: int, separator: str) -> Format:
            return {
                "type": "tags_with_separator",
                "tags": [call(function, drop) for function in functions],
                "separator": separator,
                "at_least_one": True,
                "stop_after_first": not several,
            }

        if not self.opening:
            if skip:
                return one_of(*(call(function, skip) for function in functions))
            return listed(0, self.separator)
        return sequence(text(self.opening[skip:]), listed(0, self.separator), text(self.closing))

    def calls_or_text(self, functions: Sequence[Function], *, several: bool) -> Format:
        """Calls, and text in which no other calls are. Raises UnfitError."""
        if self.trigger:
            calls = self.calls(functions, several=several, skip=len(self.trigger))
            return {
                "type": "dispatch",
                "rules": [[self.trigger, calls]],
                "loop": several,
                "excludes": list(self.forbidden),
            }
        # A text that begins otherwise is no call.
        begin = {"type": "regex", "pattern": r"[^{\[\s<]"}
        free = sequence(begin, any_text(*self.forbidden))
        return one_of(self.calls(functions, several=several), free, EMPTY)


def check_enforced(functions: Sequence[Function], numbers: dict[str, int]) -> None:
    """Raise InvalidRequestError for a keyword of a schema that would not be enforced.

    Args:
        numbers: where each function stands in the request.
    """
    for function in functions:
        if function.strict is False:
            continue
        try:
            found = what_is_not_enforced(function.schema)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise refusal(function, numbers, f"is no JSON schema: {error}") from None
        if found is not None:
            raise refusal(
                function, numbers, f"{found} is not enforced by this server", separator=":"
            )


def without_what_is_misread(function: Function) -> Function:
    """The function, if its schema is not strict without what :func:`read_over` leaves out.

    Raises InvalidRequestError.
    """
    if function.strict is not False:
        return function
    try:
        return function._replace(schema=read_over(function.schema))
    except RecursionError:
        raise InvalidRequestError("tools: a schema is nested too deeply", param="tools") from None


def refusal(
    function: Function, numbers: dict[str, int], reason: str, *, separator: str = ""
) -> InvalidRequestError:
    """The error for a function whose arguments cannot be constrained."""
    name = parameters_field(numbers[function.name])
    advice = "; with strict set to false it is read over" if separator else ""
    return InvalidRequestError(f"{name}{separator} {reason}{advice}", param=name)
