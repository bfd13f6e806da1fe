"""Formats of arguments whose texts have a delimiter instead of quotes (Gemma)."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pd.core.brief import short_repr
from pd.proxy.text.tools.argument_formats import find_text_pattern, list_required, make_members
from pd.proxy.text.tools.functions import get_properties
from pd.proxy.text.tools.tags import (
    UnfitError,
    any_text,
    json_value,
    make_choice,
    make_optional,
    make_sequence,
    make_tag,
    make_text,
)
from pd.structured.schema_check import WHOLE
from pd.structured.schema_walk import OF_TYPES, list_allowed_values, resolve_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.text.tools.functions import Function
    from pd.proxy.text.tools.tags import Format

_TYPES = ("string", "number", "boolean", "null", "array", "object")
_CONSTRAINTS = {"type", *WHOLE, *(name for names in OF_TYPES.values() for name in names)}
_NUMBERS = ("integer", "number")
# Keywords of objects about names that we do not know.
_UNTRACKED = ("patternProperties", "propertyNames", "maxProperties")
_KEY = re.compile(r"[^\s:=,{}\[\]<\"'](?:[^:=,{}\[\]<\n]{0,254}[^\s:=,{}\[\]<])?")
_ANY_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"
# Limits on the schemas of a function, because we write a schema anew for each reference to it.
_MAX_SCHEMAS, _MAX_DEPTH = 1024, 32
# Characters of any text, but no bytes that are not UTF-8 (as a negated class would have).
_CHARACTERS = "\t\n\r" + "".join(map(chr, range(0x20, 0x7F)))
_OTHERS = "\\u00a0-\\ud7ff\\ue000-\\uffff\\U00010000-\\U0010ffff"


def make_delimited_arguments(delimiter: str) -> Callable[[Function], Format]:
    """Return a function that makes the format of a function's arguments.

    Args:
        delimiter: the text before and after a string, which no string contains.
    """

    def make_arguments(function: Function) -> Format:
        schema = function.schema
        if "type" not in schema and not any(keyword in schema for keyword in WHOLE):
            schema = schema | {"type": "object"}
        writer = _Writer(delimiter, schema, is_strict=function.strict is not False)
        return writer.make_value(schema, 0)

    return make_arguments


class _Writer:
    """Makes the formats of a function's schemas. All methods may raise UnfitError."""

    def __init__(self, delimiter: str, root: dict[str, Any], *, is_strict: bool) -> None:
        """``is_strict``: refuse a schema that we cannot enforce, instead of allowing any value."""
        self._delimiter = delimiter
        self._root = root
        self._is_strict = is_strict
        self._left = _MAX_SCHEMAS
        # References whose targets we are writing.
        self._open: set[str] = set()

    def make_value(self, schema: object, depth: int) -> Format:
        """Make the format of a value.

        Args:
            depth: number of schemas around this one.
        """
        try:
            return self._make_exact(schema, depth)
        except UnfitError:
            if self._is_strict:
                raise
            return _make_any(self._delimiter, "value" if depth else "object")

    def _make_exact(self, schema: object, depth: int) -> Format:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise UnfitError(f"a schema with more than {_MAX_SCHEMAS} others inside, or so deep,")
        if schema is False:
            raise UnfitError("the schema 'false'")
        if not isinstance(schema, dict) or not _CONSTRAINTS & schema.keys():
            return _make_any(self._delimiter, "value")
        if "$ref" in schema:
            return self._make_referenced(schema["$ref"], depth)
        values = list_allowed_values(schema)
        if values is not None:
            return make_choice(*(make_text(self._write_constant(value)) for value in values))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self._make_branches(schema, keyword, depth)
        types = schema.get("type", _TYPES)
        kinds = types if isinstance(types, (list, tuple)) else [types]
        return make_choice(*(self._make_of_type(schema, kind, depth) for kind in kinds))

    def _make_referenced(self, reference: str, depth: int) -> Format:
        if reference in self._open:
            raise UnfitError(f"the reference {short_repr(reference)}, which leads to itself,")
        self._open.add(reference)
        try:
            return self.make_value(resolve_reference(self._root, reference), depth + 1)
        finally:
            self._open.remove(reference)

    def _make_branches(self, schema: dict[str, Any], keyword: str, depth: int) -> Format:
        others = _CONSTRAINTS & schema.keys() - {keyword}
        if others:
            raise UnfitError(f"the keyword {keyword!r} next to {min(others)!r}")
        branches = schema[keyword]
        if keyword == "allOf" and len(branches) > 1:
            raise UnfitError("the keyword 'allOf' with several schemas")
        return make_choice(*(self.make_value(branch, depth + 1) for branch in branches))

    def _make_of_type(self, schema: dict[str, Any], kind: object, depth: int) -> Format:
        if kind == "string":
            return self._make_string(schema)
        if kind == "boolean":
            return make_choice(make_text("true"), make_text("false"))
        if kind == "null":
            return make_text("null")
        if kind in _NUMBERS:
            bounds = {name: schema[name] for name in OF_TYPES["number"] if name in schema}
            return json_value({"type": kind} | bounds)
        for keyword in _UNTRACKED:
            if keyword in schema:
                raise UnfitError(f"the keyword {keyword!r} of a parameter")
        return (
            self._make_list(schema, depth) if kind == "array" else self._make_object(schema, depth)
        )

    def _make_string(self, schema: dict[str, Any]) -> Format:
        pattern = find_text_pattern(schema)
        text = any_text() if pattern is None else {"type": "regex", "pattern": pattern}
        return make_tag(self._delimiter, text, self._delimiter)

    def _make_list(self, schema: dict[str, Any], depth: int) -> Format:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first = schema.get("prefixItems", schema.get("items"))
        if isinstance(first, list):
            return self._make_tuple(first, least, most, depth)
        if most == 0:
            return make_text("[]")
        item = self.make_value(schema.get("items", True), depth + 1)
        rest = _repeat(make_sequence(make_text(","), item), max(least, 1) - 1, most)
        items = make_sequence(item, rest)
        return make_sequence(
            make_text("["), items if least else make_optional(items), make_text("]")
        )

    def _make_tuple(self, first: list[Any], least: int, most: int | None, depth: int) -> Format:
        """Make the format of a list with a schema for each item."""
        if least > len(first) or (most is not None and most < len(first)):
            raise UnfitError("a list with schemas for more or fewer items than it may have")
        parts = [make_text("[")]
        for number, each in enumerate(first):
            parts += [make_text("," if number else ""), self.make_value(each, depth + 1)]
        return make_sequence(*parts, make_text("]"))

    def _make_object(self, schema: dict[str, Any], depth: int) -> Format:
        properties, required = get_properties(schema), list_required(schema)
        names = schema.get("required")
        unnamed = set(names) - required if isinstance(names, list) else set()
        if unnamed:
            raise UnfitError(
                f"the required parameter {short_repr(min(unnamed))}, which has no schema,"
            )
        if schema.get("minProperties", 0) > len(required):
            raise UnfitError("the keyword 'minProperties' of an object")
        others = schema.get("additionalProperties", True)
        if not properties:
            return make_sequence(make_text("{"), self._make_map(others, depth), make_text("}"))
        members = {}
        for name in sorted(properties, key=str.lower):
            if _KEY.fullmatch(name):
                value = self.make_value(properties[name], depth + 1)
                members[name] = make_sequence(make_text(f"{name}:"), value)
            elif self._is_strict:
                raise UnfitError(f"the parameter {short_repr(name)}, whose name cannot be written,")
        return make_sequence(make_text("{"), make_members(members, required, ","), make_text("}"))

    def _make_map(self, others: object, depth: int) -> Format:
        """Make the format of the members of an object without named properties."""
        if others is False:
            return make_text("")
        key = {"type": "regex", "pattern": _ANY_KEY}
        member = make_sequence(key, make_text(":"), self.make_value(others, depth + 1))
        rest = _repeat(make_sequence(make_text(","), member), 0, None)
        return make_optional(make_sequence(member, rest))

    def _write_constant(self, value: object) -> str:
        if isinstance(value, str):
            if self._delimiter in value:
                raise UnfitError(
                    f"the value {short_repr(value)} of a parameter, which ends a text,"
                )
            return f"{self._delimiter}{value}{self._delimiter}"
        if isinstance(value, list):
            return f"[{','.join(map(self._write_constant, value))}]"
        if isinstance(value, dict):
            if not all(map(_KEY.fullmatch, value)):
                raise UnfitError(f"the value {short_repr(value)} of a parameter")
            members = (f"{key}:{self._write_constant(each)}" for key, each in value.items())
            return f"{{{','.join(members)}}}"
        return json.dumps(value)


