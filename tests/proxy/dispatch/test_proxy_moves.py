"""Requests that wait at one node move to another where their first token would come earlier."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from elastic_nodes import COST, ITL
from fake_node import wait_until
from proxy_cluster import wait_for_all

from pd.core.messages import Finish
from pd.core.node_load import NodeLoad
from pd.proxy.dispatch.moves import MAX_CHECKS, MAX_MOVES, MAX_UNDER_WAY

if TYPE_CHECKING:
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate, TakeBack

TOKENS = [10, 11, 12]


def queues(nodes: list[FakeNode], *seconds: float) -> None:
    """What nodes report from now on: seconds for which a prompt waits."""
    for node, wait in zip(nodes, seconds, strict=True):
        node.load = NodeLoad(
            cost=COST, itl=ITL, free_tokens=100_000, chunk=8192, queue_seconds=wait
        )


class Deployment:
    """Elastic unified nodes of which the first is idle, and a proxy on them."""

    def __init__(
        self, cluster: Cluster, count: int = 2, others: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """``others``: what all nodes but the first say of themselves."""
        kind = {"auto": False, "elastic": True}
        self.nodes = [cluster.node("unified", **kind)]
        self.nodes += [cluster.node("unified", **kind, **(others or {})) for _ in range(count - 1)]
        queues(self.nodes, 0.0, *[9.0] * (count - 1))
        self.client = cluster.client(text=False, **({"failover": "on"} | options))
        wait_for_all(self.client)
        self._pool = ThreadPoolExecutor(64)

    def ask(self, prompt: list[int], **fields: Any) -> Any:
        """A request under way; its result is the response."""
        sampling = {"max_new_tokens": len(TOKENS), "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling} | fields
        return self._pool.submit(self.client.post, "/generate", json=body)

    def count(self, metric: str) -> dict[str, int]:
        """A counter by outcome."""
        text = self.client.get("/metrics").text
        found = re.findall(rf'^{metric}_total{{outcome="(\w+)"}} (\d+)\.0$', text, re.M)
        return {outcome: int(count) for outcome, count in found}

    def heartbeats(self, count: int) -> None:
        """Wait until every node has told its load so many times."""
        for node in self.nodes:
            before = sum(node.heartbeats.values())
            wait_until(lambda n=node, b=before: sum(n.heartbeats.values()) > b + 2 * count, 60)


def end(node: FakeNode, request: Generate) -> None:
    node.say(request, TOKENS, finish=Finish("length"), cached_tokens=0)


def test_a_waiting_request_moves_to_the_node_that_is_idle(cluster: Cluster) -> None:
    d = Deployment(cluster, slo_ttft_ms=2000)
    busy, idle = d.nodes
    asked = d.ask([1, 2, 3, 4, 5], rid="mine")
    first = busy.wait_generate()
    queues(d.nodes, 9.0, 0.0)
    taken = busy.wait_take_back()
    assert taken.room == first.room
    busy.give_back(taken, taken=True)
    second = idle.wait_generate()
    assert (second.token_ids, second.params) == (first.token_ids, first.params)
    assert (second.rid, second.produced) == ("mine", 0)
    assert first.ttft == second.ttft == 2.0, "both know what was promised"
    assert 0 <= first.waited < second.waited
    busy.say(first, [99], finish=Finish("length"))  # is ignored
    end(idle, second)
    answer = asked.result(10).json()
    assert answer["output_ids"] == TOKENS
    assert "failovers" not in answer["meta_info"]
    assert (d.count("pd_proxy_moves"), d.count("pd_proxy_failovers")) == ({"moved": 1}, {})


def test_a_request_that_has_begun_stays_and_is_not_asked_for_again(cluster: Cluster) -> None:
    d = Deployment(cluster)
    busy, idle = d.nodes
    asked = d.ask([1, 2, 3])
    request = busy.wait_generate()
    assert request.ttft > 0, "what follows from the speed of the nodes, as nothing was promised"
    assert 0 <= request.waited < 10
    queues(d.nodes, 9.0, 0.0)
    busy.give_back(busy.wait_take_back(), taken=False)
    d.heartbeats(3)
    end(busy, request)
    assert asked.result(10).json()["output_ids"] == TOKENS
    assert (len(busy.take_backs), idle.generates) == (1, [])
    assert d.count("pd_proxy_moves") == {"begun": 1}


def test_tokens_that_cross_the_question_are_the_answer(cluster: Cluster) -> None:
    d = Deployment(cluster)
    busy, idle = d.nodes
    asked = d.ask([1, 2, 3])
    request = busy.wait_generate()
    queues(d.nodes, 9.0, 0.0)
    taken = busy.wait_take_back()
    end(busy, request)
    assert asked.result(10).json()["output_ids"] == TOKENS
    busy.give_back(taken, taken=False)
    wait_until(lambda: d.count("pd_proxy_moves") == {"ended": 1})
    assert idle.generates == []


@pytest.mark.parametrize("seconds", [(0.04, 0.0), (9.0, 8.6)])
def test_a_request_stays_where_a_move_would_gain_little(
    cluster: Cluster, seconds: tuple[float, float]
) -> None:
    """40 ms are little; so is what long queues differ by from one report to the next."""
    d = Deployment(cluster)
    asked = d.ask([1, 2, 3])
    request = d.nodes[0].wait_generate()
    queues(d.nodes, *seconds)
    d.heartbeats(2)
    assert d.nodes[0].take_backs == []
    end(d.nodes[0], request)
    assert asked.result(10).status_code == 200


@pytest.mark.parametrize("options", [{"elastic": "off"}, {"policy": "round_robin"}])
def test_nothing_moves_without_predictions(cluster: Cluster, options: dict[str, Any]) -> None:
    d = Deployment(cluster, **options)
    pending = [d.ask([n, 2, 3]) for n in range(4)]
    wait_until(lambda: sum(len(node.generates) for node in d.nodes) == 4)
    queues(d.nodes, 9.0, 0.0)
    d.heartbeats(2)
    for node in d.nodes:
        assert node.take_backs == []
        for request in node.generates:
            end(node, request)
    assert all(p.result(10).status_code == 200 for p in pending)


def test_a_request_moves_only_so_often(cluster: Cluster) -> None:
    d = Deployment(cluster)
    asked = d.ask([1, 2, 3])
    d.nodes[0].wait_generate()
    here, there = d.nodes
    for number in range(MAX_MOVES):
        queues([here, there], 9.0, 0.0)
        here.give_back(here.wait_take_back(number // 2 + 1), taken=True)
        there.wait_generate(number // 2 + 1)
        here, there = there, here
    queues([here, there], 9.0, 0.0)
    d.heartbeats(2)
    assert sum(len(node.take_backs) for node in d.nodes) == MAX_MOVES
    end(here, here.generates[-1])
    assert asked.result(10).json()["output_ids"] == TOKENS


@pytest.mark.one_process("each process moves its own requests")
def test_a_node_is_asked_for_few_at_a_time_the_youngest_first(cluster: Cluster) -> None:
    d = Deployment(cluster)
    busy, idle = d.nodes
    pending = []
    for number in range(2 * MAX_UNDER_WAY):
        pending.append(d.ask([number] * 5))
        busy.wait_generate(number + 1)
    queues(d.nodes, 9.0, 0.0)
    busy.wait_take_back(MAX_UNDER_WAY)
    d.heartbeats(2)
    rooms = [request.room for request in busy.generates]
    assert [asked.room for asked in busy.take_backs] == rooms[: MAX_UNDER_WAY - 1 : -1]
    for asked in busy.take_backs:
        busy.give_back(asked, taken=True)
    idle.wait_generate(MAX_UNDER_WAY)
    queues(d.nodes, 0.0, 0.0)
    for request in busy.generates[:MAX_UNDER_WAY]:
        end(busy, request)
    for request in idle.generates:
        end(idle, request)
    assert all(p.result(10).json()["output_ids"] == TOKENS for p in pending)


@pytest.mark.one_process("each process moves its own requests")
def test_requests_that_cannot_move_hide_no_older_ones(cluster: Cluster) -> None:
    """The other node takes short prompts only, and the last ones are long."""
    d = Deployment(cluster, others={"context_length": 20})
    busy, idle = d.nodes
    pending = []
    for number in range(1 + 2 * MAX_CHECKS):
        pending.append(d.ask([number] * (50 if number else 5)))
        busy.wait_generate(number + 1)
    queues(d.nodes, 9.0, 0.0)
    asked = busy.wait_take_back()
    assert asked.room == busy.generates[0].room
    busy.give_back(asked, taken=True)
    end(idle, idle.wait_generate())
    for request in busy.generates[1:]:
        end(busy, request)
    assert all(p.result(10).json()["output_ids"] == TOKENS for p in pending)


def test_the_node_dies_while_it_is_asked(cluster: Cluster) -> None:
    """Its answer is lost with it; that is a failover."""
    d = Deployment(cluster)
    busy, idle = d.nodes
    asked = d.ask([1, 2, 3])
    busy.wait_generate()
    queues(d.nodes, 9.0, 0.0)
    busy.wait_take_back()
    busy.kill()
    end(idle, idle.wait_generate())
    answer = asked.result(10).json()
    assert (answer["output_ids"], len(answer["meta_info"]["failovers"])) == (TOKENS, 1)
    wait_until(lambda: d.count("pd_proxy_moves") == {"ended": 1})
    assert d.count("pd_proxy_failovers") == {"moved": 1}


@pytest.mark.parametrize("how", ["disconnect", "abort"])
def test_a_request_that_ends_while_it_is_asked_for_goes_nowhere(cluster: Cluster, how: str) -> None:
    d = Deployment(cluster)
    busy, idle = d.nodes
    body = json.dumps({"input_ids": [1, 2, 3], "rid": "hasty"})
    head = "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    address = d.client.base_url.host, d.client.base_url.port
    with socket.create_connection(address) as connection:
        connection.sendall((head + body).encode())
        request = busy.wait_generate()
        queues(d.nodes, 9.0, 0.0)
        taken = busy.wait_take_back()
        if how == "abort":
            d.client.post("/abort_request", json={"rid": "hasty"})
            busy.wait_abort(request.room)
    busy.wait_abort(request.room)
    busy.give_back(taken, taken=True)
    wait_until(lambda: d.count("pd_proxy_moves") == {"ended": 1})
    d.heartbeats(1)
    assert idle.generates == []


class Scripted:
    """What the nodes do with their requests, in an order that the test draws."""

    def __init__(self, nodes: list[FakeNode], rng: random.Random) -> None:
        self.nodes, self._rng = nodes, rng
        self._gone: set[bytes] = set()  # given back, or answered
        self._begun: set[bytes] = set()
        self._seen: set[tuple[str, bytes]] = set()

    def turn(self, *, flip: bool) -> None:
        """Some time passes at every node."""
        if flip:
            queues(self.nodes, *[self._rng.choice([0.0, 0.2, 9.0]) for _ in self.nodes])
        for node in self.nodes:
            for asked in list(node.take_backs):
                key = (node.instance_id, asked.room)
                if key not in self._seen and self._rng.random() < 0.5:
                    self._seen.add(key)
                    self._answer(node, asked)
            waiting = [r for r in node.generates if r.room not in self._gone]
            if waiting and self._rng.random() < 0.3:
                self._work(node, self._rng.choice(waiting))

    def _answer(self, node: FakeNode, asked: TakeBack) -> None:
        taken = asked.room not in self._gone | self._begun and self._rng.random() < 0.7
        if taken:
            self._gone.add(asked.room)
        node.give_back(asked, taken=taken)

    def _work(self, node: FakeNode, request: Generate) -> None:
        if request.room in self._begun:
            self._gone.add(request.room)
            end(node, request)
        else:
            self._begun.add(request.room)
            node.say(request, TOKENS[:1], cached_tokens=0)


def test_whatever_happens_every_request_gets_its_tokens(cluster: Cluster, seed: int) -> None:
    """Queues flip, nodes answer late, begin meanwhile, and one is killed; some clients leave."""
    rng = random.Random(seed)
    d = Deployment(cluster, 3, max_failovers=20)
    script = Scripted(d.nodes, rng)
    pending: dict[int, Any] = {}
    aborted: set[int] = set()
    killed = rng.randrange(100, 200)
    outcomes: dict[str, int] = {}
    deadline = time.monotonic() + 60
    for step in itertools.count():
        if step % 20 == 0:
            outcomes = d.count("pd_proxy_moves")
            if step > 240 and {"moved", "begun"} <= set(outcomes):
                break
            assert time.monotonic() < deadline, (outcomes, seed)
        if rng.random() < 0.25:
            pending[step] = d.ask([step % 1000] * rng.randrange(3, 60), rid=str(step))
        if step == killed:
            d.nodes[0].restart()
        if pending and rng.random() < 0.02:
            aborted.add(rid := rng.choice(list(pending)))
            d.client.post("/abort_request", json={"rid": str(rid)})
        script.turn(flip=step % 20 == 0)
        time.sleep(0.01)
    deadline = time.monotonic() + 30
    while not all(p.done() for p in pending.values()):
        assert time.monotonic() < deadline, seed
        script.turn(flip=False)
        time.sleep(0.005)
    for number, response in pending.items():
        if number not in aborted:
            assert response.result().json()["output_ids"] == TOKENS, (number, seed)
    wait_until(lambda: d.client.get("/workers").json()["workers"][1]["running"] == 0)
