"""Tool calls of ``/v1/chat/completions``: OpenAI's client, and nodes that answer from a script."""

from __future__ import annotations

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from fake_node import EOS
from tool_models import MISTRAL, PLAIN, QWEN, tokenizer, write_model

from pd.core.errors import InvalidRequestError
from pd.core.grammar import MAX_GRAMMAR_BYTES
from pd.grammar.compiler import format_field
from pd.structured.schema_walk import walk_tag_schemas

if TYPE_CHECKING:
    from pathlib import Path

    from fake_node import FakeNode
    from proxy_cluster import Cluster

ASKED: Any = [{"role": "user", "content": "the weather in Paris and Rome?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ADDED = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 7}}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
BOTH = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
TOKENS = tokenizer()
MORE_FAMILIES = (
    "deepseek_v3",
    "deepseek_v31",
    "functiongemma",
    "gemma4",
    "glm45",
    "glm47",
    "kimi_k2",
    "openai",
    "phi4_mini_json",
)


class Scripted:
    """A node that says the next of its texts, and a client of a proxy on it."""

    def __init__(self, cluster: Cluster, path: Path, template: str = QWEN, **options: Any) -> None:
        self.texts: list[str] = []
        self.node: FakeNode = cluster.node(
            "unified",
            self._answer,
            context_length=4000,
            pages={"total": 2000, "free": 2000},
        )
        self.proxy = cluster.proxy(tokenizer=write_model(path / "tools", template), **options)
        self.client = openai.OpenAI(base_url=f"{self.proxy.url}/v1", api_key="none", max_retries=0)

    def ask(self, *texts: str, **options: Any) -> Any:
        self.texts += texts
        asked: dict[str, Any] = {"model": "fake", "messages": ASKED, "tools": [WEATHER, CLOCK]}
        return self.client.chat.completions.create(**asked | options)

    def refused(self, **options: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            self.ask(**options)
        return str(caught.value)

    def prompt(self, count: int = 1) -> str:
        ids = np.frombuffer(self.node.wait_generate(count).token_ids, "<i4").tolist()
        return str(TOKENS.decode(ids, skip_special_tokens=False))

    def structural_tag(self, count: int = 1) -> dict[str, Any]:
        grammar = self.node.wait_generate(count).params.grammar
        assert grammar is not None
        assert grammar.kind == "structural_tag"
        return dict(json.loads(grammar.text)["format"])

    def _answer(self, prompt: list[int], index: int) -> list[int]:
        return [*TOKENS.encode(self.texts.pop(0), add_special_tokens=False).ids, EOS]


@pytest.fixture
def model(cluster: Cluster, tmp_path: Path) -> Scripted:
    return Scripted(cluster, tmp_path)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


CITIES = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]


def test_parallel_calls(model: Scripted) -> None:
    (choice,) = model.ask(BOTH).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    assert calls_of(choice.message) == CITIES
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert {call.type for call in choice.message.tool_calls} == {"function"}
    assert json.dumps(WEATHER["function"]["parameters"]) in model.prompt()
    assert model.node.wait_generate().params.grammar is None


def test_what_is_beside_calls(model: Scripted) -> None:
    """A named function leaves the model no text to write, and clients expect one that is empty."""
    call = BOTH[BOTH.index("<tool_call>") : BOTH.index("</tool_call>") + len("</tool_call>")]
    assert model.ask(call).choices[0].message.content is None
    named = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = model.ask(call, tool_choice=named).choices
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    assert calls_of(choice.message) == CITIES[:1]


def test_streams_have_the_name_first_and_then_arguments(model: Scripted) -> None:
    chunks = [chunk.choices[0] for chunk in model.ask(BOTH, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in chunks) == "I look.\n"
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    parts = [part for c in chunks for part in c.delta.tool_calls or []]
    for index in (0, 1):
        first, *rest = [part for part in parts if part.index == index]
        assert (first.type, first.function.name, first.function.arguments) == (
            "function",
            "get_weather",
            "",
        )
        assert first.id
        assert all(p.id is None and p.function.name is None for p in rest)
        arguments = "".join(p.function.arguments for p in rest)
        assert json.loads(arguments) == CITIES[index][1]
    assert [p.index for p in parts] == sorted(p.index for p in parts)


def test_the_clients_own_accumulation_of_a_stream(model: Scripted) -> None:
    model.texts.append(BOTH)
    with model.client.chat.completions.stream(
        model="fake", messages=ASKED, tools=[WEATHER, CLOCK]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert calls_of(message) == CITIES
    assert message.content == "I look.\n"


def test_every_choice_has_a_parser_of_its_own(model: Scripted) -> None:
    answer = model.ask(BOTH, "no calls", n=2)
    assert sorted(len(c.message.tool_calls or []) for c in answer.choices) == [0, 2]
    assert {c.finish_reason for c in answer.choices} == {"tool_calls", "stop"}
    seen: dict[int, int] = {0: 0, 1: 0}
    for chunk in model.ask(BOTH, BOTH, n=2, stream=True):
        for choice in chunk.choices:
            seen[choice.index] += sum(bool(c.id) for c in choice.delta.tool_calls or [])
    assert seen == {0: 2, 1: 2}


def test_results_go_back_through_the_template(model: Scripted) -> None:
    first = model.ask(BOTH).choices[0].message
    messages = [*ASKED, first.model_dump(exclude_none=True)]
    for call, text in zip(first.tool_calls, ("sunny", "rainy"), strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    last = model.ask("Sunny and rainy.", messages=messages).choices[0]
    assert last.message.content == "Sunny and rainy."
    assert last.finish_reason == "stop"
    assert last.message.tool_calls is None
    prompt = model.prompt(2)
    # Templates get the arguments as an object, over which they may loop.
    assert '"arguments": {"city": "Paris"}}\n</tool_call>[city]' in prompt
    assert f"tool {first.tool_calls[1].id}rainy<|im_end|>" in prompt


def test_arguments_that_are_no_object_go_back_as_an_empty_one(model: Scripted) -> None:
    """A client that sends back a call which was cut off can go on with its chat."""
    whole = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    texts = ['{"city": "Par', "[1]", "Paris", "", " ", '"{}"', "[" * 5000]
    for number, text in enumerate(texts, 1):
        broken = {"function": {"name": "g", "arguments": text}}
        turn = {"role": "assistant", "tool_calls": [whole, broken]}
        model.ask("Sorry.", messages=[*ASKED, turn, *ASKED])
        assert '{"name": "f", "arguments": {"a": 1}}' in model.prompt(number)
        assert '{"name": "g", "arguments": {}}' in model.prompt(number), text


def test_an_answer_that_is_cut_off_ends_with_length(model: Scripted) -> None:
    for limit in range(1, len(TOKENS.encode(BOTH).ids)):
        choice = model.ask(BOTH, max_tokens=limit).choices[0]
        assert choice.finish_reason == "length"
        # A call that only begins is content, whether it is the first one or not.
        first, second = "I look.\n", BOTH[BOTH.rindex("<tool_call>") :]
        content = choice.message.content
        if choice.message.tool_calls:
            assert (first + second).startswith(content)
        else:
            assert BOTH.startswith(content)


def test_stop_strings_end_calls_too(model: Scripted) -> None:
    choice = model.ask(BOTH, stop=["</tool_call>"]).choices[0]
    assert calls_of(choice.message) == CITIES[:1]
    assert choice.finish_reason == "tool_calls"


HALF_CALLS = [
    ("hermes", BOTH.removeprefix("I look.\n")),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}'),
    ("pythonic", '[get_weather(city="Paris")]'),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]'),
]


@pytest.mark.parametrize(("parser", "text"), HALF_CALLS)
def test_an_answer_that_ends_inside_a_call_did_not_end_by_it(
    cluster: Cluster, tmp_path: Path, parser: str, text: str
) -> None:
    """Whatever ends it, streamed or not. Arguments that are cut off are no JSON, so that no client
    takes them for a call."""
    model = Scripted(cluster, tmp_path, tool_call_parser=parser)
    tokens = len(TOKENS.encode(text[: text.index("ris")]).ids)
    ends: list[tuple[dict[str, Any], str]] = [
        ({"stop": ["ris"]}, "stop"),
        ({"stop": "ris", "extra_body": {"include_stop_str_in_output": True}}, "stop"),
        ({"max_tokens": tokens}, "length"),
    ]
    for asked, reason in ends:
        for choice in ("required", "auto", named("get_weather")):
            extra = NO_THINKING | asked.get("extra_body", {})
            options = asked | {"tool_choice": choice, "extra_body": extra}
            if parser == "hermes" and choice != "auto":
                options["tools"] = [WEATHER]
            whole = model.ask(text, **options).choices[0]
            assert whole.finish_reason == reason, (asked, choice)
            (call,) = whole.message.tool_calls
            arguments = call.function.arguments
            assert arguments.startswith('{"city": "Pa')
            with pytest.raises(ValueError, match="Unterminated string"):
                json.loads(arguments)
            chunks = [c.choices[0] for c in model.ask(text, stream=True, **options)]
            assert chunks[-1].finish_reason == reason
            parts = [part for c in chunks for part in c.delta.tool_calls or []]
            assert "".join(part.function.arguments for part in parts) == arguments


def test_a_stop_string_between_calls_leaves_whole_ones(model: Scripted) -> None:
    for stop, count in (("Rome", 2), ("</tool_call>\n<", 1), ("ather", 0)):
        choice = model.ask(BOTH, stop=[stop], tool_choice="required").choices[0]
        assert len(choice.message.tool_calls or []) == count
        assert choice.finish_reason == ("tool_calls" if count == 1 else "stop")


def test_usage_and_logprobs_are_of_all_tokens(model: Scripted) -> None:
    answer = model.ask(BOTH, logprobs=True, extra_body={"return_token_ids": True})
    tokens = [*TOKENS.encode(BOTH).ids, EOS]
    assert answer.usage.completion_tokens == len(tokens)
    assert len(answer.choices[0].logprobs.content) == len(tokens)
    assert answer.choices[0].token_ids == tokens


def test_none_leaves_calls_in_the_text(model: Scripted) -> None:
    choice = model.ask(BOTH, tool_choice="none").choices[0]
    assert choice.message.content == BOTH
    assert choice.finish_reason == "stop"
    assert "get_weather" in model.prompt()
    assert model.ask("hi", tools=[]).choices[0].message.content == "hi"
    assert "get_weather" not in model.prompt(2)


def test_one_call_at_most(model: Scripted) -> None:
    message = model.ask(BOTH, parallel_tool_calls=False).choices[0].message
    assert calls_of(message) == CITIES[:1]


# ---- what the nodes are told


def test_required_calls_are_constrained(model: Scripted) -> None:
    answer = model.ask(BOTH[len("I look.\n") :], tool_choice="required").choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    # The template may have the model reason first.
    reasoning, calls = model.structural_tag()["elements"]
    assert reasoning["type"] == "optional"
    assert calls["at_least_one"]
    assert not calls["stop_after_first"]
    first, second = calls["tags"]
    assert first["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": '
    assert first["content"]["json_schema"] == WEATHER["function"]["parameters"]
    assert second["content"]["json_schema"]["additionalProperties"] is False
    model.ask(BOTH, tool_choice="required", parallel_tool_calls=False)
    assert model.structural_tag(2)["elements"][1]["stop_after_first"]


def test_a_named_function_is_the_only_one(model: Scripted) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = model.ask(BOTH, tool_choice=named, extra_body=NO_THINKING).choices[0]
    assert calls_of(answer.message) == CITIES[:1]
    assert answer.finish_reason == "stop"  # as OpenAI has it
    calls = model.structural_tag()
    assert [tag["begin"].count("get_weather") for tag in calls["tags"]] == [1]
    assert calls["stop_after_first"]


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def strict(tool: Any, value: bool = True) -> Any:
    return tool | {"function": tool["function"] | {"strict": value}}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"tools": [CLOCK, strict(WEATHER)]}, "tools[1].function.parameters"),
        ({"tools": [strict(CLOCK), strict(WEATHER)]}, "tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            "tools[0].function.parameters",
        ),
    ],
)
def test_parameters_that_do_not_compile_are_named(model: Scripted, asked: Any, named: str) -> None:
    """A node knows only the structural tag that the proxy has made of them."""
    node, tag = model.node, "structural_tag"
    node.auto = False
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(model.ask, **asked)
        request = node.wait_generate()
        node.fail(request, InvalidRequestError.kind, f"{tag}: it is too large", tag)
        with pytest.raises(openai.BadRequestError, match=re.escape(f"{named}: it is")) as refused:
            answer.result(20)
    assert refused.value.param == named