def _repeat(content: Format, least: int, most: int | None) -> Format:
    """Make the format of a repetition. ``most`` counts one more, and None is no limit."""
    return {
        "type": "repeat",
        "min": least,
        "max": -1 if most is None else most - 1,
        "content": content,
    }


@lru_cache(maxsize=8)
def _make_any(delimiter: str, rule: str) -> Format:
    """Make the format of any value or any object.

    A rule ``text0`` reads a text after its opening delimiter, and ``text1``, … know how much of the
    closing one was read.
    """
    rules = [
        f"root ::= {rule}",
        'value ::= object | list | text | number | "true" | "false" | "null"',
        'object ::= "{" (member ("," member)*)? "}"',
        f'member ::= {_ANY_KEY} ":" value',
        'list ::= "[" (value ("," value)*)? "]"',
        'number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?',
        f"text ::= {json.dumps(delimiter)} text0",
    ]
    letters = sorted(set(delimiter))
    for size in range(len(delimiter)):
        ways = [f"[{_list_ranges(set(_CHARACTERS) - set(letters))}{_OTHERS}] text0"]
        for letter in letters:
            begun = delimiter[:size] + letter
            known = next(
                count for count in range(len(begun), -1, -1) if begun.endswith(delimiter[:count])
            )
            following = "" if known == len(delimiter) else f" text{known}"
            ways.append(json.dumps(letter) + following)
        rules.append(f"text{size} ::= {' | '.join(ways)}")
    return {"type": "grammar", "grammar": "\n".join(rules)}


def _list_ranges(characters: set[str]) -> str:
    """Write a set of characters for a class."""
    return "".join(f"\\x{ord(each):02x}" for each in sorted(characters))
