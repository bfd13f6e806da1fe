"""What one client or node sends wrongly leaves nobody waiting, and harms no other request."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from failing_nodes import TOKENS, Asked
from fake_node import wait_until
from processes import Stream

from pd.core.messages import Finish, Output, Stages, StepOutputs
from pd.proxy.http.typed_routes import ClientRequest

if TYPE_CHECKING:
    from proxy_cluster import Cluster

# JSON of half a character, which no message to a node can hold.
HALF = '{"const": "\\ud800"}'
NAMED_HALF = '{"properties": {"\\ud800": {"not": {}}}}'
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "\\ud800"}}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5, 6], "json_schema": HALF}),
        ("/v1/completions", {"prompt": [5, 6], "guided_json": NAMED_HALF}),
        ("/v1/completions", {"prompt": [5, 6], "structured_outputs": {"json": HALF}}),
        ("/v1/completions", {"prompt": [5, 6], "structural_tag": TAG}),
        ("/generate", {"input_ids": [5, 6], "sampling_params": {"json_schema": HALF}}),
    ],
)
def test_half_a_character_in_a_schema_ends_no_other_request(
    cluster: Cluster, path: str, body: dict[str, Any]
) -> None:
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy()
    other = Stream(proxy.url, [5, 6], 3)
    request = node.wait_generate()
    node.say(request, [7], cached_tokens=0)
    wait_until(lambda: other.output == [7])
    client = cluster.client(proxy)
    for _ in range(3):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
    node.say(request, [8, 9], position=1, finish=Finish("length"))
    assert other.join(20).succeeded_as([7, 8, 9])
    assert len(node.generates) == 1


@pytest.mark.one_process("looks into the proxy")
def test_an_error_that_names_no_part_of_the_grammar_ends_the_request(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy()
    client = cluster.client(proxy)
    answers: list[Any] = []
    form = {"a": [1], "a ²": {"type": "json_schema", "json_schema": {"type": "string"}}}
    body = {"prompt": [5, 6], "response_format": {"type": "structural_tag", "format": form}}
    asking = threading.Thread(
        target=lambda: answers.append(client.post("/v1/completions", json=body))
    )
    asking.start()
    place = "structural_tag.format.a ².json_schema"
    node.fail(node.wait_generate(), "invalid_request", f"{place} is wrong", place)
    asking.join(20)
    assert [answer.status_code for answer in answers] == [400], answers
    assert proxy.proxy is not None
    assert not proxy.proxy._dispatcher.jobs


@pytest.mark.parametrize(
    "facts",
    [
        {"cached_tokens": -1},
        {"cached_tokens": 1 << 40},
        {"cached_tokens": 0, "stages": Stages(queue=float("nan"))},
        {"cached_tokens": 0, "stages": Stages(prefill=-1.0)},
    ],
    ids=["negative", "huge", "nan", "negative time"],
)
def test_impossible_figures_of_a_node_fail_the_request_that_they_are_about(
    cluster: Cluster, facts: dict[str, Any]
) -> None:
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy(text=False)
    streams = [Stream(proxy.url, [5, 6], 1, rid=name) for name in ("wrong", "right")]
    node.wait_generate(2)
    requests = {request.rid: request for request in node.generates}

    def output(name: str, **facts: Any) -> Output:
        room, finish = requests[name].room, Finish("length")
        return Output(room=room, index=0, position=0, token_ids=[7], finish=finish, **facts)

    outputs = [output("wrong", **facts), output("right", cached_tokens=0)]
    for sender in dict.fromkeys(request.sender for request in requests.values()):
        node.send(sender, StepOutputs(to="", sender="", outputs=outputs))
    wrong, right = (stream.join(20) for stream in streams)
    assert right.succeeded_as([7])
    assert wrong.error is not None
    assert wrong.error["code"] == "node_failed"


@pytest.mark.parametrize("whole_step", [False, True])
def test_a_prefill_node_that_fails_what_the_decode_node_has_costs_nothing(
    cluster: Cluster, *, whole_step: bool
) -> None:
    """As if it had stopped before it had the acknowledgement of its commit."""
    prefill, decode = cluster.pair(auto=False)
    stream = Stream(cluster.proxy(text=False).url, [5, 6], 3)
    prefill.say(prefill.wait_generate(), [7], cached_tokens=0)
    request = decode.wait_generate()
    decode.say(request, [7, 8])
    wait_until(lambda: stream.output == [7, 8])
    if whole_step:
        prefill.fail_step([prefill.wait_generate()])
    else:
        prefill.fail(prefill.wait_generate(), "node_failed")
    wait_until(lambda: not prefill._outbox.qsize())
    decode.say(request, [9], position=2, finish=Finish("length"))
    assert stream.join(20).succeeded_as([7, 8, 9])
    assert not decode.aborts


@pytest.mark.one_process("looks into the proxy")
def test_requests_that_wait_for_a_node_expire_though_the_first_that_did_set_nodes_free(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that wait are told of such nodes while the first one is still being given up."""
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy(failover="on", text=False, failover_wait=1.0)
    client = cluster.client(proxy)
    assert proxy.proxy is not None
    failovers = proxy.proxy._dispatcher._failovers
    fail = failovers._fail

    def fail_and_tell(*args: Any) -> None:
        fail(*args)
        failovers.retry_waiting()

    monkeypatch.setattr(failovers, "_fail", fail_and_tell)
    asked = [Asked(client, {}) for _ in range(3)]
    node.wait_generate(3)
    for request in node.generates:
        node.say(request, TOKENS[:1], cached_tokens=0)
    for each in asked:
        each.wait_tokens(1)
    node.kill()
    wait_until(lambda: len(failovers._waiting) == 3)

    async def let_the_last_wait_longer() -> None:
        *_, last = failovers._waiting
        failovers._waiting[last] = failovers._waiting[last][0], time.monotonic() + 1.0

    proxy.run(let_the_last_wait_longer())
    for each in asked:
        assert "no other node could go on" in each.error()["message"]
    assert "Exception in callback" not in caplog.text


@pytest.mark.one_process("holds up an answer of the proxy")
def test_what_comes_while_the_head_of_an_answer_cannot_be_sent_is_in_the_answer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, released = threading.Event(), threading.Event()
    start_response = ClientRequest.start_response

    async def start_late(self: ClientRequest, *args: Any) -> None:
        held.set()
        while not released.is_set():
            await asyncio.sleep(0.005)
        await start_response(self, *args)

    monkeypatch.setattr(ClientRequest, "start_response", start_late)
    node = cluster.node("unified", auto=False)
    asked = Asked(cluster.client(text=False), {"max_new_tokens": 2, "n": 2})
    request = node.wait_generate()
    node.say(request, [10], cached_tokens=0)
    assert held.wait(10)
    node.say(request, [11], position=1, finish=Finish("length"))
    node.say(request, [20, 21], index=1, finish=Finish("length"))
    wait_until(lambda: not node._outbox.qsize())
    time.sleep(0.2)
    released.set()
    asked.wait_tokens(2)
    asked.wait_tokens(2, index=1)
    assert asked.result()["output_ids"] in ([10, 11], [20, 21])
