"""Anthropic's client works unchanged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import pytest
from fake_node import EOS
from proxy_tokenizers import byte_level
from tool_models import QWEN, tokenizer, write_model

from pd.proxy.requests.known_fields import COUNT_TOKENS, KNOWN, MESSAGES, OBEYED, FieldPlace

if TYPE_CHECKING:
    from pathlib import Path

    from proxy_cluster import Cluster

TEXT = "hello world, the quick brown fox 😀"
HELLO: Any = [{"role": "user", "content": "hello"}]
KEY = "key"


def speak(prompt: list[int], index: int) -> list[int]:
    return [*byte_level().encode(TEXT).ids, EOS]


@pytest.fixture
def client(cluster: Cluster) -> anthropic.Anthropic:
    cluster.pair(speak)
    return anthropic.Anthropic(base_url=cluster.proxy(api_key=KEY).url, api_key=KEY, max_retries=0)


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="fake", max_tokens=100, messages=HELLO)
    assert message.id.startswith("msg_")
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == TEXT
    assert message.stop_reason == "end_turn"
    usage = message.usage
    count = client.messages.count_tokens(model="fake", messages=HELLO)
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens
    assert usage.output_tokens == len(byte_level().encode(TEXT).ids) + 1


def test_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="fake", max_tokens=100, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == TEXT
        message = stream.get_final_message()
    assert message.content[0].text == TEXT
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(byte_level().encode(TEXT).ids) + 1


def test_events_come_in_order(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(model="fake", max_tokens=100, messages=HELLO, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}, "the client hides pings"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="fake", max_tokens=100, messages=HELLO, stop_sequences=["nothing", "quick"]
    )
    assert message.content[0].text == "hello world, the "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "quick")


def test_the_number_of_tokens_ends_an_answer(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="fake", max_tokens=3, messages=HELLO)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 3
    message = client.messages.create(model="fake", max_tokens=20_000, messages=HELLO)
    assert message.stop_reason == "end_turn", "the context limits it, not an error"


def test_errors_have_its_types(client: anthropic.Anthropic, cluster: Cluster) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        stranger.messages.create(model="fake", max_tokens=1, messages=HELLO)
    assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        client.messages.create(model="fake", max_tokens=1, messages=image)


def test_a_bearer_key_and_unknown_betas_pass(client: anthropic.Anthropic) -> None:
    bearer = anthropic.Anthropic(base_url=client.base_url, auth_token=KEY, max_retries=0)
    message = bearer.beta.messages.create(
        model="fake", max_tokens=100, messages=HELLO, betas=["some-beta-2030-01-01"]
    )
    assert message.content[0].text == TEXT


def test_its_key_is_for_its_paths_alone(client: anthropic.Anthropic) -> None:
    headers = {"x-api-key": KEY}
    body = {"model": "fake", "messages": HELLO}
    response = httpx.post(
        f"{str(client.base_url).rstrip('/')}/v1/chat/completions", json=body, headers=headers
    )
    assert response.status_code == 401


WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


THOUGHT, SAID = "Which city?", "I look."
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n {SAID}\n{CALL}"
ASKED: Any = [{"role": "user", "content": [{"type": "text", "text": "weather?"}]}]
SYSTEM: Any = [
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "Call tools."},
]
OPTIONS: Any = {"model": "fake", "max_tokens": 1000, "tools": [WEATHER], "system": SYSTEM}


@pytest.fixture
def prompts() -> list[str]:
    """The prompts that the model got."""
    return []


@pytest.fixture
def caller(cluster: Cluster, tmp_path: Path, prompts: list[str]) -> anthropic.Anthropic:
    """A client of a model that thinks, says something, and calls a tool."""
    model = tokenizer()

    def answer(prompt: list[int], index: int) -> list[int]:
        prompts.append(model.decode(prompt, skip_special_tokens=False))
        return [*model.encode(ANSWER, add_special_tokens=False).ids, EOS]

    cluster.pair(answer, context_length=4000, pages={"total": 2000, "free": 2000})
    url = cluster.proxy(tokenizer=write_model(tmp_path / "model", QWEN)).url
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def check_blocks(message: Any) -> None:
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", THOUGHT)
    assert thinking.signature
    assert (text.type, text.text.strip()) == ("text", SAID)
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Oslo"})
    assert call.id.startswith("toolu_")
    assert message.stop_reason == "tool_use"


def test_thinking_text_and_calls_are_blocks(caller: anthropic.Anthropic) -> None:
    message = caller.messages.create(messages=ASKED, **OPTIONS)
    check_blocks(message)
    usage = message.usage
    count = caller.messages.count_tokens(
        model="fake", messages=ASKED, tools=OPTIONS["tools"], system=SYSTEM
    )
    parts = usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    assert sum(part or 0 for part in parts) == count.input_tokens


def test_streamed_blocks_are_the_same(caller: anthropic.Anthropic) -> None:
    whole = caller.messages.create(messages=ASKED, **OPTIONS)
    with caller.messages.stream(messages=ASKED, **OPTIONS) as stream:
        events = list(stream)
        message = stream.get_final_message()
    check_blocks(message)
    assert message.content[0].thinking == whole.content[0].thinking
    assert message.content[1].text == whole.content[1].text
    pieces = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert json.loads("".join(pieces)) == {"city": "Oslo"}


def test_an_answer_and_the_results_of_its_calls_go_back(
    caller: anthropic.Anthropic, prompts: list[str]
) -> None:
    message = caller.messages.create(messages=ASKED, **OPTIONS)
    result = {
        "type": "tool_result",
        "tool_use_id": message.content[2].id,
        "content": [{"type": "text", "text": "Rain."}],
    }
    more = {"type": "text", "text": "And tomorrow?"}
    blocks = [block.model_dump() for block in message.content]
    chat: Any = [
        *ASKED,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result, more]},
    ]
    check_blocks(caller.messages.create(messages=chat, **OPTIONS))
    last = prompts[-1]
    order = ["Be brief.\nCall tools.", "weather?", THOUGHT, SAID, "Oslo", "Rain.", "And tomorrow?"]
    places = [last.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"type": "any"}, "tools"),
        ({"type": "tool", "name": "weather"}, "tools"),
        ({"type": "auto", "disable_parallel_tool_use": True}, None),
        ({"type": "none"}, None),
    ],
)
def test_every_tool_choice_is_taken(
    caller: anthropic.Anthropic, choice: Any, field: str | None
) -> None:
    message = caller.messages.create(messages=ASKED, tool_choice=choice, **OPTIONS)
    assert message.content


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ({"temperature": 2}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_refused_fields_are_named(cluster: Cluster, body: dict[str, Any], message: str) -> None:
    cluster.pair(speak)
    whole = {"model": "fake", "max_tokens": 5, "messages": HELLO} | body
    response = cluster.client().post("/v1/messages", json=whole)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert message in error["error"]["message"]


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
def test_fields_of_other_apis_are_refused_by_name(cluster: Cluster, path: str) -> None:
    cluster.pair(speak)
    client = cluster.client()
    whole: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": HELLO}
    if path == COUNT_TOKENS:
        del whole["max_tokens"]
    for name in sorted(KNOWN.keys() - OBEYED[FieldPlace((path,))]):
        response = client.post(path, json=whole | {name: {"a": [1]}})
        assert response.status_code == 400, (name, response.text)
        assert response.json()["error"]["message"].startswith(name)
    assert client.post(path, json=whole | {"made_up": 1}).status_code == 200


def test_a_prefill_is_continued(caller: anthropic.Anthropic, prompts: list[str]) -> None:
    chat: Any = [*ASKED, {"role": "assistant", "content": "It is"}]
    caller.messages.create(messages=chat, model="fake", max_tokens=5)
    assert prompts[-1].endswith("It is")


def test_models_are_listed_in_its_shape(client: anthropic.Anthropic) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["fake"]
    assert client.models.retrieve("fake").display_name == "fake"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")
