"""Structural tags (xgrammar's formats) that keep a model from writing invalid calls."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.brief import short_repr
from pd.core.errors import InvalidRequestError
from pd.core.grammar import MAX_GRAMMAR_BYTES, Grammar
from pd.proxy.text.tools.functions import (
    classify_schema,
    get_properties,
    name_parameters_field,
)
from pd.structured.lenient_schemas import drop_unenforced
from pd.structured.schema_check import find_unenforced
from pd.structured.schema_walk import list_allowed_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.proxy.text.tools.functions import Function

Format = dict[str, Any]

EMPTY: Format = {"type": "const_string", "value": ""}
_ANY_OBJECT = {"type": "object"}
# Keywords about parameters as a whole. We constrain each parameter by itself, so a list of
# parameters cannot follow these.
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_COUNTED = ("maxProperties", "propertyNames")
_ENDS_PARAMETER = re.compile(r"</parameter>\s*(<parameter=|</function>|</tool_call>)")
# A closing tag ends a text in XML, so no pattern may let a model write one.
_MAY_WRITE_TAGS = re.compile(r"(?<!\\)\.|\[\^|\\[SWDP]|<")
# We use ranges, because in a negated class xgrammar also accepts bytes that are not UTF-8.
_NO_TAG = "[ -;=-~\u00a0-\ud7ff\ue000-\uffff\U00010000-\U0010ffff]"
# Limit on Python parameters if none is required, because the format grows with their square.
_MAX_OPTIONAL = 64
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_XML_NAME = re.compile(r"[^\s<>](?:[^<>\n]{0,254}[^\s<>])?")


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


# ---- Arguments.


def make_json_arguments(function: Function) -> Format:
    """Make the format of arguments as a JSON object."""
    schema = function.schema
    if "type" not in schema and not any(keyword in schema for keyword in _WHOLE):
        schema = schema | _ANY_OBJECT
    return json_value(schema)


def make_xml_arguments(function: Function) -> Format:
    """Make the format of arguments as Qwen3-Coder writes them. Raises UnfitError."""

    def make_parameter(name: str, schema: object, required: bool) -> Format:
        begin = f"<parameter={name}>\n"
        written = make_sequence(_make_xml_value(begin, schema, function), make_text("\n"))
        return written if required else make_optional(written)

    required = _list_required(function)
    parts = [
        make_parameter(name, schema, name in required)
        for name, schema in _list_parameters(function, _XML_NAME).items()
    ]
    return make_sequence(*parts) if parts else EMPTY


def _make_xml_value(begin: str, schema: object, function: Function) -> Format:
    """Make the format of one parameter. Raises UnfitError."""
    end = "</parameter>"
    if classify_schema(schema) == "json":
        return make_tag(begin, json_value(schema), "\n" + end)
    assert isinstance(schema, dict)
    values = list_allowed_values(schema)
    if values:
        misread = next(filter(_ENDS_PARAMETER.search, values), None)
        if misread is not None and function.strict is not False:
            raise UnfitError(f"the value {short_repr(misread)} of a parameter, which ends a call,")
        return make_tag(begin, make_choice(*map(make_text, values)), "\n" + end)
    pattern = _find_text_pattern(schema) if function.strict is not False else None
    if pattern is None:
        return make_tag(begin, any_text(), end)
    return make_tag(begin, {"type": "regex", "pattern": pattern}, "\n" + end)


def _find_text_pattern(schema: dict[str, Any]) -> str | None:
    """Find the pattern of an unquoted string; None for any string. Raises UnfitError."""
    if "format" in schema:
        raise UnfitError("the keyword 'format' of a parameter")
    pattern = schema.get("pattern")
    if pattern is not None:
        if _MAY_WRITE_TAGS.search(pattern):
            raise UnfitError(f"the pattern {short_repr(pattern)}, which lets '<' be written,")
        return str(pattern)
    if "minLength" in schema or "maxLength" in schema:
        return f"{_NO_TAG}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return None


def make_python_arguments(function: Function) -> Format:
    """Make the format of Python keywords with JSON values. Raises UnfitError."""
    required = _list_required(function)
    parameters = _list_parameters(function, _IDENTIFIER)
    # Required parameters come first. So only the first one can begin the list, if any is required.
    names = sorted(parameters, key=lambda name: name not in required)
    values = [make_sequence(make_text(f"{name}="), json_value(parameters[name])) for name in names]

    def list_rest(start: int) -> list[Format]:
        parts = [make_sequence(make_text(", "), value) for value in values[start:]]
        return [
            part if name in required else make_optional(part)
            for name, part in zip(names[start:], parts, strict=True)
        ]

    if not values:
        return EMPTY
    if required:
        return make_sequence(values[0], *list_rest(1))
    if len(values) > _MAX_OPTIONAL:
        raise UnfitError(f"{len(values)} parameters of which none is required")
    each = [make_sequence(value, *list_rest(i + 1)) for i, value in enumerate(values)]
    return make_optional(make_choice(*each))


def _list_parameters(function: Function, writable: re.Pattern[str]) -> dict[str, Any]:
    """List a function's parameters with their schemas.

    Args:
        writable: pattern for writable names. If the schema is not strict, other names are left out.

    Raises UnfitError.
    """
    schema = function.schema
    if function.strict is not False:
        for keyword in (*_WHOLE, *_COUNTED):
            if keyword in schema:
                raise UnfitError(f"the keyword {keyword!r} of its parameters as a whole")
        least = schema.get("minProperties", 0)
        if not isinstance(least, int) or least > len(_list_required(function)):
            raise UnfitError("the keyword 'minProperties' of its parameters as a whole")
        for name in get_properties(schema):
            if not writable.fullmatch(name):
                raise UnfitError(f"the parameter {short_repr(name)}, whose name cannot be written,")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        name: part | shared if isinstance(part, dict) and shared else part
        for name, part in get_properties(schema).items()
        if writable.fullmatch(name)
    }


def _list_required(function: Function) -> set[str]:
    required, names = function.schema.get("required"), get_properties(function.schema)
    return {name for name in names if isinstance(required, list) and name in required}


# ---- Calls.


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
    """

    begin: str
    end: str
    make_arguments: Callable[[Function], Format]
    separator: str
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    forbidden: tuple[str, ...] = ()

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
                "stop_after_first": not several,
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
        if self.trigger:
            calls = self.make_calls(functions, several=several, skip=len(self.trigger))
            return {
                "type": "dispatch",
                "rules": [[self.trigger, calls]],
                "loop": several,
                "excludes": list(self.forbidden),
            }
        # A call begins otherwise, so this must be text.
        begin = {"type": "regex", "pattern": r"[^{\[\s<]"}
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
