"""Which nodes a request goes to."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from fake_node import wait_until
from proxy_cluster import wait_for_all

from pd.core.errors import InvalidRequestError, NotFoundError, UnavailableError, UsageError
from pd.proxy.prediction import Demand
from pd.proxy.prefix_tree import PrefixTree
from pd.proxy.routing import (
    IMBALANCE_REQUESTS,
    IMBALANCE_TOKENS,
    CacheAware,
    PowerOfTwo,
    Prompt,
    Random,
    RoundRobin,
    Router,
    make_policy,
)
from pd.proxy.worker import Endpoints, Pages, ServerInfo, Worker

if TYPE_CHECKING:
    from proxy_cluster import Cluster


def worker(role: Any, name: str, **info: Any) -> Worker:
    """A ready worker without a process."""
    made = Worker(role, f"http://{name}")
    defaults = {
        "model": "m",
        "page_size": 4,
        "context_length": 100_000,
        "pages": Pages(25_000),
        "vocab_size": 1000,
    }
    endpoints = Endpoints("tcp://x:1")
    made.claimed = made.info = ServerInfo(
        role=role, instance_id=name, endpoints=endpoints, **defaults | info
    )
    made.alive = made.accepting = True
    return made


def prompt(*tokens: int, namespace: str = "") -> Prompt:
    return Prompt(np.array(tokens, dtype=np.int32), namespace)


LONG = prompt(*range(400))


class TestCacheAware:
    def test_a_prompt_goes_where_its_prefix_is(self) -> None:
        workers = [worker("prefill", name) for name in "abc"]
        policy = CacheAware()
        policy.computed(workers[1], LONG)
        longer = prompt(*range(500))
        assert policy.prefill(workers, longer) == (workers[1], "prefix")
        assert policy.decode(workers, longer) == (workers[1], "prefix")
        assert policy.prefill(workers, prompt(9, 9, 9, 9, 9)).reason == "load"

    def test_the_longest_prefix_wins(self) -> None:
        workers = [worker("prefill", name) for name in "ab"]
        policy = CacheAware()
        policy.computed(workers[0], prompt(*range(200)))
        policy.computed(workers[1], prompt(*range(400)))
        assert policy.prefill(workers, prompt(*range(600))).worker is workers[1]

    def test_cache_salts_do_not_meet(self) -> None:
        workers = [worker("prefill", name) for name in "ab"]
        policy = CacheAware()
        policy.computed(workers[1], LONG)
        assert policy.prefill(workers, LONG._replace(namespace="salt")).reason == "load"

    def test_a_queue_that_costs_more_than_the_prefix_saves_loses(self) -> None:
        workers = [worker("prefill", name) for name in "ab"]
        policy = CacheAware()
        policy.computed(workers[1], LONG)
        workers[1].queued_tokens = 400 + IMBALANCE_TOKENS
        assert policy.prefill(workers, LONG).worker is workers[1]
        workers[1].pending_tokens = 401 + IMBALANCE_TOKENS
        assert policy.prefill(workers, LONG) == (workers[0], "load")

    def test_a_crowded_decode_node_loses(self) -> None:
        workers = [worker("decode", name) for name in "ab"]
        policy = CacheAware()
        policy.computed(workers[1], LONG)
        workers[0].running, workers[1].running = 8, 10 + IMBALANCE_REQUESTS
        assert policy.decode(workers, LONG).worker is workers[1]
        workers[1].running += 1
        assert policy.decode(workers, LONG) == (workers[0], "load")


def test_a_tree_is_no_larger_than_the_nodes_pool() -> None:
    tree = PrefixTree(page_size=4, pool_tokens=400)
    rng = np.random.default_rng(1)
    for _ in range(50):
        tree.insert(rng.integers(0, 1000, 100, dtype=np.int32), "")
    assert tree._cache.evictable_pages <= 100
    tree.insert(np.arange(5000, dtype=np.int32), "")
    assert tree._cache.evictable_pages <= 100
    assert tree.match(np.arange(5000, dtype=np.int32), "") == 400


@pytest.mark.parametrize("num_prefill", range(1, 7))
@pytest.mark.parametrize("num_decode", range(1, 7))
def test_round_robin_takes_turns_per_role_and_meets_every_pair(
    num_prefill: int, num_decode: int
) -> None:
    policy = RoundRobin()
    prefill = [worker("prefill", name) for name in "abcdef"[:num_prefill]]
    decode = [worker("decode", name) for name in "uvwxyz"[:num_decode]]
    pairs = [
        (policy.prefill(prefill, LONG).worker.url[-1], policy.decode(decode, LONG).worker.url[-1])
        for _ in range(60 * 6)
    ]
    for side, nodes in ((0, num_prefill), (1, num_decode)):
        rounds = [{p[side] for p in pairs[i : i + nodes]} for i in range(0, len(pairs), nodes)]
        assert all(len(seen) == nodes for seen in rounds)
    assert len(set(pairs)) == num_prefill * num_decode


def test_random_uses_all() -> None:
    workers = [worker("prefill", name) for name in "abc"]
    counts = Counter(Random().prefill(workers, LONG).worker.url for _ in range(200))
    assert len(counts) == 3


def test_power_of_two_never_takes_the_most_loaded() -> None:
    workers = [worker("prefill", name) for name in "abc"]
    workers[1].queued_tokens = 10
    assert all(PowerOfTwo().prefill(workers, LONG).worker is not workers[1] for _ in range(50))
    assert PowerOfTwo().prefill(workers[:1], LONG).worker is workers[0]


def test_unknown_policies_are_named() -> None:
    with pytest.raises(UsageError, match="'best'"):
        make_policy("best")


class TestRouter:
    def router(self, *workers: Worker) -> Router:
        return Router(RoundRobin(), workers)

    def test_pairs_fit_together(self) -> None:
        router = self.router(
            worker("prefill", "p1"),
            worker("decode", "d1", model="other"),
            worker("prefill", "p2", transfer_backend="nixl"),
            worker("decode", "d2", transfer_backend="nixl"),
        )
        for _ in range(4):
            route = router.route("m", Demand(LONG))
            assert (route.first.instance_id, route.decode and route.decode.instance_id) == (
                "p2",
                "d2",
            )

    def test_one_transfer_backend_in_common_is_enough(self) -> None:
        """What each node shows as its backend is only the one that it likes best."""
        router = self.router(
            worker("prefill", "p", transfer_backend="nvlink", transfer_backends=["nvlink", "nixl"]),
            worker("decode", "d1", transfer_backend="tcp", transfer_backends=["tcp"]),
            worker("decode", "d2", transfer_backend="nixl", transfer_backends=["nixl", "tcp"]),
        )
        for _ in range(4):
            decode = router.route("m", Demand(LONG)).decode
            assert decode is not None and decode.instance_id == "d2"

    def test_unified_nodes_need_no_partner(self) -> None:
        router = self.router(worker("unified", "u"), worker("decode", "d"))
        assert router.ready()
        assert router.route("m", Demand(LONG)).decode is None

    def test_a_prompt_goes_only_where_it_fits(self) -> None:
        small = worker("decode", "small", pages=Pages(10))
        router = self.router(worker("prefill", "p"), small, worker("decode", "large"))
        for _ in range(3):
            decode = router.route("m", Demand(LONG)).decode
            assert decode is not None
            assert decode.instance_id == "large"
        # What a client may ask is bounded by the pair that can do most.
        assert router.limits("m").pool_tokens == 100_000

    def test_nothing_is_known_nothing_is_there(self) -> None:
        lonely = self.router(worker("prefill", "p"))
        assert not lonely.ready()
        with pytest.raises(UnavailableError):
            lonely.route("m", Demand(LONG))
        with pytest.raises(UnavailableError):
            self.router().limits(None)
        with pytest.raises(NotFoundError, match="served: m"):
            lonely.limits("other")

    def test_limits_refuse_what_no_pair_can_do(self) -> None:
        limits = self.router(
            worker("prefill", "p", context_length=100), worker("decode", "d", pages=Pages(20))
        ).limits(None)
        assert (limits.context_length, limits.pool_tokens) == (100, 80)
        limits.check_prompt(80, 20, explicit=True)
        for size, max_tokens, says in ((100, 1, "context"), (81, 1, "pools"), (60, 41, "exceed")):
            with pytest.raises(InvalidRequestError, match=says):
                limits.check_prompt(size, max_tokens, explicit=True)
        limits.check_prompt(60, 41, explicit=False)
        assert limits.default_max_tokens(60, 41) == 20
        assert limits.default_max_tokens(60, 5) == 5
        assert limits.default_max_tokens(60, None) == 20


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin", "random", "power_of_two"])
def test_every_policy_serves(cluster: Cluster, policy: str) -> None:
    for _ in range(2):
        cluster.pair()
    client = cluster.client(policy=policy)
    wait_until(lambda: all(w["ready"] for w in client.get("/workers").json()["workers"]))
    for i in range(8):
        body = {"input_ids": [i] * 20, "sampling_params": {"max_new_tokens": 3}}
        assert client.post("/generate", json=body).status_code == 200
    if policy == "round_robin":
        assert [len(node.generates) for node in cluster.prefill + cluster.decode] == [4] * 4
    text = client.get("/metrics").text
    decisions = [r for r in text.splitlines() if r.startswith("pd_proxy_routing_decisions_total{")]
    assert sum(float(row.rsplit(" ", 1)[1]) for row in decisions) == 16


def test_a_conversation_stays_on_its_nodes(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.pair()
    proxy = cluster.proxy()
    client = cluster.client(proxy)
    wait_for_all(client)
    conversations = [[100 * i + j for j in range(20)] for i in range(3)]
    rooms: list[list[bytes]] = [[], [], []]
    for _ in range(3):
        for i, tokens in enumerate(conversations):
            before = {g.room for node in cluster.prefill for g in node.generates}
            sampling = {"max_new_tokens": 8}
            body = client.post("/generate", json={"input_ids": tokens, "sampling_params": sampling})
            tokens += body.json()["output_ids"] + [5]
            after = {g.room for node in cluster.prefill for g in node.generates}
            rooms[i] += after - before
    for mine in rooms:
        for nodes in (cluster.prefill, cluster.decode):
            used = [n.url for n in nodes for g in n.generates if g.room in mine]
            assert len(used) == 3
            assert len(set(used)) == 1
    assert all(len(node.generates) == 3 for node in cluster.prefill), "unused caches"


def test_load_counts_what_was_sent_and_not_answered(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.pair(auto=False)
    proxy = cluster.proxy()
    from concurrent.futures import ThreadPoolExecutor

    def post(i: int) -> int:
        body = {"input_ids": [i * 50 + j for j in range(50)]}
        return httpx.post(proxy.url + "/generate", json=body, timeout=20).status_code

    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(post, i) for i in range(6)]
        wait_until(lambda: sum(len(n.generates) for n in cluster.prefill) == 6)
        assert [len(n.generates) for n in cluster.prefill] == [3, 3]
        loads = [w["queued_tokens"] for w in httpx.get(proxy.url + "/workers").json()["workers"]]
        assert loads == [150, 150, 0, 0]
        httpx.post(proxy.url + "/abort_request", json={"abort_all": True})
        assert [r.result() for r in results] == [200] * 6
    loads = [w["queued_tokens"] for w in httpx.get(proxy.url + "/workers").json()["workers"]]
    assert loads == [0, 0, 0, 0]
