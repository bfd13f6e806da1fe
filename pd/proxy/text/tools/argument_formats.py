"""Formats of a call's arguments in each family's notation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.brief import short_repr
from pd.proxy.text.tools import kimi
from pd.proxy.text.tools.functions import classify_schema, get_properties
from pd.proxy.text.tools.tags import (
    EMPTY,
    UnfitError,
    any_text,
    json_value,
    make_choice,
    make_optional,
    make_sequence,
    make_tag,
    make_text,
)
from pd.structured.schema_walk import list_allowed_values
from pd.structured.string_formats import PATTERNS

if TYPE_CHECKING:
    from pd.proxy.text.tools.functions import Function
    from pd.proxy.text.tools.tags import Format

_ANY_OBJECT = {"type": "object"}
# Keywords about parameters as a whole. We constrain each parameter by itself, so a list of
# parameters cannot follow these.
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_COUNTED = ("maxProperties", "propertyNames")
# A closing tag ends a text in XML, so no pattern may let a model write one.
_MAY_WRITE_TAGS = re.compile(r"(?<!\\)\.|\[\^|\\[SWDP]|<")
_FORMATS = PATTERNS | {"uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"}
# We use ranges, because in a negated class xgrammar also accepts bytes that are not UTF-8.
_NO_TAG = "[ -;=-~\u00a0-\ud7ff\ue000-\uffff\U00010000-\U0010ffff]"
# Limit on Python parameters if none is required, because the format grows with their square.
_MAX_OPTIONAL = 64
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_XML_NAME = re.compile(r"[^\s<>](?:[^<>\n]{0,254}[^\s<>])?")


def make_json_arguments(function: Function) -> Format:
    """Make the format of arguments as a JSON object."""
    schema = function.schema
    if "type" not in schema and not any(keyword in schema for keyword in _WHOLE):
        schema = schema | _ANY_OBJECT
    return json_value(schema)


def make_numbered_arguments(function: Function) -> Format:
    """Make the format of a call's number, and of arguments as a JSON object after Kimi's tag."""
    number = {"type": "regex", "pattern": "[0-9]{1,3}"}
    return make_sequence(number, make_text(kimi.ARGUMENTS), make_json_arguments(function))


class TagLayout(NamedTuple):
    """How a family writes parameters whose values are texts in tags.

    Attributes:
        begin: text before a value; ``%s`` stands for the parameter's name.
        end: tag that ends a value.
        line_break: white space before ``end`` that does not belong to the value.
        after: text after ``end``.
        following: tags of which one comes next.
    """

    begin: str
    end: str
    line_break: str
    after: str
    following: tuple[str, ...]

    def make_arguments(self, function: Function) -> Format:
        """Make the format of a function's parameters. Raises UnfitError."""
        required = list_required(function.schema)
        parts = []
        for name, schema in _list_parameters(function, _XML_NAME).items():
            value = self._make_value(self.begin % name, schema, function)
            part = make_sequence(value, make_text(self.after)) if self.after else value
            parts.append(part if name in required else make_optional(part))
        return make_sequence(*parts) if parts else EMPTY

    def _make_value(self, begin: str, schema: object, function: Function) -> Format:
        """Make the format of one value in its tags. Raises UnfitError."""
        end = self.line_break + self.end
        if classify_schema(schema) == "json":
            return make_tag(begin, json_value(schema), end)
        assert isinstance(schema, dict)
        values = list_allowed_values(schema)
        if values:
            misread = next(filter(self._ends_value, values), None)
            if misread is not None and function.strict is not False:
                raise UnfitError(
                    f"the value {short_repr(misread)} of a parameter, which ends a call,"
                )
            return make_tag(begin, make_choice(*map(make_text, values)), end)
        pattern = find_text_pattern(schema) if function.strict is not False else None
        if pattern is None:
            return make_tag(begin, any_text(), self.end)
        return make_tag(begin, {"type": "regex", "pattern": pattern}, end)

    def _ends_value(self, value: str) -> bool:
        """Tell whether a parser would find the end of a value inside ``value``."""
        following = "|".join(map(re.escape, self.following))
        return re.search(rf"{re.escape(self.end)}\s*({following})", value) is not None


def find_text_pattern(schema: dict[str, Any]) -> str | None:
    """Find the pattern of an unquoted string; None for any string. Raises UnfitError."""
    pattern, name = schema.get("pattern"), schema.get("format")
    if name is not None:
        if name not in _FORMATS or pattern is not None:
            raise UnfitError(f"the format {short_repr(name)} of a parameter")
        pattern = _FORMATS[name]
    if pattern is not None:
        if _MAY_WRITE_TAGS.search(pattern):
            raise UnfitError(f"the pattern {short_repr(pattern)}, which lets '<' be written,")
        return str(pattern)
    if "minLength" in schema or "maxLength" in schema:
        return f"{_NO_TAG}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return None


def make_python_arguments(function: Function) -> Format:
    """Make the format of Python keywords with JSON values. Raises UnfitError."""
    required = list_required(function.schema)
    parameters = _list_parameters(function, _IDENTIFIER)
    members = {
        name: make_sequence(make_text(f"{name}="), json_value(schema))
        for name, schema in parameters.items()
    }
    return make_members(members, required, ", ")


def make_members(members: dict[str, Format], required: set[str], separator: str) -> Format:
    """Make the format of a list of members, of which only some are required.

    Required ones come first, because the format grows with the square of the number of those that
    may begin the list. Raises UnfitError if there are too many.
    """
    names = sorted(members, key=lambda name: name not in required)
    values = [members[name] for name in names]

    def list_rest(start: int) -> list[Format]:
        parts = [make_sequence(make_text(separator), value) for value in values[start:]]
        return [
            part if name in required else make_optional(part)
            for name, part in zip(names[start:], parts, strict=True)
        ]

    if not values:
        return EMPTY
    if names[0] in required:
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
        if not isinstance(least, int) or least > len(list_required(function.schema)):
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


def list_required(schema: dict[str, Any]) -> set[str]:
    """List the properties of an object that are required."""
    required, names = schema.get("required"), get_properties(schema)
    return {name for name in names if isinstance(required, list) and name in required}
