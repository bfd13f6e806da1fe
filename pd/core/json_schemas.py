"""Walks through JSON schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Steps from the root to the schemas that are walked through.
_MAX_STEPS = 1024
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_SINGLE = ("items", "additionalProperties", "propertyNames", "not", "contains")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
# What a string of JSON holds without escapes. As ranges, because xgrammar takes bytes that are no
# UTF-8 for characters that a class does not exclude.
_PLAIN_CHARACTER = "[ -!#-[\\]-~\u00a0-\ud7ff\ue000-\uffff\U00010000-\U0010ffff]"


def subschemas(schema: object) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """All schemas inside a schema that are objects, itself among them, with the ways to them; none
    too deep to be compiled."""
    stack: list[tuple[tuple[str, ...], object]] = [((), schema)]
    while stack:
        where, part = stack.pop()
        if not isinstance(part, dict) or len(where) > _MAX_STEPS:
            continue
        yield where, part
        for name in _NAMED:
            inside = part.get(name)
            if isinstance(inside, dict):
                stack += [((*where, name, str(key)), each) for key, each in inside.items()]
        stack += [((*where, name), part.get(name)) for name in _SINGLE]
        for name in _LISTED:
            several = part.get(name)
            if isinstance(several, list):
                stack += [((*where, name, str(i)), each) for i, each in enumerate(several)]


def schemas_of_tags(structural_tag: object) -> Iterator[object]:
    """The schemas of a structural tag that describe text in JSON."""
    stack = [structural_tag]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            for name in ("json_schema", "schema"):
                if part.get("style", "json") == "json":
                    yield part.get(name)
            stack += [each for name, each in part.items() if name not in ("json_schema", "schema")]


def make_strings_plain(schema: object) -> None:
    """Change a schema so that strings of bounded length have a pattern instead: xgrammar lets such
    strings have control characters, which JSON forbids. They have no escapes then."""
    for _, part in list(subschemas(schema)):
        if not ("minLength" in part or "maxLength" in part) or "pattern" in part:
            continue
        kinds = part.get("type")
        if isinstance(kinds, list) and "string" not in kinds:
            continue
        low, high = part.pop("minLength", 0), part.pop("maxLength", "")
        pattern = f"^{_PLAIN_CHARACTER}{{{low},{high}}}$"
        if isinstance(kinds, list) and len(kinds) > 1:
            rest = {**part, "type": [kind for kind in kinds if kind != "string"]}
            part.clear()
            part["anyOf"] = [{"type": "string", "pattern": pattern}, rest]
        else:
            part["pattern"] = pattern
