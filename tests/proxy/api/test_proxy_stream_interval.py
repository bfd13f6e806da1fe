"""``stream_interval``: events of a stream have so many tokens at least, but for the first and the
last one."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from proxy_cluster import read_events

from pd.core.errors import UsageError
from pd.core.messages import Finish
from pd.proxy.config import ProxyConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster

TOKENS = [40 + i for i in range(18)]


def tell(node: FakeNode, end: Callable[[Any], None], bursts: int) -> None:
    """Answer the last request: two choices, ``bursts`` tokens a message, with pauses in which a
    proxy that wrote each message would write."""
    request = node.generates[-1]
    for position in range(0, len(TOKENS), bursts):
        for index in range(request.params.n):
            node.say(request, TOKENS[position : position + bursts], position=position, index=index)
        time.sleep(0.01)
    end(request)


def stream(
    node: FakeNode,
    client: httpx.Client,
    path: str,
    body: dict[str, Any],
    end: Callable[[Any], None],
    bursts: int = 1,
) -> list[Any]:
    before = len(node.generates)

    def answer() -> None:
        node.wait_generate(before + 1)
        tell(node, end, bursts)

    teller = threading.Thread(target=answer)
    teller.start()
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        events = read_events(response)
    teller.join()
    return events


def ends(node: FakeNode) -> Callable[[Any], None]:
    def end(request: Any) -> None:
        for index in range(request.params.n):
            node.say(request, [], position=len(TOKENS), index=index, finish=Finish("length"))

    return end


def native(interval: int | None, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 50, "n": 2, "temperature": 1.0, "stream_interval": interval}
    return {"input_ids": [5], "sampling_params": params} | more


def openai(interval: int | None, **more: Any) -> dict[str, Any]:
    fields = {"prompt": [5], "max_tokens": 50, "n": 2, "return_token_ids": True}
    return fields | {"stream_interval": interval} | more


def choices_of(event: Any) -> list[tuple[int, list[int]]]:
    """Index and token ids of each choice of an event."""
    if "choices" in event:
        return [(c["index"], c["token_ids"]) for c in event["choices"]]
    return [(event["index"], event["output_ids"])]


REQUESTS = {
    "completions": ("/v1/completions", openai),
    "generate": ("/generate", lambda interval: native(interval, incremental=True)),
}


@pytest.mark.parametrize(("flag", "asked"), [(5, None), (1, 5), (2, 5), (7, 1), (1, None)])
@pytest.mark.parametrize("kind", REQUESTS)
def test_middle_events_have_as_many_tokens(
    cluster: Cluster, kind: str, flag: int, asked: int | None
) -> None:
    node = cluster.node("unified", auto=False)
    client = cluster.client(stream_interval=flag)
    path, body = REQUESTS[kind]
    events = stream(node, client, path, body(asked), ends(node))
    assert events[-1] == "DONE"
    for index in range(2):
        parts = [ids for e in events[:-1] for i, ids in choices_of(e) if i == index and ids]
        assert [token for part in parts for token in part] == TOKENS
        interval = asked or flag
        first, *middle, last = map(len, parts)
        assert all(size >= interval for size in middle)
        assert last >= 1
        if interval > 1:
            assert len(parts) <= 2 + len(TOKENS) // interval
            assert first < len(TOKENS)


def test_cumulative_events_are_fewer(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    events = stream(node, cluster.client(), "/generate", native(6), ends(node))
    lengths = [len(e["output_ids"]) for e in events[:-1] if e["index"] == 0]
    assert lengths[-1] == len(TOKENS)
    assert len(lengths) <= 5


def test_a_burst_is_one_event(cluster: Cluster) -> None:
    """What a speculative step brings is not cut into pieces of the interval."""
    node = cluster.node("unified", auto=False)
    client = cluster.client(stream_interval=4)
    events = stream(node, client, "/v1/completions", openai(None), ends(node), bursts=6)
    parts = [ids for e in events[:-1] for i, ids in choices_of(e) if i == 1 and ids]
    assert all(len(ids) % 6 == 0 for ids in parts)


def test_what_was_held_back_goes_before_an_error(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    client = cluster.client(stream_interval=500)
    fail = lambda request: node.fail(request, "internal")  # noqa: E731
    events = stream(node, client, "/v1/completions", openai(None), fail)
    for index in range(2):
        parts = [ids for e in events[:-1] for i, ids in choices_of(e) if i == index]
        assert [token for part in parts for token in part] == TOKENS
    assert events[-1]["error"]["code"] == "internal"


@pytest.mark.parametrize("interval", [0, 513])
def test_an_interval_out_of_range(cluster: Cluster, interval: int) -> None:
    cluster.node("unified")
    client = cluster.client()
    for path, body in (("/generate", native(interval)), ("/v1/completions", openai(interval))):
        response = client.post(path, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"].endswith("stream_interval")
        assert "512" in error["message"]
    with pytest.raises(UsageError, match=f"1 to 512 tokens, not {interval}"):
        ProxyConfig(stream_interval=interval).validate()
