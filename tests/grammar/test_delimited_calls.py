"""Calls of FunctionGemma and Gemma 4 that must validate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_call_tags import accepts, functions

from pd.proxy.requests.tools import read_tools
from pd.proxy.text.tools.events import Arguments
from pd.proxy.text.tools.families import FUNCTIONGEMMA, GEMMA4
from pd.proxy.text.tools.reader import CallOptions
from pd.proxy.text.tools.tags import UnfitError

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip code": {"type": "integer"}},
    "required": ["zip code"],
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "left": {"$ref": "#/$defs/tree"}},
    "required": ["value"],
}


@pytest.fixture(params=[FUNCTIONGEMMA, GEMMA4], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


def allowed(family: Any, schema: Any, *values: str, **function: Any) -> list[bool]:
    """Tell which values a parameter ``a`` may have. ``Q`` stands for the delimiter."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    parameters |= {key: function.pop(key) for key in ("$defs",) if key in function}
    declared = functions({"name": "f", "parameters": parameters} | function)
    tag = family.form.make_calls(declared, several=False)
    begin, delimiter = family.form.begin % "f", family.special[2]
    texts = [f"{begin}{{a:{value}}}{family.form.end}" for value in values]
    return accepts(tag, *(text.replace("Q", delimiter) for text in texts))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["QQ", 'Q{}:,"\n<|Q', "Q</b>Q"], ['"x"', "x", "Qx", "5", " QxQ"]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["QaQ", "Qä漢Q"], ["QQ", "QabcQ"]),
        ({"type": "string", "pattern": "^[ab]+$"}, ["QabQ"], ["QabcQ", "QQ"]),
        (
            {"enum": ["a", 5, None, [True, {"k": "v"}]]},
            ["QaQ", "5", "null", "[true,{k:QvQ}]"],
            ["QbQ"],
        ),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "3.5", "Q3Q"]),
        ({"type": ["number", "null"]}, ["-1.5e3", "null"], ["true", "None"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
        (
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
            ["[QxQ]", "[QxQ,QyQ]"],
            ["[]", "[QxQ,QyQ,QzQ]", "[5]", "[QxQ,]", '["x"]'],
        ),
        (
            {"type": "array", "items": ADDRESS, "minItems": 2},
            ["[{zip code:1},{zip code:2}]"],
            ["[]"],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            ["[1,QxQ]"],
            ["[]", "[1]", "[1,2]", "[1,QxQ,1]"],
        ),
        ({"type": "string", "format": "date"}, ["Q2024-02-29Q"], ["Q2023-02-29Q", "QQ"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        (
            ADDRESS,
            ["{zip code:5}", "{zip code:5,street:QxQ}"],
            ["{}", "{street:QxQ}", "{zip code:QxQ}", "{zip code:5,other:1}", '{"zip code":5}'],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ["{}", "{x:1,y_2:2}"],
            ["{x:QaQ}"],
        ),
        ({"type": "object", "additionalProperties": False}, ["{}"], ["{x:1}"]),
        ({"anyOf": [{"type": "integer"}, ADDRESS]}, ["1", "{zip code:1}"], ["true", "QxQ"]),
        ({"allOf": [{"type": "integer"}]}, ["1"], ["QxQ"]),
        (
            {},
            ["1", "-0.5e-3", "QxQ", "[QaQ,{b:[null,true]}]", "{}", "Q<|<escap<<|Q", "Qäﬀ漢😀\nQ"],
            ["x", "[1,]", "Qx", "{:1}", '{"a":1}'],
        ),
        ({"$ref": "#/$defs/address"}, ["{zip code:1}"], ["{}"]),
    ],
    ids=str,
)
def test_values_follow_their_schema(
    family: Any, schema: Any, right: list[str], wrong: list[str]
) -> None:
    found = allowed(family, schema, *right, *wrong, **{"$defs": {"address": ADDRESS}})
    assert found == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/tree"}, "which leads to itself"),
        ({"type": "string", "format": "uri"}, "the format 'uri'"),
        ({"type": "string", "pattern": "."}, "lets '<' be written"),
        ({"enum": ['<|"|><escape>']}, "ends a text"),
        ({"enum": [{"a:b": 1}]}, "the value"),
        ({"type": "object", "properties": {"a:b": {"type": "integer"}}}, "cannot be written"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "'patternProperties'"),
        ({"type": "object", "required": ["b"]}, "which has no schema"),
        ({"type": "object", "minProperties": 1}, "'minProperties'"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "next to 'minimum'"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "'allOf'"),
        ({"anyOf": [{"type": "integer"}, False]}, "'false'"),
    ],
    ids=str,
)
def test_other_schemas_are_refused_or_allow_any_value(
    family: Any, schema: Any, reason: str
) -> None:
    with pytest.raises(UnfitError, match=reason):
        allowed(family, schema, **{"$defs": {"tree": TREE}})
    lenient = allowed(
        family, schema, "{a:QxQ,b:[1]}", "x", strict=False, **{"$defs": {"tree": TREE}}
    )
    assert lenient[1] is False
    assert lenient[0] or "anyOf" in schema or "properties" in schema or "$ref" in schema


def test_definitions_that_multiply_are_refused(family: Any) -> None:
    """Each level refers to the next one twice."""
    levels = {
        f"l{n}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/l{n + 1}"} for name in ("a", "b")},
        }
        for n in range(25)
    } | {"l25": {"type": "integer"}}
    with pytest.raises(UnfitError, match="more than 1024 others"):
        allowed(family, {"$ref": "#/$defs/l0"}, **{"$defs": levels})
    assert allowed(family, {"type": "integer"}, "1", strict=False, **{"$defs": levels}) == [True]


@pytest.mark.parametrize("strict", [None, False])
def test_functions_may_have_any_parameters_if_none_has_a_name(
    family: Any, strict: bool | None
) -> None:
    function = {"name": "f", "strict": strict, "parameters": {"type": "object"}}
    tag = family.form.make_calls(functions(function), several=False)
    begin, end, delimiter = family.form.begin % "f", family.form.end, family.special[2]
    texts = ("{}", f"{{a:1,b:{delimiter}x{delimiter}}}", "", "5")
    assert accepts(tag, *(f"{begin}{text}{end}" for text in texts)) == [True, True, False, False]


def test_the_parser_reads_what_the_formats_allow(family: Any) -> None:
    value = {"t": ' {}<|",\n', "n": [1, -2.5e3, True, None, "", []], "o": {"b c": {}, "x": "1"}}
    properties = {
        "t": {"type": "string"},
        "n": {"type": "array"},
        "o": {"type": "object", "properties": {"b c": {"type": "object"}, "x": {}}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["n", "o", "t"]}
    declared = functions({"name": "f", "parameters": parameters})
    text = f"{family.form.begin % 'f'}{write(value, family.special[2])}{family.form.end}"
    assert accepts(family.form.make_calls(declared, several=False), text) == [True]
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools is not None
    parser = family.parser(CallOptions({"f": tools.functions[0].classify_parameters()}))
    events = parser.add_text(text) + parser.close()
    assert json.loads("".join(e.text for e in events if isinstance(e, Arguments))) == value


def write(value: Any, delimiter: str) -> str:
    """Write a value as the models' templates do."""
    if isinstance(value, str):
        return f"{delimiter}{value}{delimiter}"
    if isinstance(value, list):
        return f"[{','.join(write(each, delimiter) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{write(value[key], delimiter)}' for key in sorted(value))}}}"
    return json.dumps(value)
