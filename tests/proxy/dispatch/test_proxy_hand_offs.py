"""Elastic nodes between which KV cannot travel serve alone what they cannot serve together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from elastic_nodes import COST, ITL
from fake_node import wait_until
from proxy_cluster import wait_for_all

from pd.core.node_load import NodeLoad
from pd.proxy.nodes.breaker import FAILURES

if TYPE_CHECKING:
    from concurrent.futures import Future

    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate

pytestmark = pytest.mark.one_process(
    "each process has a breaker of its own, so the file asks for one process"
)
PROMPT = [5, 6, 7, 8, 9]
SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(autouse=True)
def every_failure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand-offs of these tests fail sooner after each other than real ones."""
    monkeypatch.setattr("pd.proxy.nodes.breaker.RESET_SECONDS", 0.0)


class Deployment:
    """An elastic pair, idle, so that each request is handed off, and a proxy."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        self.nodes = list(cluster.pair(auto=False, elastic=True))
        for node in self.nodes:
            node.load = NodeLoad(cost=COST, itl=ITL, free_tokens=100_000, chunk=8192)
        self.prefill, self.decode = self.nodes
        self.client = cluster.client(text=False, **({"failover": "on", "workers": 1} | options))
        wait_for_all(self.client)
        self.answered = set[bytes]()
        self._pool = ThreadPoolExecutor(8)

    def ask(self) -> Future[httpx.Response]:
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING}
        return self._pool.submit(self.client.post, "/generate", json=body)

    def handed_off(self) -> list[Generate]:
        """What the decode node was asked to receive, without probes."""
        return [g for g in self.decode.generates if g.peer and len(g.token_ids) > 4]

    def probes(self) -> list[Generate]:
        """The same of probes."""
        return [g for g in self.decode.generates if g.peer and len(g.token_ids) == 4]

    def fail_hand_offs(self) -> None:
        """Fail the hand-offs of requests one after the other until there are no more."""
        for number in range(FAILURES):
            asked = self.ask()
            wait_until(lambda: len(self.handed_off()) > number)  # noqa: B023
            self.decode.fail(self.handed_off()[-1], "transfer", fault="pair")
            self.serve_whole(asked)

    def serve_whole(self, asked: Future[httpx.Response]) -> None:
        """Answer the one request that is under way, where one node serves it."""
        before = self.handed_off()
        wait_until(lambda: self.whole() is not None)
        node, request = self.whole() or (self.decode, before[0])
        node.reply(request)
        assert asked.result().status_code == 200
        self.answered.add(request.room)
        assert self.handed_off() == before

    def whole(self) -> tuple[FakeNode, Generate] | None:
        """A node that was asked to serve a request alone, and has not yet."""
        found = [(n, g) for n in self.nodes for g in n.generates if not g.peer]
        return next(((n, g) for n, g in found if g.room not in self.answered), None)


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
@pytest.mark.parametrize("fault", ["pair", "peer"])
def test_a_request_whose_hand_off_failed_is_served_by_one_node(
    cluster: Cluster, fault: Any, policy: str
) -> None:
    d = Deployment(cluster, max_failovers=1, policy=policy)
    asked = d.ask()
    first = d.decode.wait_generate()
    assert first.peer == d.prefill.instance_id
    d.decode.fail(first, "transfer", fault=fault)
    d.serve_whole(asked)


def test_a_way_on_which_hand_offs_fail_is_left_until_a_probe_succeeds(cluster: Cluster) -> None:
    """Neither node is taken out meanwhile, and no request pays for another try."""
    d = Deployment(cluster)
    d.fail_hand_offs()
    assert [w["problem"] for w in d.client.get("/workers").json()["workers"]] == [None, None]
    d.serve_whole(d.ask())
    for number in range(2):
        wait_until(lambda: len(d.probes()) > number)  # noqa: B023
        d.serve_whole(d.ask())
        probe = d.probes()[-1]
        if number == 0:
            d.decode.fail(probe, "transfer", fault="pair")
    d.prefill.reply(next(g for g in d.prefill.generates if g.room == probe.room))
    d.decode.reply(probe)
    before = len(d.handed_off())

    def is_used() -> bool:
        asked = d.ask()
        wait_until(lambda: len(d.handed_off()) > before or d.whole() is not None)
        if d.whole() is not None:
            d.serve_whole(asked)
            return False
        wait_until(lambda: d.prefill.generates[-1].room == d.decode.generates[-1].room)
        d.prefill.reply(d.prefill.generates[-1])
        d.decode.reply(d.decode.generates[-1])
        assert asked.result().status_code == 200
        return True

    wait_until(is_used)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_is_started_again_is_handed_requests_at_once(
    cluster: Cluster, role: str
) -> None:
    d = Deployment(cluster)
    d.fail_hand_offs()
    node = d.prefill if role == "prefill" else d.decode
    node.restart()

    def is_back() -> bool:
        found = d.client.get("/workers").json()["workers"]
        return [w["ready"] for w in found if w["instance_id"] == node.instance_id] == [True]

    wait_until(is_back)
    for each in d.nodes:  # their loads count what was just sent there until they report again
        beats = sum(each.heartbeats.values())
        wait_until(lambda n=each, b=beats: sum(n.heartbeats.values()) > b + 2)
    before, prompts = len(d.handed_off()), len(d.prefill.generates)
    asked = d.ask()
    wait_until(lambda: len(d.handed_off()) > before and len(d.prefill.generates) > prompts)
    request = d.handed_off()[-1]
    d.prefill.reply(d.prefill.generates[-1])
    d.decode.reply(request)
    assert asked.result().status_code == 200
