"""Values listed in a JSON schema, next to types and annotations."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from test_json_schemas import Written, compiler, tag_of, takes

from pd.core.errors import InvalidRequestError
from pd.grammar.xgrammar_library import accepts_text
from pd.proxy.requests.output_grammar import make_schema_grammar
from pd.proxy.text.tools.families import QWEN3_CODER
from pd.proxy.text.tools.functions import Function
from pd.structured.schema_check import find_unenforced, find_unenforced_in_tag
from pd.structured.schema_walk import are_equal

VALUES: list[Any] = ["a", "", 1, 1.5, True, False, None, {"b": [1]}, {}, [None, "x"], []]
OF_KIND: dict[str, list[Any]] = {
    "string": ["a", ""],
    "integer": [1],
    "number": [1, 1.5],
    "boolean": [True, False],
    "null": [None],
    "object": [{"b": [1]}, {}],
    "array": [[None, "x"], []],
}
KINDS = [list(each) for count in (1, 2) for each in itertools.combinations(OF_KIND, count)]


def written(value: Any) -> Written:
    return Written(json.dumps(value))


@pytest.mark.parametrize("kinds", [*KINDS, [*OF_KIND]], ids="-".join)
@pytest.mark.parametrize("strict", [True, False])
def test_a_list_of_types_drops_values_of_other_types(kinds: list[str], strict: bool) -> None:
    schema = {"type": kinds, "enum": VALUES}
    compiled = compiler().compile_text(
        "json_schema", make_schema_grammar(schema, "x", strict=strict).text
    )
    admitted = [json.dumps(value) for kind in kinds for value in OF_KIND[kind]]
    for value in VALUES:
        text = json.dumps(value)
        assert accepts_text(compiled, text) == (text in admitted), text
    assert not accepts_text(compiled, '"b"')
    assert not accepts_text(compiled, "2")


# A schema, values that can be written, values that cannot.
LISTED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["null", "b", 1]),
    ({"type": ["string", "null"], "const": "a"}, ["a"], [None, "b"]),
    ({"type": ["string", "null"], "const": None}, [None], ["a"]),
    ({"type": ["integer", "string"], "enum": [1, "b", 2.5, None]}, [1, "b"], [2.5, None, 2]),
    ({"type": ["number", "null"], "enum": [1, 2.5, "a", None]}, [1, 2.5, None], ["a", 2]),
    ({"type": ["integer", "null"], "enum": [1.0, None, 2.5]}, [1, None], [2.5]),
    ({"type": ["boolean", "null"], "enum": [True, None, 0]}, [True, None], [0, False, 1]),
    ({"type": ["integer"], "enum": [1, True]}, [1], [True]),
    ({"type": "string", "enum": ["a", 1, None]}, ["a"], [1, None]),
    ({"type": ["array", "object"], "enum": [[1], {"a": None}, "b"]}, [[1], {"a": None}], ["b"]),
    ({"type": ["string", "null"], "enum": ["a", None], "const": None}, [None], ["a"]),
    # As pydantic writes a literal of one value.
    ({"type": "string", "const": "a", "enum": ["a"]}, ["a"], ["b"]),
    ({"const": 1.0, "enum": [1, True]}, [1], [True]),
    # As Kubernetes has it.
    (
        {
            "description": 'Supports "ClientIP" and "None".',
            "type": ["string", "null"],
            "enum": ["ClientIP", "None", None],
            "x-kubernetes-unions": [{"discriminator": "type"}],
        },
        ["ClientIP", "None", None],
        ["Service", ""],
    ),
    ({"type": ["string", "null"], "enum": ["a"] * 3 + [None] * 2}, ["a", None], ["b"]),
    ({"enum": [(1 << 63) - 1, -(1 << 63) + 1]}, [(1 << 63) - 1, -(1 << 63) + 1], [1 << 63]),
]


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), LISTED, ids=repr)
@pytest.mark.parametrize("place", ["root", "property", "items", "anyOf", "$ref", "tag"])
def test_values_next_to_types_are_enforced_everywhere(
    schema: Any, allowed: list[Any], forbidden: list[Any], place: str
) -> None:
    kind, whole, wrap = "json_schema", schema, lambda value: value
    if place == "property":
        whole = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
        wrap = lambda value: {"p": value}  # noqa: E731
    elif place == "items":
        whole, wrap = {"type": "array", "items": schema}, lambda value: [value]
    elif place == "anyOf":
        whole = {"anyOf": [schema, {"const": "other"}]}
    elif place == "$ref":
        whole = {"$ref": "#/$defs/v", "$defs": {"v": schema}}
    elif place == "tag":
        kind = "structural_tag"
        assert find_unenforced_in_tag(tag_of(schema)) is None
    assert find_unenforced(whole) is None
    for value in allowed:
        assert takes(whole, wrap(value), kind), value
    for value in forbidden:
        assert not takes(whole, wrap(value), kind), value


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": ["string", "null"], "enum": [1, 2]}, "no value of the type ['string', 'null']"),
        ({"type": ["integer"], "const": "a"}, "'const' with no value of the type ['integer']"),
        ({"type": "string", "enum": [None]}, "'enum' with no value of the type 'string'"),
        ({"type": ["float", "any"], "enum": ["a"]}, "no value of the type ['float', 'any']"),
        ({"const": "a", "enum": ["b", 1]}, "'enum' and 'const' with no value in common"),
        ({"type": "null", "const": "a", "enum": ["a"]}, "no value of the type 'null'"),
        ({"type": "integer", "enum": [True, 1.5]}, "no value of the type 'integer'"),
        ({"type": "integer", "enum": [1 << 64]}, "the value 18446744073709551616"),
        ({"enum": [[{"a": 1 << 64}]]}, "the value [{'a': 18446744073709551616}]"),
    ],
)
def test_the_error_says_that_no_value_is_left(schema: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match="not enforced") as caught:
        make_schema_grammar({"type": "object", "properties": {"p": schema}}, "json_schema")
    assert says in caught.value.message
    assert "(at properties/p)" in caught.value.message


def test_values_compare_as_json() -> None:
    assert are_equal({"a": [1, None]}, {"a": [1.0, None]})
    for one, other in [(1, True), (0, False), ("1", 1), ([1], [True]), ({"a": 1}, {"b": 1})]:
        assert not are_equal(one, other)
        assert not are_equal([one, 1], [other, 1])
    assert not are_equal([1], [1, 2])
    assert not are_equal({"a": 0}, {"a": False})


# ---- annotations

ANNOTATIONS: dict[str, Any] = {
    "title": "A",
    "description": "what it is",
    "default": "a",
    "examples": ["a"],
    "example": "a",
    "deprecated": True,
    "readOnly": True,
    "writeOnly": False,
    "readonly": True,
    "$comment": "why",
    "$anchor": "here",
    "markdownDescription": "*what* it is",
    "markdownEnumDescriptions": ["*a*"],
    "enumDescriptions": ["a"],
    "enumNames": ["A"],
    "x-order": 3,
    "x-enum-varnames": ["A"],
    "x-kubernetes-preserve-unknown-fields": True,
    "x-nullable": True,
    "nullable": False,
    "externalDocs": {"url": "http://x"},
    "xml": {"name": "a"},
    "deprecationMessage": "",
    "doNotSuggest": True,
    "errorMessage": "no",
    "tsType": "A",
    "propertyOrder": 2,
    "options": {"hidden": True},
    "discriminator": {"propertyName": "a"},
    "contentMediaType": "text/plain",
    "contentEncoding": "base64",
    "id": "http://x/y",
    "optional": True,
    "": None,
}
MAIN: dict[str, Any] = {
    "enum": ["a", None],
    "const": "a",
    "$ref": "#/$defs/a",
    "anyOf": [{"const": "a"}, {"type": "null"}],
    "oneOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}],
    "allOf": [{"enum": ["a", "b"]}],
    "type": "string",
}


@pytest.mark.parametrize("keyword", MAIN)
def test_annotations_are_allowed_next_to_every_keyword(keyword: str) -> None:
    defs = {"a": {"enum": ["a", None]}}
    for name, value in ANNOTATIONS.items():
        part = {name: value, keyword: MAIN[keyword]}
        schema = {"type": "object", "properties": {"p": part}, "required": ["p"], "$defs": defs}
        assert find_unenforced(schema) is None, name
    part = {keyword: MAIN[keyword], **ANNOTATIONS}
    schema = {"type": "object", "properties": {"p": part}, "required": ["p"], "$defs": defs}
    assert takes(schema, {"p": "a"})
    assert not takes(schema, {"p": 1})


@pytest.mark.parametrize("name", ["minLength", "multipleOf", "pattern", "type", "required", "not"])
@pytest.mark.parametrize("keyword", ["$ref", "anyOf", "oneOf", "allOf"])
def test_constraints_are_refused_next_to_whole_keywords(keyword: str, name: str) -> None:
    values = {"minLength": 1, "multipleOf": 2, "pattern": "a", "type": "string", "required": []}
    schema = {keyword: MAIN[keyword], name: values.get(name, {}), "$defs": {"a": {"enum": ["a"]}}}
    assert f"the keyword {name!r}" in (find_unenforced(schema) or "")


NULL, TEXT = {"type": "null"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "adds"),
    [
        ({"enum": ["a", None]}, False),
        ({"enum": ["a"]}, False),
        ({"type": "string", "enum": ["a"]}, False),
        ({"type": ["string", "null"], "enum": ["a", None]}, False),
        ({"type": "string", "enum": ["a", None]}, True),
        ({"const": None}, False),
        ({"const": "a"}, False),
        ({"anyOf": [TEXT, NULL]}, False),
        ({"anyOf": [TEXT, {"type": ["integer", "null"]}]}, False),
        ({"anyOf": [TEXT, {"enum": [1, None]}]}, False),
        ({"anyOf": [TEXT, {"anyOf": [{"$ref": "#/$defs/null"}]}]}, False),
        ({"anyOf": [TEXT, True]}, False),
        ({"anyOf": [TEXT, {}]}, False),
        ({"oneOf": [TEXT, NULL]}, False),
        ({"allOf": [{"$ref": "#/$defs/null"}]}, False),
        ({"$ref": "#/$defs/null"}, False),
        ({"anyOf": [TEXT]}, True),
        ({"anyOf": [TEXT, False]}, True),
        ({"$ref": "#/$defs/text"}, True),
        ({"allOf": [{"$ref": "#/$defs/text"}]}, True),
        ({"anyOf": [{"$ref": "#/$defs/loop"}]}, True),
    ],
    ids=repr,
)
def test_nullable_is_allowed_if_it_adds_nothing(schema: Any, adds: bool) -> None:
    defs = {"null": NULL, "text": TEXT, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, TEXT]}}
    found = find_unenforced({**schema, "nullable": True, "$defs": defs})
    assert (found is not None) == adds, found
    assert not adds or "'nullable' next to" in str(found)
    assert find_unenforced({**schema, "nullable": False, "$defs": defs}) is None


def test_a_parameter_is_a_text_if_its_type_allows_only_texts() -> None:
    """This matters for calls of ``qwen3_coder``, because its texts have no quotes."""
    properties = {
        "text": {"type": "string", "enum": ["a", None]},
        "json": {"type": ["string", "null"], "enum": ["a", None]},
    }
    schema = {"type": "object", "properties": properties, "required": ["text", "json"]}
    function = Function("f", schema, True)
    assert function.classify_parameters() == {"text": "text", "json": "json"}
    tag = {"type": "structural_tag", "format": QWEN3_CODER.form.make_arguments(function)}
    compiled = compiler().compile_text("structural_tag", json.dumps(tag))
    for text, value, allowed in [
        ("a", '"a"', True),
        ("a", "null", True),
        ("null", "null", False),
        ('"a"', "null", False),
        ("a", "a", False),
    ]:
        parameters = f"<parameter=text>\n{text}\n</parameter>\n<parameter=json>\n{value}\n"
        assert accepts_text(compiled, parameters + "</parameter>\n") == allowed, (text, value)
