"""Which keywords of JSON schemas are enforced.

We ask xgrammar itself, so these tests notice a version that enforces less or more.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import random
from typing import Any, NamedTuple

import pytest
import xgrammar

from pd.core.errors import InvalidRequestError
from pd.grammar.xgrammar_library import Compiler, accepts_text
from pd.proxy.requests.output_grammar import make_schema_grammar
from pd.structured.pattern_rewriting import match_other_names
from pd.structured.schema_check import (
    MAX_STEPS,
    find_unenforced,
    find_unenforced_in_tag,
)
from pd.structured.schema_walk import OF_TYPES

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))


class Written(NamedTuple):
    """A text written as it is, JSON or not."""

    text: str | bytes


OTHERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
AB = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
NAMES = {"type": "object", "additionalProperties": {"type": "integer"}}


def kind_of(*kinds: str, **fields: Any) -> dict[str, Any]:
    """Make a schema for objects whose ``kind`` is one of these texts."""
    properties = {"kind": {"enum": list(kinds)}, "n": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": ["kind"], **fields}


# As pydantic writes a union of models that a field tells apart.
DISCRIMINATED = {
    "discriminator": {"mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}, "propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "$defs": {
        "A": {
            "type": "object",
            "properties": {"kind": {"const": "a", "type": "string"}, "n": {"type": "integer"}},
            "required": ["kind", "n"],
        },
        "B": kind_of("b", "c"),
    },
}
# A schema, and an instance that it forbids.
FORBIDDEN: list[tuple[Any, Any]] = [
    ({"not": {"type": "string"}}, "a"),
    ({"if": {"const": 1}, "then": False}, 1),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, 3),
    ({"oneOf": [kind_of("a", "b"), kind_of("b", "c")]}, {"kind": "b"}),
    ({"oneOf": [kind_of("a"), kind_of("b", required=[])]}, {"n": 1}),
    ({"oneOf": [kind_of("a", required=[]), kind_of("b", required=[])]}, {}),
    ({"oneOf": [kind_of("a"), {"type": "object", "additionalProperties": True}]}, {"kind": "a"}),
    ({"oneOf": [{"$ref": "#/$defs/A"}] * 2, "$defs": {"A": kind_of("a")}}, {"kind": "a"}),
    ({"oneOf": [{"$ref": "#/oneOf/1"}, {"$ref": "#/oneOf/0"}]}, 1),
    ({"oneOf": [{"$ref": "#/$defs/A"}, {"type": "integer"}], "$defs": {"A": {}}}, 1),
    (DISCRIMINATED, {"kind": "a"}),
    (DISCRIMINATED, {"kind": "b", "n": "x"}),
    (DISCRIMINATED, {"kind": "d"}),
    (
        {"oneOf": [kind_of("a", additionalProperties=True), kind_of("b")]},
        Written('{"kind": "a", "kind": "b"}'),
    ),
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
    ({"type": "string", "format": "date", "pattern": "^2"}, "1999-01-01"),
    *(
        ({"type": "string", "format": "date"}, day)
        for day in ("2023-02-29", "2023-02-31", "1900-02-29", "2023-04-31", "2023-00-10")
    ),
    ({"type": "string", "format": "time"}, "23:59:60Z"),
    ({"type": "string", "format": "time"}, "24:00:00Z"),
    ({"type": "string", "format": "date-time"}, "2023-02-29T00:00:00Z"),
    ({"type": "string", "format": "date-time"}, "2024-02-28T23:59:60Z"),
    ({"type": "string", "format": "ipv4"}, "01.1.1.1"),
    ({"type": "string", "format": "ipv6"}, "::01.2.3.4"),
    ({"type": "string", "format": "email"}, Written(r'"\"\q\"@a"')),
    ({"type": "string", "format": "json-pointer"}, Written('"/a"b"')),
    ({"type": "string", "format": "json-pointer"}, Written('"/\n"')),
    ({"type": "string", "pattern": "^a+$"}, "b"),
    ({"type": "string", "maxLength": 2}, "abc"),
    ({"type": "number", "exclusiveMaximum": 2}, 2),
    ({"type": "integer", "minimum": -5, "maximum": 5}, 6),
    ({"type": ["string", "null"]}, 5),
    ({"enum": [{"a": 1}]}, {"a": 2}),
    ({"enum": []}, 1),
    ({"type": []}, 1),
    ({"allOf": []}, 1),
    ({"type": "object", "properties": {"a": {"enum": [], "type": "string"}}}, {"a": 1}),
    ({"type": "string", "pattern": "^a{4294967297}$"}, "a"),
    ({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, "ab"),
    ({"unevaluatedProperties": {"type": "string"}, "type": "object"}, {"a": 1}),
    (OTHERS, Written('{"\\u0061": "x"}')),
    (OTHERS, Written('{"a": 1, "a": "x"}')),
    ({**OTHERS, "minProperties": 2}, Written('{"b": 1, "b": 2}')),
    ({"properties": {"n\n": {"type": "null"}}, "additionalProperties": True}, {"n\n": 1}),
    (
        {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": False},
        {"a": 1},
    ),
    ({**NAMES, "propertyNames": {"maxLength": 2}}, {"abc": 1}),
    ({**NAMES, "propertyNames": {"maxLength": 2}}, Written('{"\\u00e4b": 1}')),
    ({**NAMES, "propertyNames": {"maxLength": 3}}, Written('{"a\n": 1}')),
    ({**NAMES, "propertyNames": {"minLength": 2}}, Written('{"\\n": 1}')),
    ({**NAMES, "propertyNames": {"minLength": 2}}, Written('{"\t\t": 1}')),
    ({**NAMES, "propertyNames": {"pattern": "b"}}, {"ac": 1}),
    ({**NAMES, "propertyNames": {"pattern": "^[^a]+$"}}, Written('{"\n": 1}')),
    ({**NAMES, "propertyNames": {"pattern": "^a", "maxLength": 2}}, {"abc": 1}),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"enum": ["long"]}]}, "abc"),
    (
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^x+$"}]},
        Written('"x\n"'),
    ),
    (
        {"anyOf": [{"type": "string", "minLength": 5}, {"type": "string", "maxLength": 1}]},
        Written('"\\n\\n\\n"'),
    ),
    ({"type": "object", "required": ["a"], "unevaluatedProperties": False}, {}),
    ({"properties": {"a": False}, "additionalProperties": True}, {"a": 1}),
    ({"properties": {"a": {}}, "patternProperties": {"^a$": {"type": "null"}}}, {"a": 1}),
    ({"patternProperties": {"^a": {"type": "null"}, "b": {"type": "string"}}}, {"ab": None}),
    ({"type": "string", "pattern": "^(é.*|b)$"}, Written('"é"b"')),
    ({"type": "string", "pattern": "^[^é]$"}, Written('"\n"')),
    ({"type": "string", "pattern": "^(a(aa*))?$"}, "a"),
    ({"type": "string", "pattern": "a)b(c"}, "abc"),
    *(({"type": "string", "pattern": f"^a{each}a$"}, "aa") for each in ("++", "*+", "{1,2}+")),
    ({"type": "string", "pattern": "^(?!a)"}, "a"),
    ({"type": "string", "pattern": "x(^a)"}, "xa"),
    ({"type": "string", "pattern": r"\cA"}, Written('"\x01"')),
    ({"$ref": "#/$defs/a%25", "$defs": {"a%": {"type": "null"}}}, 1),
    ({"$ref": "#/x", "x": {"type": "integer"}}, "a"),
    (
        {"properties": {"a": {"$id": "http://x/y", "$ref": "#/$defs/b"}}, "$defs": {"b": {}}},
        {"a": 1},
    ),
    ({"const": 12345678901234567890}, 12345678901234567168),
    ({"type": "string", "maxLength": 3}, Written(b'"\xe0\x80\x80"')),
    ({"type": "string", "pattern": "^[^a]$"}, Written(b'"\xc0\x80"')),
    (False, 1),
    ({"prefixItems": [False]}, [1]),
    # As earlier drafts have it.
    ({"type": "array", "prefixItems": [{}], "additionalItems": False}, [1, 2]),
    ({"type": "integer", "divisibleBy": 2}, 3),
    ({"disallow": ["integer"]}, 3),
    ({"extends": {"type": "integer"}}, "a"),
]


@functools.cache
def compiler() -> Compiler:
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    return Compiler(xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256]))


def tag_of(schema: Any, **fields: Any) -> dict[str, Any]:
    """Make a structural tag for instances of a schema."""
    content = {"type": "json_schema", "json_schema": schema, **fields}
    return {"type": "structural_tag", "format": content}


def takes(schema: Any, instance: Any, kind: str = "json_schema") -> bool:
    text = (
        instance.text if isinstance(instance, Written) else json.dumps(instance, ensure_ascii=False)
    )
    grammar = schema if kind == "json_schema" else tag_of(schema, max_whitespace_cnt=1)
    return accepts_text(compiler().compile_text(kind, json.dumps(grammar)), text)


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
@pytest.mark.parametrize(("schema", "instance"), FORBIDDEN, ids=repr)
def test_schemas_that_xgrammar_does_not_enforce_are_refused(
    schema: Any, instance: Any, kind: str
) -> None:
    if kind == "structural_tag":
        is_refused = find_unenforced_in_tag(tag_of(schema)) is not None
        assert is_refused == (find_unenforced(schema) is not None)
    else:
        is_refused = find_unenforced(schema) is not None
    assert is_refused or not takes(schema, instance, kind)


# Fields of a format, a schema in it, a text that the schema forbids and that xgrammar takes.
LOOSE_TAGS: list[tuple[dict[str, Any], Any, str]] = [
    ({"any_order": True}, AB, '{"a": 1, "a": 1}'),
    ({"excludes": ["bb"]}, {"type": "string", "maxLength": 3}, '"abb"'),
    ({"style": "qwen_xml"}, AB, "<parameter=a>1</parameter><parameter=b>2</parameter>"),
]


@pytest.mark.parametrize(("fields", "schema", "text"), LOOSE_TAGS, ids=repr)
def test_tags_that_loosen_a_schema_are_refused(
    fields: dict[str, Any], schema: Any, text: str
) -> None:
    tag = tag_of(schema, **fields)
    assert accepts_text(compiler().compile_text("structural_tag", json.dumps(tag)), text)
    (name,) = fields
    found = find_unenforced_in_tag(tag)
    assert found is not None
    assert name in found
    assert "(at format)" in found


def test_the_error_names_the_place_in_a_tag() -> None:
    inner = tag_of({"properties": {"a": {"multipleOf": 2}}})["format"]
    tag = {"type": "tag", "begin": "<a>", "content": inner, "end": "</a>"}
    whole = {"type": "structural_tag", "format": {"type": "sequence", "elements": [tag]}}
    found = find_unenforced_in_tag(whole) or ""
    assert "'multipleOf' (at format/elements/0/content/json_schema/properties/a)" in found


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
    assert (find_unenforced({"type": "string", "pattern": pattern}) is not None) == refused


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
    {"maxLength": 3},
    {"anyOf": [False, {"type": "null"}]},
    {"$ref": "#/$defs/a%25b~1c", "$defs": {"a%b/c": {"type": "null"}}},
    DISCRIMINATED,
    {"type": "array", "items": {"oneOf": [kind_of("a"), kind_of("b"), {"type": "null"}]}},
]


@pytest.mark.parametrize("keyword", ["type", "enum", "anyOf", "oneOf", "allOf"])
def test_the_error_names_an_empty_keyword(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {keyword: []}}}
    with pytest.raises(InvalidRequestError, match=f"an empty '{keyword}'.*at properties/a"):
        make_schema_grammar(schema, "x")


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda value: json.dumps(value))
def test_enforced_schemas_are_accepted(schema: Any) -> None:
    assert find_unenforced(schema) is None


LETTERS = "^[a-c]{2}$"
# What zod wrote for an e-mail address.
LOOKS_AHEAD = r"^(?!\.)(?!.*\.\.)([A-Za-z.]*)[A-Za-z]@([A-Za-z]+\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "string", "format": "date", "pattern": LETTERS}, "ab", "2020-01-01"),
        ({"type": "string", "format": "uuid", "pattern": LETTERS}, "ab", "a"),
        ({"type": "string", "format": "email", "pattern": LOOKS_AHEAD}, "a@b.cd", "a"),
        ({"type": "string", "pattern": LOOKS_AHEAD}, "anything", 1),
        ({"type": "array", "items": {"type": "string", "pattern": "^(?=a)"}}, ["b"], [1]),
        ({"type": "string", "enum": []}, "a", 1),
        ({"type": "array", "items": {"type": []}}, [1], 1),
        ({"anyOf": [], "type": "string"}, "a", 1),
        ({"type": "string", "pattern": "^a{4294967297}$"}, "b", 1),
    ],
    ids=repr,
)
def test_rewriting_enforces_keywords_that_xgrammar_ignores(
    schema: Any, allowed: Any, forbidden: Any
) -> None:
    """xgrammar prefers a format to a pattern, and parses a lookahead as a group."""
    before = json.dumps(schema)
    assert find_unenforced(schema) is not None
    written = json.loads(make_schema_grammar(schema, "x", strict=False).text)
    assert takes(written, allowed)
    assert not takes(written, forbidden)
    assert json.dumps(schema) == before


def test_the_error_names_the_place_and_the_depth() -> None:
    inner = {"type": "array", "items": {"type": "integer", "multipleOf": 2}}
    found = find_unenforced({"type": "object", "properties": {"list": inner}})
    assert found is not None
    assert "'multipleOf'" in found
    assert "properties/list/items" in found
    deep: dict[str, Any] = {}
    for _ in range(MAX_STEPS + 2):
        deep = {"type": "array", "items": deep}
    assert "steps" in (find_unenforced(deep) or "")


# A schema, and an instance that it allows, as output writes it.
ALLOWED: list[tuple[Any, Any]] = [
    ({"maxLength": 3}, [1, "abcd"]),
    ({"minimum": 3}, "a"),
    ({"type": ["integer", "null"], "minLength": 2}, 1),
    ({"const": {"a": [1, {"b": -2.0}], "c": {}}}, {"a": [1, {"b": -2}], "c": {}}),
    ({"enum": [{"a": "ä"}, 7, []]}, {"a": "ä"}),
    ({"anyOf": [{"type": "string", "maxLength": 4294967297}, {"const": "a"}]}, "ab"),
    ({"type": "object", "maxProperties": 4294967297}, {"a": 1, "b": 2}),
    ({"type": "array", "maxItems": 1 << 90}, [1, 2]),
    ({"type": "object", "minProperties": 1}, {"a": 1}),
    ({"type": "object", "required": ["a"]}, {"a": [1]}),
    (OTHERS, {"a": 1, "ab": "x", "ä": None}),
    ({"type": "array", "maxItems": 2}, [1, "a"]),
    ({"prefixItems": [{"type": "integer"}], "maxItems": 2}, [1, "a"]),
    ({"prefixItems": [True, {"type": "integer"}], "minItems": 2}, ["a", 1]),
    ({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 3.5}, 3),
    ({"type": "string", "pattern": "b|^c"}, "aba"),
    *(({"type": "string", "pattern": "^a}?b{1,2}?c??$"}, text) for text in ("ab", "a}bbc")),
    *(({"type": "string", "format": "date"}, f"{year}-02-29") for year in ("2024", "2000", "0004")),
    ({"type": "string", "format": "date"}, "1999-12-31"),
    ({"type": "string", "format": "time"}, "23:59:59.125Z"),
    ({"type": "string", "format": "date-time"}, "2024-02-29T00:00:00-01:30"),
    ({"type": "string", "format": "ipv4"}, "255.0.19.100"),
    ({"type": "string", "format": "json-pointer"}, "/é/~0~1//1"),
    ({"type": "string", "format": "email"}, "x.{y}@a-1.b.c"),
    ({"type": "string", "format": "ipv6"}, "::ffff:255.0.1.99"),
    ({"type": "string", "pattern": "^[^a]é?$"}, "😀é"),
    ({"type": "string", "pattern": r"^\x61b[\x61b]\u0061b$"}, "abbab"),
    ({"type": "string", "pattern": r"^[\^a]$"}, "^"),
    ({"type": "string", "pattern": r"^\xe9béb[éb]$"}, "ébébb"),
    ({"patternProperties": {"^x-": {}}, "additionalProperties": False}, {"x-a": 1}),
    ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"const": 2}}}, {"a": 2}),
    ({"properties": {"a": {"$ref": "#"}, "b/%": {"$ref": "#/properties/a"}}}, {"a": {"a": 3}}),
    (DISCRIMINATED, {"kind": "a", "n": 1}),
    (DISCRIMINATED, {"kind": "c"}),
    ({"oneOf": [kind_of("a"), kind_of("b"), {"type": "null"}]}, None),
]


@pytest.mark.parametrize(("schema", "instance"), ALLOWED, ids=lambda value: json.dumps(value))
def test_allowed_instances_can_be_written(schema: Any, instance: Any) -> None:
    assert takes(schema, instance)


def test_addresses_agree_with_python() -> None:
    """We try random texts, some of them IPv6 addresses."""
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    compiled = compiler().compile_text("json_schema", '{"type": "string", "format": "ipv6"}')
    found = 0
    for _ in range(4000):
        words = [rng.choice(["", "1", "ffff", "0aB", "12345", "g"][: rng.randrange(3, 7)])]
        words += [rng.choice(["", "1", "ffff", "0aB"]) for _ in range(rng.randrange(9))]
        words += [rng.choice(["255.0.1.99", "1.2.3", "256.1.1.1", "01.2.3.4"])] * (
            rng.random() < 0.3
        )
        text = ":".join(words)
        try:
            is_address = bool(ipaddress.IPv6Address(text))
        except ValueError:
            is_address = False
        is_taken = accepts_text(compiled, f'"{text}"')
        # An address of IPv4 is taken only behind what says that it is one.
        assert is_taken == is_address or (is_address and "." in text), text
        found += is_taken
    assert found > 100


KEYWORDS = [
    *sorted({keyword for names in OF_TYPES.values() for keyword in names}),
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "$id", "$schema", "not"),
]
SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 2.5, float("inf"), float("nan"), 1 << 80, "", "a", "string"),
    *("#/$defs/a", "#/properties/a", "#", "(", "[a-", "integer", "\ud800"),
]


def nonsense(rng: random.Random, depth: int) -> Any:
    """We try keywords with values of any type."""
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(SCALARS)
    if kind < 0.45:
        return [nonsense(rng, depth - 1) for _ in range(rng.randrange(3))]
    names = rng.sample([*KEYWORDS, "a", "b"], rng.randrange(4))
    return {name: nonsense(rng, depth - 1) for name in names}


@pytest.mark.parametrize("count", [2000, pytest.param(50_000, marks=pytest.mark.full)])
def test_nonsense_is_a_400_or_compiles(count: int) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    served = 0
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256])
    for _ in range(count):
        try:
            grammar = make_schema_grammar(
                nonsense(rng, 4), "json_schema", strict=rng.random() < 0.7
            )
            Compiler(info).compile_text(grammar.kind, grammar.text)
            served += 1
        except (InvalidRequestError, ValueError) as error:
            assert str(error)
    assert 0 < served < count


def test_a_pattern_of_many_brackets_is_parsed_in_linear_time() -> None:
    """In quadratic time this would take an hour."""
    for pattern in ("[" * 200_000 + "\\", "(?<" * 80_000, "\\u{" * 80_000, "|^$" * 80_000):
        find_unenforced({"type": "string", "pattern": pattern})


def test_unnamed_properties_may_be_written_twice() -> None:
    """``docs/structured-output.md`` says so. Named properties may be written once."""
    assert takes(NAMES, Written('{"a": 1, "a": 2}'))
    assert not takes(OTHERS, Written('{"a": 1, "a": 2}'))


@pytest.mark.parametrize("names", [["a"], ["", "ab", "é"], ["aa", "a", "b" * 70], ['"', "-]"]])
def test_other_names_exclude_exactly_the_given_ones(names: list[str]) -> None:
    schema = {"type": "string", "pattern": match_other_names(names)}
    for name in ("", "a", "b", "aa", "ab", "abc", "é", "éa", "-]", "-", "😀", "b" * 60, *names):
        # Escapes are for none of them, and what begins as a long name is not told from it.
        expected = name not in names and '"' not in name
        assert takes(schema, name) == expected, name
