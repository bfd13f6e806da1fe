"""Malformed JSON schemas in every place that takes one: each is a 400, none is a 500, and none
reaches a node that cannot compile it or say why."""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import xgrammar

from pd.grammar.xgrammar_library import Compiler

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from fake_node import EOS
from proxy_cluster import Cluster
from tool_models import QWEN, write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx
    from fake_node import FakeNode

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
Body = tuple[str, dict[str, Any]]

# Keywords of all drafts, and some of nobody's.
# fmt: off
KEYWORDS = [
    "$ref", "$dynamicRef", "$recursiveRef", "$id", "$schema", "$anchor", "$dynamicAnchor",
    "$defs", "definitions", "$comment", "$vocabulary", "type", "enum", "const", "anyOf", "oneOf",
    "allOf", "not", "if", "then", "else", "properties", "required", "additionalProperties",
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "items", "prefixItems",
    "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
    "maxContains", "unevaluatedItems", "minLength", "maxLength", "pattern", "format",
    "contentSchema", "contentMediaType", "contentEncoding", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "divisibleBy", "disallow", "extends",
    "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "nullable", "discriminator", "id", "x-order", "unknown",
]
# fmt: on
# Of every type of JSON several.
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2, 1.5, -0.0, 1e300, 1 << 70, "", "a", "#", "string", "^a$", "("),
    *([], [1], ["a"], ["a", "a"], [None], [[]], [{}], [True], [{"$ref": "#"}], ["string", "null"]),
    *({}, {"a": 1}, {"a": {}}, {"a": True}, {"a": None}, {"a": []}, {"a": ["b"]}),
    *({"a": {"$ref": "#"}}, {"type": "string"}, {"type": {}}, {"required": [{}]}, {"a": {"b": {}}}),
]
# Annotations may have any value: they are ignored. Neither do names of nobody's have a type.
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
) | {"$comment", "$vocabulary", "contentMediaType", "contentEncoding"}
# What earlier drafts have is not enforced, but not malformed either.
EARLIER: dict[str, tuple[type, ...]] = {
    "required": (bool,),
    "exclusiveMinimum": (bool,),
    "exclusiveMaximum": (bool,),
    "items": (list,),
    "dependencies": (dict,),
    "type": (list, str),
}
# Lists that must not be empty, or repeat nothing: these are not enforced.
UNFIT = ("minItems", "uniqueItems", "pattern", "format")


def tool(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}


def chat(**fields: Any) -> Body:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **fields}


def completion(**fields: Any) -> Body:
    return "/v1/completions", {"prompt": "a", **fields}


def generate(**params: Any) -> Body:
    return "/generate", {"text": "a", "sampling_params": params}


def formatted(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **fields}}


def tagged(schema: Any) -> dict[str, Any]:
    inner = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": inner, "end": "</a>"}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [tag, inner]}}


def triggered(schema: Any) -> dict[str, Any]:
    structures = [{"begin": "<a>", "schema": schema, "end": "</a>"}]
    return {"type": "structural_tag", "structures": structures, "triggers": ["<a>"]}


JSON_OBJECT = {"response_format": {"type": "json_object"}}
PLACES: dict[str, Callable[[Any], Body]] = {
    "a tool": lambda schema: chat(tools=[tool(schema)]),
    "a strict tool": lambda schema: chat(tools=[tool(schema, strict=True)]),
    "a tool that is not strict": lambda schema: chat(tools=[tool(schema, strict=False)]),
    "a tool and a format": lambda schema: chat(tools=[tool(schema)], **JSON_OBJECT),
    "a strict tool and a format": lambda schema: chat(
        tools=[tool(schema, strict=True)], **JSON_OBJECT
    ),
    "a loose tool and a format": lambda schema: chat(
        tools=[tool(schema, strict=False)], **JSON_OBJECT
    ),
    "a tool beside a strict one": lambda schema: chat(
        tools=[tool(schema), {"function": {"name": "g", "strict": True}}]
    ),
    "a tool that is not called": lambda schema: chat(tools=[tool(schema)], tool_choice="none"),
    "a required tool": lambda schema: chat(tools=[tool(schema)], tool_choice="required"),
    "a required loose tool": lambda schema: chat(
        tools=[tool(schema, strict=False)], tool_choice="required"
    ),
    "a named tool": lambda schema: chat(
        tools=[tool(schema)], tool_choice={"type": "function", "function": {"name": "f"}}
    ),
    "a tool of a prompt": lambda schema: (
        "/tokenize",
        {"messages": [{"role": "user", "content": "a"}], "tools": [tool(schema)]},
    ),
    "a format": lambda schema: chat(response_format=formatted(schema)),
    "a loose format": lambda schema: chat(response_format=formatted(schema, strict=False)),
    "a format of completions": lambda schema: completion(response_format=formatted(schema)),
    "a format's own schema": lambda schema: chat(
        response_format={"type": "json_object", "schema": schema}
    ),
    "a structural tag": lambda schema: chat(response_format=tagged(schema)),
    "structures": lambda schema: completion(response_format=triggered(schema)),
    "json_schema": lambda schema: completion(json_schema=schema),
    "json_schema as text": lambda schema: chat(json_schema=json.dumps(schema)),
    "guided_json": lambda schema: completion(guided_json=schema),
    "structured outputs": lambda schema: chat(structured_outputs={"json": schema}),
    "structured outputs' tag": lambda schema: completion(
        structured_outputs={"structural_tag": json.dumps(tagged(schema))}
    ),
    "/generate": lambda schema: generate(json_schema=schema),
    "/generate as text": lambda schema: generate(json_schema=json.dumps(schema)),
    "/generate's tag": lambda schema: generate(structural_tag=tagged(schema)),
    "/invocations": lambda schema: ("/invocations", chat(response_format=formatted(schema))[1]),
}
PARSERS = ("hermes", "qwen3_coder", "pythonic")


