"""JSON schemas with ``strict: false``: we ignore unenforceable keywords and enforce the others."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from test_json_schemas import FORBIDDEN, Written, compiler, nonsense, takes

from pd.core.errors import InvalidRequestError
from pd.grammar.xgrammar_library import accepts_text
from pd.proxy.requests.output_grammar import make_schema_grammar
from pd.structured.lenient_schemas import drop_unenforced
from pd.structured.schema_check import find_unenforced
from pd.structured.schema_shapes import check_shapes

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
UINT64 = (1 << 64) - 1
BIG = 12345678901234567890
NO = Written("")


def lenient(schema: Any) -> Any:
    return json.loads(make_schema_grammar(schema, "x", strict=False).text)


def has(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


# A schema that strict refuses, an instance that can be written without strict, one that cannot.
IGNORED: list[tuple[Any, Any, Any]] = [
    ({"type": "string", "format": "uri-reference"}, "https://a.b/c?d#e", 1),
    ({"type": "string", "format": "iri"}, "https://ä.b/", 1),
    ({"type": "string", "format": "regex"}, "[", 1),
    ({"type": "string", "format": "uint64"}, "anything", 1),
    ({"type": "integer", "format": "int64"}, 5, "a"),
    ({"format": "uri"}, 5, NO),
    (has(a={"type": "string", "format": "uri-template"}), {"a": "http://x/{y}"}, {"a": 1}),
    ({"type": "integer", "minimum": BIG}, 5, 1.5),
    ({"type": "integer", "maximum": -BIG}, 5, 1.5),
    ({"type": "number", "minimum": 1e300}, 5, "a"),
    ({"type": "integer", "exclusiveMinimum": True, "minimum": 3}, 3, 2),
    ({"type": "number", "maximum": 3, "exclusiveMaximum": False}, 3, 4),
    ({"type": "integer", "multipleOf": 3}, 4, "a"),
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, [1, 1], ["a"]),
    ({"type": "array", "contains": {"type": "null"}, "items": {"type": "integer"}}, [1], ["a"]),
    ({"type": "array", "items": {"type": "null"}, "additionalItems": False}, [None], [1]),
    ({"type": "string", "minLength": 1 << 40}, "a", 1),
    ({"type": "array", "minItems": 1e30}, ["a"], 1),
    ({"type": "object", "minProperties": 3}, {"a": 1}, 1),
    ({"not": {"type": "string"}, "type": "string"}, "a", 1),
    ({"type": "integer", "if": {"minimum": 1}, "then": {"maximum": 2}, "else": False}, 3, "a"),
    ({"allOf": [{"type": "integer"}, {"minimum": 2}], "type": "integer"}, 1, "a"),
    ({"allOf": [{}, {}], **has(a={"type": "null"})}, {"a": None}, {"a": 1}),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, 2.5, "a"),
    ({"oneOf": [{}, {"type": "integer"}]}, "a", NO),
    ({"oneOf": [has(a={"const": 1}), has(b={"const": 1})]}, {"b": 1}, {"c": 1}),
    ({"oneOf": [{}, {}], "anyOf": [{"type": "null"}]}, None, 1),
    ({"anyOf": [{"type": "null"}], "type": "integer"}, None, 1),
    ({"anyOf": [False], "type": "integer"}, 1, "a"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, 2, "a"),
    ({"$ref": "http://x/y", "type": "integer"}, 1, "a"),
    ({"$ref": "#/$defs/none", "type": "integer"}, 1, "a"),
    ({"$ref": "#/$defs/no", "type": "integer", "$defs": {"no": False}}, 1, "a"),
    ({"$ref": "#anchor", "type": "integer"}, 1, "a"),
    (has(a={"$ref": "#/not"}) | {"not": {"type": "null"}}, {"a": None}, {"a": 1}),
    (has(a={"$ref": "#/oneOf/0"}, b={"oneOf": [{}, {}]}), {"a": 1, "b": 2}, {"a": 1}),
    (
        has(a={"$ref": "#/properties/b/allOf/1"}, b={"type": "null", "allOf": [{}, {"const": 2}]}),
        {"a": 2, "b": None},
        {"a": 3, "b": None},
    ),
    ({"$dynamicRef": "#x", "type": "integer"}, 1, "a"),
    ({"$recursiveRef": "#", "type": "integer"}, 1, "a"),
    (has(a={"$id": "http://x/y", "type": "null"}), {"a": None}, {"a": 1}),
    ({"$schema": "http://example.org/mine", "type": "integer"}, 1, "a"),
    ({"enum": [], "type": "integer"}, 1, "a"),
    ({"enum": [1, UINT64 + 1]}, 1, 2),
    ({"const": UINT64 + 1, "type": "integer"}, 1, "a"),
    ({"const": {"a": UINT64 + 1}, "type": "object"}, {"b": 1}, 1),
    ({"type": "string", "enum": [1, 2]}, 1, "a"),
    ({"type": "string", "const": None}, None, "a"),
    ({"enum": ["a"], "maxLength": 1}, "a", "b"),
    ({"type": "string", "enum": ["a"], "pattern": "^b$"}, "a", "b"),
    ({"enum": ["a", "b"], "const": "c"}, "c", "a"),
    ({"type": "string", "enum": ["a", None], "nullable": True}, "a", None),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}, "title": "a"}, 1, NO),
    ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": {"type": "integer"}}}, 1, None),
    ({"type": "float"}, 1.5, NO),
    ({"type": ["string", "any"]}, 1, NO),
    (has(a={"type": "dict"}), {"a": {"b": 1}}, {}),
    ({"type": "integer", "maxLength": 3}, 12345, "a"),
    ({"type": "string", "required": True}, "a", 1),
    (has(a={"type": "string", "required": True}), {"a": "b"}, {}),
    (has(a={}) | {"required": ["a", "z"], "additionalProperties": False}, {"a": 1}, {}),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, {}, {"z": 1}),
    ({"type": "string", "pattern": "^(?=a)"}, "b", 1),
    ({"type": "string", "pattern": r"^\p{L}+$"}, "1", 1),
    ({"type": "string", "pattern": r"^(a)\1$"}, "b", 1),
    ({"type": "string", "pattern": r"\bword\b"}, "b", 1),
    ({"type": "string", "pattern": "^a{,3}$"}, "b", 1),
    ({"type": "string", "pattern": "^{b}$"}, "b", 1),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aaa", "b"),
    ({"type": "string", "pattern": "(?i)a", "maxLength": 2}, "b", "abc"),
    ({"type": "string", "format": "date", "minLength": 20}, "2020-01-01", "a"),
    ({"type": "string", "format": "iri", "maxLength": 2}, "ab", "abc"),
    ({"type": "object", "patternProperties": {"^a": {}, "^b": {}}}, {"c": 1}, 1),
    (
        {"type": "object", "patternProperties": {"^a": {}, "b": {}}, "additionalProperties": False},
        {"a": 1, "b": 2},
        1,
    ),
    (has(a={}) | {"patternProperties": {"^x-": {}}}, {"a": 1}, {"b": 1}),
    ({"type": "object", "patternProperties": {"^(?!a)": {}}}, {"a": 1}, 1),
    ({"type": "object", "patternProperties": {"^a": False}}, {"b": 1}, 1),
    (has(a={}) | {"propertyNames": {"maxLength": 3}}, {"a": 1}, {}),
    ({"type": "object", "propertyNames": {"multipleOf": 2}}, {"a": 1}, 1),
    ({"type": "object", "propertyNames": {"format": "date"}}, {"a": 1}, 1),
    ({"type": "object", "propertyNames": False}, {"a": 1}, 1),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}, 1),
    ({"type": "object", "dependencies": {"a": "b"}}, {"a": 1}, 1),
    (has(a={}) | {"unevaluatedProperties": {}}, {"a": 1}, {}),
    ({"prefixItems": [False], "type": "array"}, [1], 1),
    ({"type": "array", "items": {"anyOf": [False, False]}}, [1], 1),
    (False, 1, NO),
    ({"disallow": ["integer"]}, 3, NO),
    ({"extends": {"type": "integer"}}, "a", NO),
]


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), IGNORED, ids=repr)
def test_without_strict_unenforceable_keywords_are_ignored(
    schema: Any, allowed: Any, forbidden: Any
) -> None:
    before = json.dumps(schema)
    assert find_unenforced(schema) is not None
    written = lenient(schema)
    assert json.dumps(schema) == before
    assert find_unenforced(written) is None
    assert takes(written, allowed), written
    assert not takes(written, forbidden), written


# A schema, numbers that both forms write, numbers that only its lenient form writes, and others.
BOUNDS: list[tuple[Any, list[int], list[int], list[int]]] = [
    ({"type": "integer", "minimum": 0, "maximum": UINT64}, [0, (1 << 63) - 2], [UINT64], [-1]),
    ({"type": "integer", "maximum": 1e300}, [0, -(1 << 70)], [1 << 70], []),
    ({"type": "integer", "minimum": -(1 << 63)}, [0, -(1 << 63) + 2, 1 << 70], [-(1 << 63)], []),
    ({"type": "integer", "exclusiveMaximum": 1 << 64, "minimum": 5}, [5], [1 << 63], [4]),
    ({"type": "integer", "maximum": (1 << 60) + 1}, [(1 << 60) + 1], [], [(1 << 60) + 2]),
    ({"type": "integer", "exclusiveMinimum": float(1 << 60)}, [(1 << 60) + 1], [], [1 << 60]),
    ({"type": ["integer", "null"], "maximum": UINT64, "minimum": 1}, [1], [UINT64], [0]),
    ({"type": "number", "maximum": UINT64, "minimum": 0}, [0, 1 << 53], [UINT64], [-1]),
    ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, [0, 5], [1 << 60], []),
    ({"type": "integer", "maximum": 1 << 90, "minimum": -(1 << 90)}, [0, -5], [1 << 89], []),
]


@pytest.mark.parametrize(("schema", "both", "lenient_only", "neither"), BOUNDS, ids=repr)
def test_bounds_beyond_64_bits_narrow_a_strict_schema_and_are_ignored_by_others(
    schema: Any, both: list[int], lenient_only: list[int], neither: list[int]
) -> None:
    assert find_unenforced(schema) is None
    written = lenient(schema)
    for number in both:
        assert takes(schema, number)
        assert takes(written, number)
    for number in lenient_only:
        assert not takes(schema, number)
        assert takes(written, number)
    for number in neither:
        assert not takes(schema, number)
        assert not takes(written, number)


def test_without_strict_a_schema_too_deep_allows_anything() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(100):
        schema = has(a=schema)
    assert "steps" in (find_unenforced(schema) or "")
    assert find_unenforced(lenient(schema)) is None


@pytest.mark.parametrize(("schema", "instance"), FORBIDDEN, ids=repr)
def test_schemas_that_strict_refuses_compile_without(schema: Any, instance: Any) -> None:
    compiler().compile_text("json_schema", json.dumps(lenient(schema)))


@pytest.mark.parametrize("count", [1500, pytest.param(30_000, marks=pytest.mark.full)])
def test_random_schemas_have_no_fault_without_strict(count: int) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    formed = 0
    for _ in range(count):
        schema = nonsense(rng, 4)
        try:
            check_shapes(schema)
        except ValueError:
            with pytest.raises(InvalidRequestError):
                make_schema_grammar({"$defs": {"a": schema}}, "x", strict=False)
            continue
        assert find_unenforced(drop_unenforced(schema)) is None, schema
        formed += 1
    assert formed > count / 100


def test_a_dropped_format_allows_other_strings() -> None:
    compiled = compiler().compile_text(
        "json_schema", json.dumps(lenient({"type": "string", "format": "uri-reference"}))
    )
    for text in ("https://a.b:80/c/d?e=f&g#h", "../a", "", "mailto:a@b"):
        assert accepts_text(compiled, json.dumps(text))
