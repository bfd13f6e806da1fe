"""Nodes that would answer differently are not paired, and none goes on with another's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from elastic_nodes import COST, ITL
from failing_nodes import PROMPT, TOKENS, Asked, asked_of
from fake_node import wait_until
from proxy_cluster import wait_for_all

from pd.core.messages import Finish
from pd.core.node_load import NodeLoad

if TYPE_CHECKING:
    from proxy_cluster import Cluster

ONE: dict[str, Any] = {"model_id": "1", "identity": {"eos_token_ids": "2", "rope.theta": "1e4"}}
OTHER: dict[str, Any] = {
    "model_id": "2",
    "identity": {"eos_token_ids": "2, 7", "rope.theta": "1e4"},
}


def not_ready(cluster: Cluster) -> str:
    proxy = cluster.proxy(wait_ready=0.5)
    client = cluster.client(proxy)
    wait_until(lambda: all(worker["ready"] for worker in client.get("/workers").json()["workers"]))
    response = httpx.get(proxy.url + "/readiness")
    assert response.status_code == 503
    return str(response.json()["error"]["message"])


def test_readiness_names_the_setting_that_differs_with_both_values(cluster: Cluster) -> None:
    cluster.node("prefill", **ONE)
    cluster.node("decode", **OTHER)
    message = not_ready(cluster)
    assert "prefill has eos_token_ids '2', decode has '2, 7'" in message
    assert "fingerprint" not in message, "the digest says nothing more"


def test_of_many_settings_a_few_are_named_and_the_rest_counted(cluster: Cluster) -> None:
    names = [f"setting{index}" for index in range(9)]
    cluster.node("prefill", identity=dict.fromkeys(names, "a"))
    cluster.node("decode", identity=dict.fromkeys(names[1:], "b"))
    message = not_ready(cluster)
    assert "prefill has setting0 'a', decode has 'nothing'" in message
    assert "prefill has setting2 'a', decode has 'b'; and 6 more settings differ" in message


def test_values_are_shown_escaped_and_cut(cluster: Cluster) -> None:
    cluster.node("prefill", identity={"eos_token": "\x1b[31m\n\u202e" + "x" * 240})
    cluster.node("decode", identity={"eos_token": "y"})
    message = not_ready(cluster)
    assert message.isprintable()
    assert r"prefill has eos_token '\x1b[31m\n\u202exxx" in message
    assert "x" * 100 not in message


@pytest.mark.parametrize(
    "identity",
    [
        {"name\nwith a line": "a"},
        {"name": "x" * 257},
        {"name": 5},
        {f"n{i}": "" for i in range(129)},
    ],
)
def test_an_identity_that_cannot_be_is_refused(cluster: Cluster, identity: Any) -> None:
    """Anybody may answer at a node's URL."""
    cluster.node("unified", identity=identity)
    proxy = cluster.proxy(wait_ready=0.5)
    client = cluster.client(proxy)
    wait_until(lambda: "identity" in client.get("/workers").json()["workers"][0]["problem"])


def test_an_answer_goes_on_only_where_it_would_have_been_the_same(cluster: Cluster) -> None:
    """Of three pairs that could take it over, the last one answers alike."""
    prefill, decode = cluster.pair(auto=False, **ONE)
    client = cluster.client(failover="on", policy="round_robin", text=False)
    wait_for_all(client)
    asked = Asked(client, {"sampling_seed": 3})
    first = prefill.wait_generate()
    for settings in (OTHER, OTHER, ONE):
        for node in cluster.pair(auto=False, **settings):
            client.post("/workers", json={"role": node.role, "url": node.url})
    wait_for_all(client)
    prefill.say(first, TOKENS[:1], cached_tokens=0)
    decode.say(first, TOKENS[:2])
    asked.wait_tokens(2)
    decode.fail(first, "node_failed")
    other, last = cluster.prefill[3], cluster.decode[3]
    second = other.wait_generate()
    last.wait_generate()
    other.say(second, TOKENS[2:3], position=2)
    last.say(second, TOKENS[2:], position=2, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


@pytest.mark.parametrize("produced", [0, 2])
def test_where_no_node_answers_alike_the_error_says_what_differs(
    cluster: Cluster, produced: int
) -> None:
    one = cluster.node("unified", auto=False, **ONE)
    client = cluster.client(failover="on", text=False, failover_wait=1.0)
    wait_for_all(client)
    asked = Asked(client, {"sampling_seed": 3})
    _, first = asked_of(cluster.unified)
    other = cluster.node("unified", **OTHER)
    client.post("/workers", json={"role": "unified", "url": other.url})
    wait_for_all(client)
    one.say(first, TOKENS[:produced], cached_tokens=0)
    if produced:
        asked.wait_tokens(produced)
    one.kill()
    error = asked.error()
    assert "no other node could go on" in error["message"]
    assert other.generates == []
    one.start()  # for the next request there are nodes
    answer = client.post("/generate", json={"input_ids": PROMPT})
    assert answer.status_code == 200, "the other model's node serves what it begins"


def test_a_waiting_request_does_not_move_to_a_node_that_answers_otherwise(
    cluster: Cluster,
) -> None:
    kind: dict[str, Any] = {"auto": False, "elastic": True}
    nodes = [cluster.node("unified", **kind, **ONE), cluster.node("unified", **kind, **OTHER)]
    nodes.append(cluster.node("unified", **kind, **ONE))

    def queues(*seconds: float) -> None:
        for node, wait in zip(nodes, seconds, strict=True):
            node.load = NodeLoad(
                cost=COST, itl=ITL, free_tokens=100_000, chunk=8192, queue_seconds=wait
            )

    queues(0.0, 9.0, 9.0)
    client = cluster.client(text=False, failover="on")
    wait_for_all(client)
    asked = Asked(client, {"sampling_seed": 3})
    first = nodes[0].wait_generate()
    queues(9.0, 0.0, 0.5)
    taken = nodes[0].wait_take_back()
    nodes[0].give_back(taken, taken=True)
    second = nodes[2].wait_generate()
    assert second.token_ids == first.token_ids
    assert nodes[1].generates == []
    nodes[2].say(second, TOKENS, finish=Finish("length"), cached_tokens=0)
    assert asked.result()["output_ids"] == TOKENS