@pytest.mark.parametrize(
    ("parser", "template"),
    [(name, QWEN) for name in ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral")]
    + [("auto", MISTRAL)]
    + [pytest.param(name, QWEN, marks=pytest.mark.full) for name in MORE_FAMILIES],
)
def test_the_schema_that_does_not_compile_is_named(
    cluster: Cluster, tmp_path: Path, parser: str, template: str
) -> None:
    """By its place in the tag, wherever a family's tags have it."""
    model = Scripted(cluster, tmp_path, template, tool_call_parser=parser)
    model.node.auto = False
    schema = {"name": "x", "schema": {"type": "boolean"}}
    adder: Any = {"type": "function", "function": {"name": "add", "parameters": ADDED}}
    tools = {"tools": [strict(CLOCK), strict(adder)]}
    formatted = tools | {"response_format": {"type": "json_schema", "json_schema": schema}}
    added = "tools[1].function.parameters"
    cases: list[tuple[Any, str, str]] = [
        (tools, "minimum", added),
        (tools | {"tool_choice": "required"}, "minimum", added),
        (formatted, "minimum", added),
        (formatted, "boolean", "response_format"),
    ]
    with ThreadPoolExecutor(1) as pool:
        for count, (asked, mark, named) in enumerate(cases, 1):
            answer = pool.submit(model.ask, **asked)
            request = model.node.wait_generate(count)
            grammar = request.params.grammar
            assert grammar is not None
            place = place_of(json.loads(grammar.text), mark)
            model.node.fail(request, InvalidRequestError.kind, f"{place}: it is wrong", place)
            with pytest.raises(openai.BadRequestError, match=re.escape(f"{named}: it")) as refused:
                answer.result(20)
            assert refused.value.param == named


def place_of(structural_tag: Any, mark: str) -> str:
    """As a node names the schema in, or behind, which this text stands."""
    steps = next(
        (*place.all_steps, "json_schema")
        for place, part in walk_tag_schemas(structural_tag)
        if mark in json.dumps(part)
    )
    return format_field("structural_tag", steps)


def test_a_function_that_is_too_large_is_named(model: Scripted) -> None:
    large = copy.deepcopy(WEATHER)
    large["function"]["parameters"]["description"] = "x" * MAX_GRAMMAR_BYTES
    with pytest.raises(openai.BadRequestError) as refused:
        model.ask(tools=[strict(CLOCK), strict(large)])
    assert refused.value.param == "tools[1].function.parameters"
    # None alone is too large.
    large["function"]["parameters"]["description"] = "x" * (MAX_GRAMMAR_BYTES // 2)
    other = copy.deepcopy(large)
    other["function"]["name"] = "other"
    with pytest.raises(openai.BadRequestError) as refused:
        model.ask(tools=[strict(other), strict(large)])
    assert refused.value.param == "tools"


@pytest.mark.parametrize("missing", [{}, {"type": None}])
def test_the_type_of_a_tool_may_be_left_out(model: Scripted, missing: dict[str, Any]) -> None:
    """The template sees it all the same."""
    weather = {"function": WEATHER["function"]} | missing
    choice = {"function": {"name": "get_weather"}} | missing
    answer = model.ask(BOTH, tools=[weather], tool_choice=choice)
    assert calls_of(answer.choices[0].message) == CITIES[:1]
    assert json.dumps(WEATHER) in model.prompt()


def test_properties_that_are_null_are_none(model: Scripted) -> None:
    tool = with_schema(type="object", properties=None, additionalProperties=False)
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer = model.ask(text, tools=[tool], tool_choice="required", extra_body=NO_THINKING)
    assert calls_of(answer.choices[0].message) == [("f", {})]
    shown = with_schema(type="object", additionalProperties=False)
    assert json.dumps(shown) in model.prompt()
    schema = model.structural_tag()["tags"][0]["content"]["json_schema"]
    assert schema.get("properties", {}) == {}


def test_strict_functions_are_constrained_where_the_model_chooses(model: Scripted) -> None:
    model.ask(BOTH, tools=[strict(WEATHER), CLOCK], extra_body=NO_THINKING)
    found = model.structural_tag()
    assert found["type"] == "dispatch"
    ((trigger, tags),) = found["rules"]
    assert trigger == "<tool_call>"
    mine, other = (tag["content"]["json_schema"] for tag in tags["elements"])
    assert mine == WEATHER["function"]["parameters"]
    assert other["additionalProperties"] is True


def test_a_response_format_leaves_a_choice_between_calls_and_it(model: Scripted) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = model.ask('{"a": 1}', response_format=response_format, extra_body=NO_THINKING)
    assert answer.choices[0].message.content == '{"a": 1}'
    calls, instance = model.structural_tag()["elements"]
    assert calls["type"] == "tags_with_separator"
    assert instance["json_schema"] == schema

    content = {"type": "any_text", "excludes": ["<n>"]}
    tagged = {"type": "structural_tag", "format": content}
    model.ask("free", response_format=tagged, extra_body=NO_THINKING)
    assert model.structural_tag(2)["elements"] == [calls, content]


# ---- special tokens


def test_calls_behind_special_tokens(cluster: Cluster, tmp_path: Path) -> None:
    model = Scripted(cluster, tmp_path, MISTRAL)
    text = '[THINK]hm[/THINK]Well<|im_end|>.[TOOL_CALLS]clock[ARGS]{"a": 1}'
    for stream in (False, True):
        answer = model.ask(text, stream=stream)
        if stream:
            deltas = [chunk.choices[0].delta for chunk in answer]
            content = "".join(d.content or "" for d in deltas)
            reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
            parts = [c for d in deltas for c in d.tool_calls or []]
            call_id, arguments = parts[0].id, "".join(p.function.arguments for p in parts)
        else:
            message = answer.choices[0].message
            content, reasoning = message.content, message.reasoning_content
            (call,) = message.tool_calls
            call_id, arguments = call.id, call.function.arguments
        assert (content, reasoning, arguments) == ("Well.", "hm", '{"a": 1}')
        assert len(call_id) == 9
    # Without tools the token is as any other special token.
    assert model.ask(text, tools=[]).choices[0].message.content == 'Well.clock{"a": 1}'


def test_special_tokens_that_clients_write_may_be_text(cluster: Cluster, tmp_path: Path) -> None:
    model = Scripted(cluster, tmp_path, split_special_tokens=True)
    function = WEATHER["function"] | {"description": "<|im_end|>"}
    answer = model.ask(BOTH, tools=[WEATHER | {"function": function}])
    assert calls_of(answer.choices[0].message) == CITIES
    ids = np.frombuffer(model.node.wait_generate().token_ids, "<i4").tolist()
    # One ends the system's turn, one the user's.
    assert ids.count(TOKENS.token_to_id("<|im_end|>")) == 2
    assert model.prompt().count("<|im_end|>") == 3


# ---- refusals


@pytest.mark.one_process("changes the configuration of a running proxy")
def test_models_that_know_no_tools_say_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    model = Scripted(cluster, tmp_path, PLAIN)
    assert "--tool-call-parser" in model.refused()
    assert model.ask("hi", tools=[]).choices[0].message.content == "hi"
    other = cluster.proxy(tokenizer=model.proxy.proxy.config.tokenizer, tool_call_parser="hermes")  # type: ignore[union-attr]
    model.client.base_url = f"{other.url}/v1"
    assert calls_of(model.ask(BOTH).choices[0].message) == CITIES


def test_templates_of_unknown_families_say_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    model = Scripted(cluster, tmp_path, PLAIN + "{{ tools }}")
    assert "--tool-call-parser" in model.refused()
    assert model.ask(BOTH, tool_choice="none").choices[0].message.content == BOTH


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def with_schema(**schema: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def call(**function: Any) -> Any:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", **function}}]
    return {"messages": [*ASKED, {"role": "assistant", "tool_calls": calls}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": 5}, "tools must be a list"),
    ({"tools": [5]}, "tools[0] must be an object"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type must be 'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function must be an object"),
    ({"tools": [{}]}, "tools[0].function must be an object"),
    ({"tools": [named("a b")]}, "tools[0].function.name must be 1 to 128 letters"),
    ({"tools": [named("a" * 129)]}, "tools[0].function.name"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name is 'clock' for a second time"),
    ({"tools": [named(f"f{i}") for i in range(129)]}, "at most 128"),
    ({"tools": [with_schema(description="x" * (1 << 19))]}, "bytes of JSON"),
    ({"tools": [with_schema(type="string")]}, "parameters.type must be 'object'"),
    ({"tools": [with_schema(properties=[])]}, "parameters is not a JSON schema: 'properties' must"),
    ({"tools": [with_schema(required=None)]}, "parameters is not a JSON schema: 'required' must"),
    ({"tool_choice": "maybe"}, "tool_choice must be 'none'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice must be"),
    ({"tool_choice": {}}, "tool_choice must be"),
    ({"tool_choice": named("f") | {"type": "tool"}}, "tool_choice must be"),
    ({"tool_choice": named("zzz")}, "'zzz'"),
    ({"tool_choice": "required", "tools": []}, "tool_choice needs a function to call"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls must be a boolean"),
    ({"tools": [with_schema(**{"not": {}})], "tool_choice": "required"}, "'not'"),
    ({"tools": [strict(with_schema(**{"not": {}}))]}, "tools[0].function.parameters: the keyword"),
    (call(arguments=[1]), "messages[1].tool_calls[0].function.arguments must be an object or a"),
    (call(arguments=5), "messages[1].tool_calls[0].function.arguments must be an object or a"),
    (call(name=5, arguments="{}"), "messages[1].tool_calls[0].function.name"),
    (call(arguments=" " * (1 << 21)), "characters of arguments"),
    ({"messages": [*ASKED, {"role": "assistant", "tool_calls": {}}]}, "a list of calls"),
    ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [7]}]}, "tool_calls[0] must be"),
    ({"messages": [*ASKED, {"role": "tool", "tool_call_id": 5, "content": ""}]}, "tool_call_id"),
]


def test_refusals(model: Scripted) -> None:
    for options, part in REFUSED:
        assert part in model.refused(**options), options


def test_keywords_that_are_not_enforced_are_read_over_if_asked(model: Scripted) -> None:
    tools = [strict(with_schema(**{"not": {}}), False)]
    model.ask(BOTH, tools=tools, tool_choice="required", extra_body=NO_THINKING)
    assert model.structural_tag()["tags"][0]["content"]["json_schema"] == {"type": "object"}


@pytest.mark.parametrize("enum", [5, "ab", {"a": 1}])
def test_parameters_with_an_enum_that_is_no_list_are_refused(model: Scripted, enum: Any) -> None:
    tool = with_schema(properties={"a": {"type": "string", "enum": enum}}, required=["a"])
    for options in ({}, {"tool_choice": "required"}):
        for each in (tool, strict(tool), strict(tool, False)):
            refused = model.refused(tools=[each], **options)
            assert "parameters is not a JSON schema: 'enum' must be a list" in refused
            assert "(at properties/a)" in refused


def test_parameters_with_an_empty_enum_are_refused_or_read_over(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = Scripted(cluster, tmp_path, tool_call_parser="qwen3_coder")
    tool = with_schema(properties={"a": {"type": "string", "enum": []}}, required=["a"])
    refused = model.refused(tools=[strict(tool)], tool_choice="required")
    assert "tools[0].function.parameters: an empty 'enum'" in refused
    text = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    asked = {"tools": [strict(tool, False)], "tool_choice": "required"}
    (choice,) = model.ask(text, extra_body=NO_THINKING, **asked).choices
    assert calls_of(choice.message) == [("f", {"a": "x"})]


def test_patterns_that_would_be_misread_are_left_out_of_calls_alone(model: Scripted) -> None:
    city = {"type": "string", "pattern": "^(?!a)"}
    tools = [strict(with_schema(properties={"city": city}), False)]
    model.ask(BOTH, tools=tools, tool_choice="required", extra_body=NO_THINKING)
    written = model.structural_tag()["tags"][0]["content"]["json_schema"]
    assert written["properties"]["city"] == {"type": "string"}
    assert "^(?!a)" in model.prompt()


def test_tokenize_shows_tools(cluster: Cluster, model: Scripted) -> None:
    model.ask("hi")
    body = {"messages": ASKED, "tools": [WEATHER, CLOCK]}
    tokens = cluster.client(model.proxy).post("/tokenize", json=body).json()["tokens"]
    assert np.frombuffer(model.node.wait_generate().token_ids, "<i4").tolist() == tokens


# gpt-oss's way of the prompt, without what it says of calls.
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start|>{{ m.role }}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant"
    "{% endif %}{# <|channel|>analysis<|message|> <|channel|>commentary #}"
)


def test_channels_are_reasoning_content_and_calls(cluster: Cluster, tmp_path: Path) -> None:
    model = Scripted(cluster, tmp_path, HARMONY)
    thought = "<|channel|>analysis<|message|>I look.<|end|>"
    call = '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Paris"}'
    final = "<|channel|>final<|message|>Sunny."
    texts = [f"{thought}<|start|>assistant{rest}" for rest in (call, final, final, final)]
    answer = model.ask(texts[0])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "I look."
    assert choice.message.content is None
    assert calls_of(choice.message) == CITIES[:1]
    # The header of the message does not count.
    counted = len(TOKENS.encode("I look.<|end|>", add_special_tokens=False).ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == counted
    (choice,) = model.ask(texts[1], tool_choice="none").choices
    assert (choice.message.reasoning_content, choice.message.content) == ("I look.", "Sunny.")
    chunks = [chunk.choices[0].delta for chunk in model.ask(texts[2], stream=True)]
    assert "".join(each.content or "" for each in chunks) == "Sunny."
    hidden = model.ask(texts[3], extra_body={"separate_reasoning": False})
    assert hidden.choices[0].message.content == f"{thought}Sunny."
    model.ask(texts[0], tool_choice="required")
    assert "to=functions.clock <|constrain|>json" in json.dumps(model.structural_tag(5))


# Gemma 4's way of the prompt, without its declarations of functions.
GEMMA = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|turn>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ '<|tool_call>call:' }}"
    "{{ call.function.name }}{{ '{' }}{% for key, value in call.function.arguments | dictsort %}"
    "{{ key }}:<|\"|>{{ value }}<|\"|>{% endfor %}{{ '}<tool_call|>' }}{% endfor %}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking | default(false) %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}"
    "{% endif %}"
)


def test_gemmas_thoughts_and_calls_are_found_by_its_special_tokens(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = Scripted(cluster, tmp_path, GEMMA)
    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    call = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
    text = f"<|channel>thought\nI look.\n<channel|>Well.{call}"
    (choice,) = model.ask(text, **thinking).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "I look.\n"
    assert choice.message.content == "Well."
    assert calls_of(choice.message) == CITIES[:1]
    deltas = [chunk.choices[0].delta for chunk in model.ask(text, stream=True, **thinking)]
    parts = [part.function.arguments for each in deltas for part in each.tool_calls or []]
    assert json.loads("".join(parts)) == {"city": "Paris"}
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == "I look.\n"
    # Without thoughts the answer begins after them.
    (choice,) = model.ask("Sunny.").choices
    assert (choice.message.reasoning_content, choice.message.content) == (None, "Sunny.")
    model.ask(call, tool_choice="required", **thinking)
    tag = model.structural_tag(4)
    assert tag["elements"][0]["content"]["elements"][0]["begin"] == "<|channel>thought"
    assert "call:get_weather" in json.dumps(tag)
    history = [
        {"role": "user", "content": "Paris?"},
        choice.message.model_dump(exclude_none=True)
        | {
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "Sunny."},
    ]
    model.ask("Sunny.", messages=history)
    assert call in model.prompt(5)
