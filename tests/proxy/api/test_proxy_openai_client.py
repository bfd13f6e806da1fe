"""The OpenAI client works unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
from fake_node import EOS
from proxy_tokenizers import byte_level

if TYPE_CHECKING:
    from proxy_cluster import Cluster

TEXT = "hello world, the quick brown fox 😀"


def speak(prompt: list[int], index: int) -> list[int]:
    return [*byte_level().encode(TEXT).ids, EOS]


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    cluster.pair(speak)
    url = cluster.proxy(api_key="key").url
    return openai.OpenAI(base_url=url + "/v1", api_key="key", max_retries=0)


HELLO: Any = [{"role": "user", "content": "hello"}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_answers_have_their_id_as_a_header(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO)
    assert answer._request_id == answer.id
    headers = {"X-Request-Id": "trace-7"}
    raw = client.completions.with_raw_response.create(
        model="fake", prompt="hello", stream=True, extra_headers=headers
    )
    assert raw.request_id == "trace-7"
    assert {event.id for event in raw.parse()} == {"trace-7"}
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, extra_body={"rid": "a\r\nX-Other: b"}
    )
    assert (answer.id, answer._request_id) == ("a\r\nX-Other: b", "a%0D%0AX-Other: b")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, top_logprobs=3, seed=1, user="me", n=2
    )
    for choice in answer.choices:
        assert choice.message.content == TEXT
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content[0].top_logprobs) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 5


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=["hello", "world"], max_tokens=100, logprobs=2, stop=["brown"]
    )
    assert [choice.text for choice in answer.choices] == [TEXT[: TEXT.index("brown")]] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens
    stream = client.completions.create(model="fake", prompt="hello", max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_errors_are_the_clients_classes(cluster: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="fake", prompt="hello", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as too_long:
        client.completions.create(model="fake", prompt=[5] * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="wrong").models.list()
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="'not'"):
        client.chat.completions.create(model="fake", messages=HELLO, response_format=schema)


def test_a_request_whose_time_is_over_is_not_sent_again(cluster: Cluster) -> None:
    prefill, _ = cluster.pair(auto=False)
    client = openai.OpenAI(base_url=cluster.proxy().url + "/v1", api_key="key", max_retries=2)
    with pytest.raises(openai.APIStatusError, match=r"0\.2 s"):
        client.chat.completions.create(model="fake", messages=HELLO, extra_body={"timeout": 0.2})
    assert len(prefill.generates) == 1


def test_an_error_in_a_stream_raises(cluster: Cluster) -> None:
    prefill, decode = cluster.pair(auto=False)
    url = cluster.proxy().url
    client = openai.OpenAI(base_url=url + "/v1", api_key="key", max_retries=0)
    import threading

    def fail() -> None:
        prefill.say(prefill.wait_generate(), [40])
        request = decode.wait_generate()
        threading.Event().wait(0.1)
        decode.fail(request, "node_failed", "it burst into flames")

    threading.Thread(target=fail).start()
    stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="flames"):
        list(stream)
