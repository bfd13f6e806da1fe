"""Anthropic's streams have pings while a model is silent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from fake_node import EOS
from proxy_tokenizers import byte_level

from pd.core.messages import Finish
from pd.proxy.api import event_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from proxy_cluster import Cluster

HELLO: Any = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 9, "messages": HELLO, "stream": True}
ONE_PROCESS = pytest.mark.one_process("sets the time between pings where streams are written")


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.02)


def read_kinds(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))["type"]


@ONE_PROCESS
def test_pings_come_before_the_first_token_and_between_tokens(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    first, last = byte_level().encode("ab").ids
    with cluster.client().stream("POST", "/v1/messages", json=BODY) as response:
        assert response.status_code == 200
        kinds = read_kinds(response)
        assert [next(kinds) for _ in range(3)] == ["ping"] * 3
        request = node.wait_generate()
        node.say(request, [first], cached_tokens=0)
        while (kind := next(kinds)) != "content_block_delta":
            assert kind in ("ping", "message_start", "content_block_start")
        assert [next(kinds) for _ in range(3)] == ["ping"] * 3
        node.say(request, [last], position=1, finish=Finish("length"))
        rest = [kind for kind in kinds if kind != "ping"]
    assert rest == ["content_block_delta", "content_block_stop", "message_delta", "message_stop"]


@ONE_PROCESS
def test_an_error_after_a_ping_is_an_event(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    with cluster.client().stream("POST", "/v1/messages", json=BODY) as response:
        kinds = read_kinds(response)
        assert next(kinds) == "ping"
        node.fail(node.wait_generate(), "internal")
        assert [kind for kind in kinds if kind != "ping"] == ["error"]


@ONE_PROCESS
def test_its_client_reads_a_stream_that_begins_with_pings(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    client = anthropic.Anthropic(base_url=cluster.proxy().url, api_key="none", max_retries=0)
    with client.messages.stream(model="fake", max_tokens=9, messages=HELLO) as stream:
        ids = [*byte_level().encode("hello").ids, EOS]
        node.say(node.wait_generate(), ids, finish=Finish("stop", EOS), cached_tokens=0)
        assert stream.get_final_message().content[0].text == "hello"
