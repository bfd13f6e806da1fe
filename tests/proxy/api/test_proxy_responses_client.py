"""OpenAI's client works unchanged with responses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from fake_node import EOS
from proxy_cluster import Cluster
from proxy_tokenizers import byte_level
from pydantic import BaseModel
from tool_models import QWEN, tokenizer, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = "hello world, the quick brown fox 😀"
KEY, OTHER_KEY = "key", "other"


def speak(prompt: list[int], index: int) -> list[int]:
    return [*byte_level().encode(TEXT).ids, EOS]


def make_client(url: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(model_dir: str) -> Iterator[openai.OpenAI]:
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        cluster.pair(speak)
        yield make_client(cluster.proxy(api_key=KEY, admin_api_key=OTHER_KEY).url)


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="hello", metadata={"a": "b"})
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text) == ("completed", TEXT)
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.output_tokens == len(byte_level().encode(TEXT).ids) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_stored_response_belongs_to_its_key(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="hello")
    assert client.responses.retrieve(response.id) == response
    stranger = client.with_options(api_key=OTHER_KEY)
    for call in (stranger.responses.retrieve, stranger.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.BadRequestError) as foreign:
        stranger.responses.create(model="fake", input="hi", previous_response_id=response.id)
    assert foreign.value.code == "previous_response_not_found"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_response_that_is_not_stored_is_gone(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="fake", input="hi", previous_response_id=response.id)
    assert gone.value.code == "previous_response_not_found"


def test_events_come_in_order_with_numbers(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    last: Any = events[-1]
    assert last.response.output_text == TEXT
    assert client.responses.retrieve(last.response.id) == last.response


def test_the_number_of_tokens_ends_a_response(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(model="fake", input="hello", max_output_tokens=3, stream=True)
    )
    last: Any = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].status == "incomplete"


TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
THOUGHT, SAID = "Which city?", "I look."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALL}"


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """The prompts that the model got."""
    return []


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> Iterator[openai.OpenAI]:
    """A client of a model that thinks, says something, and calls a function."""
    model = tokenizer()

    def answer(prompt: list[int], index: int) -> list[int]:
        prompts.append(model.decode(prompt, skip_special_tokens=False))
        return [*model.encode(ANSWER, add_special_tokens=False).ids, EOS]

    directory = write_model(tmp_path_factory.mktemp("model"), QWEN)
    with ExitStack() as stack:
        cluster = Cluster(stack, directory)
        cluster.pair(answer, context_length=4000, pages={"total": 2000, "free": 2000})
        yield make_client(cluster.proxy().url)


def check_types(value: BaseModel) -> None:
    """The client itself takes anything; others check what they get."""
    type(value).model_validate_json(value.model_dump_json(exclude_unset=True))


def check_items(response: Any) -> None:
    reasoning, message, call = response.output
    assert reasoning.content[0].text.strip() == THOUGHT
    assert (message.role, message.content[0].text.strip()) == ("assistant", SAID)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert [item.status for item in response.output] == ["completed"] * 3


def test_streamed_items_are_those_of_a_whole_response(caller: openai.OpenAI) -> None:
    whole = caller.responses.create(model="fake", input="weather?", tools=[TOOL])
    check_items(whole)
    check_types(whole)
    raw = caller.responses.create(model="fake", input="weather?", tools=[TOOL], stream=True)
    for event in raw:
        check_types(event)
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with caller.responses.stream(model="fake", input="weather?", tools=[TOOL]) as stream:
        events: list[Any] = list(stream)
        check_items(stream.get_final_response())
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == {"city": "Oslo"}
    thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(thoughts).strip() == THOUGHT


ORDER = ["Be brief.", "weather?", THOUGHT, SAID, "Oslo", "Rain.", "And tomorrow?"]


def check_order(prompt: str) -> None:
    places = [prompt.index(part) for part in ORDER]
    assert places == sorted(places)


def test_items_go_back_as_input(caller: openai.OpenAI, prompts: list[str]) -> None:
    """As agents with `store: false` send them, with everything that they may say."""
    options: Any = {
        "model": "fake",
        "tools": [TOOL],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "instructions": "Be brief.",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "truncation": "disabled",
        "prompt_cache_key": "chat",
        "user": "somebody",
        "service_tier": "auto",
        "metadata": {"agent": "1"},
        "max_output_tokens": 1000,
        "text": {"verbosity": "medium"},
        "tool_choice": "auto",
        "temperature": 1,
    }
    asked: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Call tools."}]},
        {"type": "message", "role": "user", "content": "weather?"},
    ]
    response = caller.responses.create(input=asked, **options)
    check_items(response)
    items = [item.model_dump(exclude_none=True) for item in response.output]
    del items[0]["content"]  # so what encrypted_content hides has to do
    call: Any = response.output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    more = {"role": "user", "content": "And tomorrow?"}
    check_items(caller.responses.create(input=[*asked, *items, result, more], **options))
    check_order(prompts[-1])
    assert "Call tools." in prompts[-1]


def test_a_previous_response_comes_first(caller: openai.OpenAI, prompts: list[str]) -> None:
    options: Any = {"model": "fake", "tools": [TOOL]}
    response = caller.responses.create(input="weather?", instructions="Forget me.", **options)
    call: Any = response.output[2]
    more: list[Any] = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": [{"type": "input_text", "text": "Rain."}],
        },
        {"role": "user", "content": "And tomorrow?"},
    ]
    second = caller.responses.create(
        input=more, instructions="Be brief.", previous_response_id=response.id, **options
    )
    check_items(second)
    assert second.previous_response_id == response.id
    check_order(prompts[-1])
    assert "Forget me." not in prompts[-1]


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings is not supported"):
        client.embeddings.create(model="fake", input="hello")


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "none",
        {"type": "function", "name": "weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "weather"}],
        },
    ],
)
def test_every_tool_choice_is_taken(caller: openai.OpenAI, choice: Any) -> None:
    response = caller.responses.create(
        model="fake", input="weather?", tools=[TOOL], tool_choice=choice
    )
    assert response.output
    assert response.tool_choice == choice or response.tool_choice.model_dump() == choice  # type: ignore[union-attr]


class City(BaseModel):
    name: str


def test_structured_output_is_parsed(cluster: Cluster) -> None:
    answer = '{"name": "Oslo"}'
    node = cluster.node("unified", lambda *_: [*byte_level().encode(answer).ids, EOS])
    client = make_client(cluster.proxy().url)
    response = client.responses.parse(model="fake", input="a city", text_format=City)
    assert response.output_parsed == City(name="Oslo")
    grammar = node.generates[0].params.grammar
    assert grammar is not None and '"name"' in grammar.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_refused_fields_are_named(
    caller: openai.OpenAI, body: dict[str, Any], message: str
) -> None:
    response = httpx.post(f"{caller.base_url}responses", json={"input": "hello"} | body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(message), response.text


@pytest.mark.full
def test_four_processes_share_stored_responses(model_dir: str, tmp_path_factory: Any) -> None:
    directory = str(tmp_path_factory.mktemp("storage"))
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        cluster.node("unified", speak)
        url = cluster.proxy(workers=4, storage_dir=directory).url
        name = make_client(url).responses.create(model="fake", input="hello").id
        for _ in range(12):  # each client has a connection of its own, so most processes get some
            other = make_client(url)
            assert other.responses.retrieve(name).output_text == TEXT
            other.responses.create(model="fake", input="hi", previous_response_id=name)
    with ExitStack() as stack:
        cluster = Cluster(stack, model_dir)
        cluster.node("unified", speak)
        again = make_client(cluster.proxy(workers=1, storage_dir=directory).url)
        assert again.responses.retrieve(name).output_text == TEXT, "it survives a restart"


@pytest.mark.one_process("limits the memory of this process")
def test_chats_of_requests_under_way_are_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client names megabytes of an earlier chat in a few bytes, and nodes need not see all of
    a chat."""
    monkeypatch.setattr("pd.proxy.api.responses_api.FREE_BYTES", 0)
    node = cluster.node("unified", speak)
    url = cluster.proxy().url
    with make_client(url) as client, ThreadPoolExecutor(1) as pool:
        stored = client.responses.create(input="x" * 60)
        node.auto = False
        running = pool.submit(client.responses.create, input="y" * 60)
        node.wait_generate(2)
        earlier: dict[str, Any] = {"previous_response_id": stored.id, "store": False}
        for limit, more in ((150, {}), (250, earlier)):
            monkeypatch.setattr("pd.proxy.api.responses_api.MAX_CHATS_BYTES", limit)
            with pytest.raises(openai.RateLimitError, match="chats"):
                client.responses.create(input="z" * 60, **more)
        node.auto = True
        node.reply(node.generates[1])
        assert running.result().status == "completed"
        assert client.responses.create(input="z", **earlier).status == "completed"
