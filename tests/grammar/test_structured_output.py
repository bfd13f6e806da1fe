"""Structured output of real nodes, for OpenAI's client and native requests."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pytest
from cluster import Cluster
from grammar_nodes import share_grammars
from pydantic import BaseModel, Field

from pd.embedded import EMBEDDED_MODEL
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator

ASKED = [{"role": "user", "content": "Tell me of a city."}]


class City(BaseModel):
    """The requested object."""

    name: str = Field(max_length=12)
    size: Literal["small", "large"]
    sisters: list[Annotated[int, Field(ge=0, le=999)]] = Field(max_length=2)
    mayor: str | None = Field(default=None, max_length=5)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with (
        share_grammars(EMBEDDED_MODEL, 2048, 2),
        Cluster(EMBEDDED_MODEL, kv_cache_tokens=16384) as cluster,
    ):
        urls = {"prefill": [cluster.prefill[0].url], "decode": [cluster.decode[0].url]}
        # The embedded model's template does not show it tools, but a grammar makes it call them.
        with ProxyThread(ProxyConfig(**urls, port=0, tool_call_parser="hermes")) as proxy:
            yield proxy.url
        cluster.wait_idle()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_parse_as_pydantic_models(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model="embedded",
        messages=ASKED,
        response_format=City,
        temperature=temperature,
        seed=4,
        n=2,
        max_tokens=100,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, City)


SEEDED_CITY: dict[str, Any] = {
    "model": "embedded",
    "messages": ASKED,
    "temperature": 1.0,
    "seed": 8,
    "max_tokens": 100,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": City.model_json_schema()},
    },
}


def test_streams_equal_whole_answers(client: openai.OpenAI) -> None:
    asked = SEEDED_CITY
    whole = client.chat.completions.create(**asked).choices[0].message.content
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices
    ]
    assert "".join(parts) == whole
    City.model_validate_json(whole or "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_inside_the_grammar(
    client: openai.OpenAI, stream: bool
) -> None:
    asked = SEEDED_CITY
    whole = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    answer = client.chat.completions.create(**asked, stop=stop, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        reason = choices[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == (whole[: whole.index(stop)], "stop")


def test_json_object_mode_writes_any_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="embedded",
        messages=ASKED,
        response_format={"type": "json_object"},
        temperature=0.0,
        max_tokens=300,
    ).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content or ""), dict)
    else:  # a model may write objects without end
        assert (answer.message.content or "").startswith("{")


NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
BETWEEN_TAGS: Any = {
    "type": "tag",
    "begin": "<n>",
    "content": {"type": "json_schema", "json_schema": NUMBER},
    "end": "</n>",
}
TRIGGERED: Any = {
    "type": "structural_tag",
    "structures": [{"begin": f" {letter}<n>", "schema": NUMBER, "end": "</n>"} for letter in "ab"],
    "triggers": [" "],
}


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_structural_tags_constrain_tagged_text(client: openai.OpenAI, path: str) -> None:
    """We take them in ``response_format``, as vLLM and SGLang do."""
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "model": "embedded"}
    body = {"response_format": {"type": "structural_tag", "format": BETWEEN_TAGS}}
    if path == "chat":
        answer = client.chat.completions.create(messages=ASKED, extra_body=body, **asked)
        text = answer.choices[0].message.content
    else:
        text = client.completions.create(prompt="a", extra_body=body, **asked).choices[0].text
    assert re.fullmatch(r"<n>[1-9][0-9]</n>", text or "")


def test_text_after_a_trigger_is_structured(client: openai.OpenAI) -> None:
    """The trigger is a space, so one of two tags with a number follows every space."""
    answer = client.chat.completions.create(
        model="embedded",
        messages=ASKED,
        extra_body={"response_format": TRIGGERED},
        temperature=1.0,
        seed=5,
        max_tokens=80,
    )
    text = answer.choices[0].message.content or ""
    assert 0 < text.count(" ") == len(re.findall(" [ab]<n>[1-9][0-9]</n>", text)), text


TOOLS: Any = [openai.pydantic_function_tool(City, name="show_city")]


@pytest.mark.parametrize("choice", ["required", pytest.param("named", marks=pytest.mark.full)])
def test_functions_are_called(client: openai.OpenAI, choice: str) -> None:
    named = {"type": "function", "function": {"name": "show_city"}}
    asked: dict[str, Any] = {
        "model": "embedded",
        "messages": ASKED,
        "tools": TOOLS,
        "tool_choice": named if choice == "named" else choice,
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": 8,
        "max_tokens": 120,
    }
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == ("stop" if choice == "named" else "tool_calls")
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    City.model_validate_json(call.function.arguments)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    parts = [part for c in chunks for part in c.choices[0].delta.tool_calls or []]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    # The result goes back to the model.
    messages: Any = [
        *ASKED,
        answer.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "It is shown."},
    ]
    # The embedded model's template shows no calls, and dropping one silently would mislead.
    with pytest.raises(openai.BadRequestError, match="does not show the calls"):
        client.chat.completions.create(model="embedded", messages=messages, tools=TOOLS)


def test_calls_parse_as_pydantic_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="embedded",
        messages=ASKED,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.0,
        seed=9,
        max_tokens=120,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, City)


def test_the_error_names_the_function_with_wrong_parameters(client: openai.OpenAI) -> None:
    """It is the only wrong one among others."""
    wrong: Any = {"type": "object", "properties": {"a": {"type": "strin"}}}
    tools: Any = [
        *TOOLS,
        {"type": "function", "function": {"name": "odd", "parameters": wrong, "strict": True}},
    ]
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError, match="strin") as refused:
            client.chat.completions.create(
                model="embedded", messages=ASKED, tools=tools, tool_choice=choice
            )
        assert refused.value.param == f"tools[{len(TOOLS)}].function.parameters"
    with pytest.raises(openai.BadRequestError, match="strin") as refused:
        client.chat.completions.create(
            model="embedded",
            messages=ASKED,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}},
        )
    assert refused.value.param == "response_format"


def generate(url: str, **sampling: Any) -> httpx.Response:
    params = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 4} | sampling
    body = {"text": "hello", "sampling_params": params}
    return httpx.post(f"{url}/generate", json=body, timeout=120)


def test_the_native_api_takes_grammars(url: str) -> None:
    assert re.fullmatch(
        "[a-c]{3}-[0-9]{2}", generate(url, regex="[a-c]{3}-[0-9]{2}").json()["text"]
    )
    assert generate(url, ebnf='root ::= "yes" | "no"').json()["text"] in ("yes", "no")
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
    for given in (schema, json.dumps(schema)):
        jsonschema.validate(json.loads(generate(url, json_schema=given).json()["text"]), schema)
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "hi"}}
    assert generate(url, structural_tag=tag).json()["text"] == "hi"


def test_a_finished_grammar_ends_before_min_tokens(url: str) -> None:
    for more in ({"min_new_tokens": 40}, {"ignore_eos": True}, {"logit_bias": {"2": -100}}):
        answer = generate(url, regex="ab", **more).json()
        assert answer["text"] == "ab"
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_grammar_is_a_400(url: str, stream: bool) -> None:
    body = {"text": "hello", "sampling_params": {"regex": "("}, "stream": stream}
    response = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "regex"
    assert "parenthesis" in error["message"]
