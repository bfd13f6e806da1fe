"""What of a JSON schema is enforced: asked of xgrammar itself, so that a newer one that enforces
less, or more, is noticed."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import xgrammar

from pd.core.json_schemas import make_strings_plain
from pd.proxy.json_schemas import MAX_STEPS, what_is_not_enforced

# A schema, and an instance that it forbids.
FORBIDDEN: list[tuple[Any, Any]] = [
    ({"not": {"type": "string"}}, "a"),
    ({"if": {"const": 1}, "then": False}, 1),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, 3),
    ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, 1),
    ({"type": "string", "format": "idn-email"}, "x"),
    ({"type": "string", "minLength": 2, "pattern": "^a*$"}, "a"),
    ({"type": "string", "minLength": 20, "format": "date"}, "2020-01-01"),
    ({"minimum": 3}, 2),
    ({"minLength": 3}, "a"),
    ({"required": ["a"]}, {}),
    ({"enum": [1, "a"], "type": "string"}, 1),
    ({"const": 1, "type": "string"}, 1),
    ({"anyOf": [{"type": "string"}], "type": "integer"}, "a"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, 2),
    ({"$ref": "http://x/y"}, 1),
    ({"type": "object", "properties": {"a": {}}, "required": ["a", "z"]}, {"a": 1}),
    ({"type": "integer", "multipleOf": 3}, 4),
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, [1, 1]),
    ({"type": "array", "contains": {"type": "string"}, "items": {}}, [1]),
    (
        {"type": "object", "dependentRequired": {"a": ["b"]}, "additionalProperties": True},
        {"a": 1},
    ),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {}),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": "x"}),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, {"ab": "x"}),
    ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1]),
    ({"type": "array", "items": {}, "maxItems": 1}, [1, 2]),
    ({"type": "array", "prefixItems": [{"type": "integer"}]}, ["a"]),
    ({"type": "string", "format": "date"}, "abc"),
    ({"type": "string", "pattern": "^a+$"}, "b"),
    ({"type": "string", "maxLength": 2}, "abc"),
    ({"type": "number", "exclusiveMaximum": 2}, 2),
    ({"type": "integer", "minimum": -5, "maximum": 5}, 6),
    ({"type": ["string", "null"]}, 5),
    ({"enum": [{"a": 1}]}, {"a": 2}),
    ({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, "ab"),
    ({"unevaluatedProperties": {"type": "string"}, "type": "object"}, {"a": 1}),
]


@functools.cache
def compiler() -> Any:
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def takes(schema: Any, instance: Any) -> bool:
    compiled = compiler().compile_json_schema(json.dumps(schema), any_whitespace=False)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    accepted = matcher.accept_string(json.dumps(instance, ensure_ascii=False))
    return accepted and matcher.is_completed()


@pytest.mark.parametrize(("schema", "instance"), FORBIDDEN, ids=lambda value: json.dumps(value))
def test_what_would_be_taken_although_forbidden_is_refused(schema: Any, instance: Any) -> None:
    assert what_is_not_enforced(schema) or not takes(schema, instance)


PATTERNS = [
    ("^[a-z]+$", False),
    ("[\x01-z]*", True),
    ("[ -~]", True),
    ('a"b', True),
    (r"\d+\.\d", False),
    (r"a\\b", True),
    (r"\n", True),
    (r"[^a]", False),
    ("[!-#]", True),
    (r"\x41", False),
    (r"\u0007", True),
    (r"[\w.-]+@x", False),
    (r"[a\]b]", False),
    (r"\"", True),
]


@pytest.mark.parametrize(("pattern", "refused"), PATTERNS)
def test_patterns_that_would_break_a_string_are_refused(pattern: str, refused: bool) -> None:
    assert (what_is_not_enforced({"type": "string", "pattern": pattern}) is not None) == refused


ENFORCED = [
    True,
    {},
    {"type": "object"},
    {"type": "integer", "title": "x", "description": "y", "default": 3, "examples": [1]},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string"},
    {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "null"}}},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Optional", "default": None},
    {"enum": ["a", "b"], "type": "string"},
    {"const": 1.0, "type": "integer"},
    {"type": "object", "additionalProperties": False, "unevaluatedProperties": False},
]


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda value: json.dumps(value))
def test_what_is_enforced_is_accepted(schema: Any) -> None:
    assert what_is_not_enforced(schema) is None


def test_where_it_is_and_how_deep_is_said() -> None:
    inner = {"type": "array", "items": {"type": "integer", "multipleOf": 2}}
    found = what_is_not_enforced({"type": "object", "properties": {"list": inner}})
    assert found is not None
    assert "'multipleOf'" in found
    assert "properties/list/items" in found
    deep: dict[str, Any] = {}
    for _ in range(MAX_STEPS + 2):
        deep = {"type": "array", "items": deep}
    assert "steps" in (what_is_not_enforced(deep) or "")


def test_lengths_allow_no_strings_where_only_others_are() -> None:
    schema = {"type": ["integer", "null"], "minLength": 2}
    make_strings_plain(schema)
    assert schema == {"type": ["integer", "null"], "minLength": 2}
