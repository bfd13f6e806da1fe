"""A proxy over elastic nodes: real HTTP, real nodes in this process."""

from __future__ import annotations

import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster import TokenClient, random_prompts, wait_idle, wait_until
from tiny import tiny_node

from pd.proxy.config import ProxyConfig
from pd.proxy.nodes.reported_prefixes import ReportedPrefixes
from pd.proxy.server import Proxy, ProxyThread
from pd.proxy.workers.parent import ProxyProcesses
from pd.radix.prefix_hashes import to_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from pd.launch import NodeServer

SAMPLING = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}


class Deployment:
    """A prefill and a decode node, both elastic, a proxy on them, and its client."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self._stack = stack
        self.prefill, self.decode = self.node("prefill"), self.node("decode")
        config = ProxyConfig(
            port=0, prefill=[self.prefill.url], decode=[self.decode.url], **options
        )
        make: Any = Proxy if config.workers == 1 else ProxyProcesses
        proxy = ProxyThread(config, make)
        stack.callback(proxy.stop)
        self.proxy = proxy.start(10.0)
        self.client = stack.enter_context(httpx.Client(base_url=self.proxy.url, timeout=120))

    def node(self, role: str) -> NodeServer:
        made = tiny_node(role, elastic="auto", chunked_prefill_size=64)
        self._stack.callback(made.stop)
        return made

    def ask(self, prompt: list[int], **sampling: Any) -> list[int]:
        body = {"input_ids": prompt, "sampling_params": SAMPLING | sampling}
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["output_ids"]
        return tokens

    def moves(self) -> dict[str, float]:
        """Waiting requests that nodes were asked to give back, by outcome."""
        text = self.client.get("/metrics").text
        found = re.findall(r'^pd_proxy_moves_total{outcome="(\w+)"} ([\d.]+)$', text, re.M)
        return {outcome: float(count) for outcome, count in found}

    def ways(self) -> dict[str, float]:
        """Requests by how they went: ``split``, ``whole``, ``swapped``."""
        text = self.client.get("/metrics").text
        found = re.findall(
            r'^pd_proxy_routing_decisions_total{reason="(\w+)",role="\w+"} ([\d.]+)$', text, re.M
        )
        ways: dict[str, float] = {}
        for reason, count in found:
            ways[reason] = ways.get(reason, 0) + float(count)
        return ways


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with ExitStack() as stack:
        yield Deployment(stack)


def test_a_burst_uses_both_nodes_for_prompts_and_gives_the_same_tokens(
    deployment: Deployment, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = list(random_prompts(seed, [rng.randrange(100, 400) for _ in range(16)]))
    one_by_one = [deployment.ask(prompt) for prompt in prompts]
    for server in (deployment.prefill, deployment.decode):
        server.node.flush_cache()
    before = deployment.ways()
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(deployment.ask, prompts)) == one_by_one, seed
    after = deployment.ways()
    assert after["whole"] > before.get("whole", 0), (before, after)
    for server in (deployment.prefill, deployment.decode):
        wait_idle(server)


def test_predicted_first_tokens_are_compared_with_what_happened(deployment: Deployment) -> None:
    deployment.ask(list(range(50)))
    text = deployment.client.get("/metrics").text
    assert re.search(r"^pd_proxy_ttft_prediction_error_count 1\.0$", text, re.M), text


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_prompts_that_wait_move_to_the_idle_node_and_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, seed: int, workers: int
) -> None:
    """The prefill node stands still, and another proxy has sent it a long queue."""
    with ExitStack() as stack:
        deployment = Deployment(stack, workers=workers)
        prefill, decode = deployment.prefill, deployment.decode
        prompts = list(random_prompts(seed, [5, 60, 150, 200, 300, 400] * 8))
        scheduler = prefill.node.scheduler.prefill
        monkeypatch.setattr(scheduler, "plan_step", lambda budget, most: [])
        other = TokenClient([prefill, decode])
        stack.callback(other.close)
        with ThreadPoolExecutor(len(prompts)) as pool:
            pending: list[Future[list[int]]] = []
            # How many it takes depends on how fast each node measured itself to be.
            while not scheduler.waiting:
                assert len(pending) < len(prompts), "all prompts went to the decode node"
                pending.append(pool.submit(deployment.ask, prompts[len(pending)]))
                time.sleep(0.05)
            queue = [other.generate(p, (prefill,)) for p in random_prompts(seed + 1, [900] * 40)]
            answers = [answer.result(60) for answer in pending]
        assert deployment.moves()["moved"] > 0
        assert len(scheduler.waiting) == len(queue), "the requests are at the decode node"
        monkeypatch.undo()
        for request in queue:
            other.abort(request)
        for server in (prefill, decode):
            wait_idle(server)
            server.node.flush_cache()
        assert answers == [deployment.ask(prompt) for prompt in prompts[: len(answers)]], seed


@pytest.mark.parametrize("gone", ["prefill", "decode"])
def test_requests_are_served_while_all_nodes_of_a_role_are_gone(
    deployment: Deployment, gone: str
) -> None:
    expected = deployment.ask(list(range(30)))
    lost, left = deployment.prefill, deployment.decode
    if gone == "decode":
        lost, left = left, lost
    lost.stop()
    wait_until(lambda: len(ready(deployment)) == 1, 10)
    assert deployment.client.get("/readiness").status_code == 200
    assert deployment.ask(list(range(30))) == expected
    back = deployment.node(gone)
    body = {"role": gone, "url": back.url}
    assert deployment.client.post("/workers", json=body).status_code == 200
    wait_until(lambda: len(ready(deployment)) == 2, 10)
    assert deployment.ask(list(range(30))) == expected
    wait_idle(left)


def ready(deployment: Deployment) -> list[Any]:
    nodes = deployment.client.get("/workers").json()["workers"]
    return [node for node in nodes if node["ready"]]


def test_prompts_that_arrive_while_answers_stream_lose_nothing(
    deployment: Deployment, seed: int
) -> None:
    """Streams and prompts of all sizes, some of them longer than half of a pool."""
    rng = random.Random(seed)
    asked = [(rng.choice([5, 60, 300, 900]), rng.choice([1, 10, 100])) for _ in range(36)]
    prompts = random_prompts(seed, [length for length, _ in asked])

    def ask(prompt: list[int], count: int) -> int:
        return len(deployment.ask(prompt, max_new_tokens=count))

    counts = [count for _, count in asked]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, prompts, counts)) == counts, seed
    for server in (deployment.prefill, deployment.decode):
        wait_idle(server)


def test_a_role_changes_under_load_without_a_trace(deployment: Deployment, seed: int) -> None:
    """Answers go on, nothing fails, and what is cached stays."""
    prompts = list(random_prompts(seed, [200] * 8))
    expected = [deployment.ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(deployment.ask, prompt) for prompt in prompts]
        for server, role in ((deployment.prefill, "decode"), (deployment.decode, "prefill")):
            changed = deployment.client.post(f"/workers/{server.instance_id}", json={"role": role})
            assert changed.status_code == 200, changed.text
        assert [request.result() for request in pending] == expected
    roles = [node["role"] for node in ready(deployment)]
    assert roles == ["decode", "prefill"]
    found = hit_tokens(deployment)
    assert [deployment.ask(prompt) for prompt in prompts] == expected
    assert hit_tokens(deployment) >= found + len(prompts) * 196, "whichever node computes them"


def hit_tokens(deployment: Deployment) -> int:
    nodes = (deployment.prefill, deployment.decode)
    return sum(server.node.core.memory.radix.hit_tokens for server in nodes)


def test_the_proxy_knows_what_nodes_have_cached_under_eviction(
    deployment: Deployment, seed: int
) -> None:
    """Conversations that need several times the pools, some turns past the proxy. The caches are
    what the proxy believes, page by page, and then it is right about the next request, too."""
    nodes = deployment.proxy.proxy._pool.nodes
    caches = [server.node.core.memory.radix for server in (deployment.prefill, deployment.decode)]

    def is_known() -> bool:
        # Before its first report a node has the tree of what was sent there.
        if not all(isinstance(node.tree, ReportedPrefixes) for node in nodes):
            return False
        pairs = zip(nodes, caches, strict=True)
        return all(w.tree._held == set(to_numbers(cache.join_hashes())) for w, cache in pairs)

    rng = random.Random(seed)
    histories = list(random_prompts(seed, [300] * 20))
    for _ in range(40):
        history = rng.choice(histories)
        history += deployment.ask(history, max_new_tokens=8)
        wait_until(is_known, 10)
    other = TokenClient([deployment.prefill, deployment.decode])
    try:
        other.generate(range(40), (deployment.prefill, deployment.decode)).tokens()
    finally:
        other.close()
    wait_until(is_known, 10)
    assert sum(cache.evicted_pages for cache in caches) > 0
    text = deployment.client.get("/metrics").text
    found = re.findall(r'^pd_proxy_prefix_predictions_total\{.*"(\w+)"\} ([\d.]+)$', text, re.M)
    counted = {outcome: float(count) for outcome, count in found}
    assert counted.get("right") == sum(counted.values()) == 40, (counted, seed)


@pytest.mark.full
def test_service_goes_on_while_all_nodes_of_each_role_are_gone_in_turn(
    deployment: Deployment, seed: int
) -> None:
    """Failover and roles that are preferences, together: no request fails, and each has its
    tokens."""
    prompts = list(random_prompts(seed, [20, 90, 200, 40]))
    expected = [deployment.ask(prompt, max_new_tokens=60) for prompt in prompts]
    over = threading.Event()

    def keep_asking(number: int) -> int:
        answered = 0
        while not over.is_set() or not answered:
            which = (number + answered) % len(prompts)
            assert deployment.ask(prompts[which], max_new_tokens=60) == expected[which], seed
            answered += 1
        return answered

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(keep_asking, number) for number in range(4)]
        try:
            present = {"prefill": deployment.prefill, "decode": deployment.decode}
            for role in ("prefill", "decode"):
                time.sleep(0.3)
                present[role].stop()
                wait_until(lambda: len(ready(deployment)) == 1, 10)
                time.sleep(0.3)
                present[role] = deployment.node(role)
                body = {"role": role, "url": present[role].url}
                assert deployment.client.post("/workers", json=body).status_code == 200
                wait_until(lambda: len(ready(deployment)) == 2, 10)
        finally:
            over.set()
        assert all(client.result() for client in clients)
