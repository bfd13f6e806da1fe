"""A request that comes when a node has just become healthy is served by it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from failing_nodes import PROMPT
from fake_node import wait_until

if TYPE_CHECKING:
    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}} | fields
    return client.post("/generate", json=body)


def lose(client: httpx.Client, node: FakeNode) -> None:
    """Kill a node, and wait until the proxy has noticed."""
    node.kill()
    wait_until(lambda: ask(client).status_code == 503)


@pytest.mark.parametrize("pause", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_first_request_after_a_start_is_served(
    cluster: Cluster, role: str, pause: float
) -> None:
    """Whenever between two polls it comes."""
    for node in (cluster.node("prefill"), cluster.node("decode")):
        if node.role == role:
            late = node
    client = cluster.client(text=False)
    for _ in range(2):
        lose(client, late)
        time.sleep(pause)
        late.start()
        assert ask(client).status_code == 200


def test_the_first_request_to_nodes_that_were_never_reached_is_served(cluster: Cluster) -> None:
    nodes = cluster.pair()
    for node in nodes:
        node.kill()
    client = cluster.client(cluster.proxy(wait_ready=0, text=False))
    assert ask(client).status_code == 503
    for node in nodes:
        node.start()
    body = {"model": nodes[0].server_info()["model"], "prompt": PROMPT, "max_tokens": 3}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_new_model_is_known_to_the_first_request_for_it(cluster: Cluster) -> None:
    cluster.node("unified")
    client = cluster.client(text=False)
    other = cluster.node("unified", model="other")
    client.post("/workers", json={"role": "unified", "url": other.url})
    body = {"model": "other", "prompt": PROMPT, "max_tokens": 3}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_node_that_takes_requests_again_gets_the_first_one(cluster: Cluster) -> None:
    """Its next heartbeat is up to half a second away."""
    node = cluster.node("unified")
    client = cluster.client(text=False)
    for _ in range(3):
        node.ready = False
        wait_until(lambda: ask(client).status_code == 503)
        node.ready = True
        assert ask(client).status_code == 200


def test_requests_that_come_together_share_a_look(cluster: Cluster) -> None:
    node = cluster.node("unified")
    client = cluster.client(text=False)
    lose(client, node)
    before = len(node.http_requests)
    with ThreadPoolExecutor(32) as pool:
        refused = list(pool.map(lambda _: ask(client).status_code, range(32)))
        assert refused == [503] * 32
        node.ready = False
        node.start()
        answers = pool.map(lambda _: ask(client).status_code, range(32))
        node.ready = True
        assert set(answers) <= {200, 503}
    assert len(node.http_requests) - before < 32
    assert ask(client).status_code == 200


def test_a_node_that_is_deaf_does_not_hold_requests_up_for_ever(cluster: Cluster) -> None:
    node = cluster.node("unified")
    node.silent = True
    client = cluster.client(cluster.proxy(wait_ready=0, text=False))
    began = time.monotonic()
    assert ask(client).status_code == 503
    assert time.monotonic() - began < 60.0
    node.silent = False
    wait_until(lambda: ask(client).status_code == 200)