class Service:
    """A proxy on a node that answers anything, and what the node was asked for."""

    def __init__(self, stack: ExitStack, path: Path, parser: str) -> None:
        cluster = Cluster(stack, write_model(path, QWEN))
        self.node: FakeNode = cluster.node(
            "unified", lambda prompt, index: [EOS], context_length=4000, pages={"total": 4000}
        )
        self.client: httpx.Client = cluster.client(tool_call_parser=parser)
        self._seen: set[str] = set()

    def post(self, place: str, schema: Any) -> httpx.Response:
        path, body = PLACES[place](schema)
        return self.client.post(path, json=body)

    def new_grammars(self) -> Iterator[tuple[str, str]]:
        """The grammars that the node got since the last call, each once."""
        for request in self.node.generates:
            grammar = request.params.grammar
            if grammar is not None and grammar.text not in self._seen:
                self._seen.add(grammar.text)
                yield grammar.kind, grammar.text
        self.node.generates.clear()


@pytest.fixture(scope="module", params=PARSERS)
def service(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Service]:
    with ExitStack() as stack:
        yield Service(stack, tmp_path_factory.mktemp("model") / "tools", request.param)


@functools.cache
def compiler() -> Compiler:
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    return Compiler(xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256]))


def is_malformed(keyword: str, value: Any) -> bool:
    """By the schema of JSON schemas."""
    if keyword in ANNOTATIONS or isinstance(value, EARLIER.get(keyword, ())):
        return False
    schema = {keyword: value}
    errors = jsonschema.Draft202012Validator(
        jsonschema.Draft202012Validator.META_SCHEMA
    ).iter_errors(schema)
    return any(
        error.validator not in UNFIT and not ANNOTATIONS & {*map(str, error.absolute_path)}
        for error in errors
    )


def nested(schema: dict[str, Any], rng: random.Random) -> Any:
    """The schema itself as parameters, or inside others."""
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    wrapped = [
        whole,
        {"type": "object", "properties": {"b": {"type": "array", "items": schema}}},
        {"type": "object", "properties": {"b": {"anyOf": [{"type": "null"}, schema]}}},
        {"type": "object", "properties": {"b": {"$ref": "#/$defs/c"}}, "$defs": {"c": schema}},
        {"type": "object", "additionalProperties": schema},
    ]
    top = {"type": "object", **schema}
    return rng.choice([top, top, *wrapped])


def attack(service: Service, cases: list[tuple[str, Any, str]], rng: random.Random) -> None:
    for keyword, value, place in cases:
        schema = nested({keyword: value}, rng)
        answer = service.post(place, schema)
        said = f"{schema} in {place}: {answer.status_code} {answer.text[:500]}"
        assert answer.status_code in (200, 400), said
        # Some clients write tools' parameters that have none like this.
        is_absent = "tool" in place and schema.get("properties", ...) is None
        if is_malformed(keyword, value) and not is_absent:
            assert answer.status_code == 400, said
        if answer.status_code == 400:
            assert answer.json()["error"]["message"], said
    for kind, text in service.new_grammars():
        try:
            compiler().compile_text(kind, text)
        except ValueError as error:
            assert str(error), text


ALL = [(keyword, value) for keyword in KEYWORDS for value in VALUES]


def test_every_keyword_with_every_type_is_served_or_a_400(service: Service) -> None:
    """A sample: every place, every keyword and every value."""
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    places, values = list(PLACES) * 12, VALUES * 10
    rng.shuffle(places)
    rng.shuffle(values)
    keywords = KEYWORDS * 4
    attack(service, list(zip(keywords, values, places, strict=False)), rng)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_many_keywords_with_every_type_in_every_place(service: Service, place: str) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    count = int(os.environ.get("PD_TEST_SCHEMAS", "600"))
    attack(service, [(*each, place) for each in rng.sample(ALL, min(count, len(ALL)))], rng)


@pytest.mark.parametrize("place", PLACES)
def test_required_names_that_are_objects_are_a_400(service: Service, place: str) -> None:
    for wrong in ([{"$ref": "#"}], [None], "a", None):
        schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": wrong}
        for each in (schema, {"type": "object", "properties": {"b": schema}}):
            answer = service.post(place, each)
            assert answer.status_code == 400, answer.text
            assert "JSON schema: 'required' must be a list of strings" in answer.text


def test_a_schema_nested_too_deeply_is_a_400(service: Service) -> None:
    deep: Any = {"type": "object"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    for place in PLACES:
        answer = service.post(place, deep)
        assert answer.status_code in (200, 400), (place, answer.text)
