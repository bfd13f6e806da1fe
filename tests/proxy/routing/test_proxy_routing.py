"""Which nodes a request goes to."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
import pytest
from elastic_nodes import COST, ITL
from fake_node import wait_until
from proxy_cluster import wait_for_all

from pd.core.errors import InvalidRequestError, NotFoundError, UnavailableError, UsageError
from pd.core.messages import Finish
from pd.core.node_load import NodeLoad
from pd.proxy.nodes.breaker import FAILURES, Breaker
from pd.proxy.nodes.node_handle import Endpoints, NodeHandle, Pages, ServerInfo
from pd.proxy.nodes.prefix_tree import PrefixTree
from pd.proxy.routing.demand import Demand, Prompt
from pd.proxy.routing.policies import (
    IMBALANCE_REQUESTS,
    IMBALANCE_TOKENS,
    CacheAware,
    PowerOfTwo,
    Random,
    RoundRobin,
    make_policy,
)
from pd.proxy.routing.routing import Router

if TYPE_CHECKING:
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate


def handle(role: Any, name: str, **info: Any) -> NodeHandle:
    """A ready worker without a process."""
    made = NodeHandle(role, f"http://{name}")
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
    made.is_alive = made.is_accepting = True
    return made


def prompt(*tokens: int, namespace: str = "") -> Prompt:
    return Prompt(np.array(tokens, dtype=np.int32), namespace)


LONG = prompt(*range(400))


def take_out(breaker: Breaker | None) -> None:
    assert breaker is not None
    for number in range(FAILURES):
        breaker.note_failure([number], "why")
    assert not breaker.allows_requests


class TestCacheAware:
    def test_a_prompt_goes_where_its_prefix_is(self) -> None:
        nodes = [handle("prefill", name) for name in "abc"]
        policy = CacheAware()
        policy.note_computed(nodes[1], LONG)
        longer = prompt(*range(500))
        assert policy.choose_prefill(nodes, longer) == (nodes[1], "prefix")
        assert policy.choose_decode(nodes, longer) == (nodes[1], "prefix")
        assert policy.choose_prefill(nodes, prompt(9, 9, 9, 9, 9)).reason == "load"

    def test_the_longest_prefix_wins(self) -> None:
        nodes = [handle("prefill", name) for name in "ab"]
        policy = CacheAware()
        policy.note_computed(nodes[0], prompt(*range(200)))
        policy.note_computed(nodes[1], prompt(*range(400)))
        assert policy.choose_prefill(nodes, prompt(*range(600))).node is nodes[1]

    def test_cache_salts_do_not_meet(self) -> None:
        nodes = [handle("prefill", name) for name in "ab"]
        policy = CacheAware()
        policy.note_computed(nodes[1], LONG)
        assert policy.choose_prefill(nodes, Prompt(LONG.token_ids, "salt")).reason == "load"

    def test_a_queue_that_costs_more_than_the_prefix_saves_loses(self) -> None:
        nodes = [handle("prefill", name) for name in "ab"]
        policy = CacheAware()
        policy.note_computed(nodes[1], LONG)
        nodes[1].queued_tokens = 400 + IMBALANCE_TOKENS
        assert policy.choose_prefill(nodes, LONG).node is nodes[1]
        nodes[1].pending_tokens = 401 + IMBALANCE_TOKENS
        assert policy.choose_prefill(nodes, LONG) == (nodes[0], "load")

    def test_a_crowded_decode_node_loses(self) -> None:
        nodes = [handle("decode", name) for name in "ab"]
        policy = CacheAware()
        policy.note_computed(nodes[1], LONG)
        nodes[0].running, nodes[1].running = 8, 10 + IMBALANCE_REQUESTS
        assert policy.choose_decode(nodes, LONG).node is nodes[1]
        nodes[1].running += 1
        assert policy.choose_decode(nodes, LONG) == (nodes[0], "load")


def test_a_tree_is_no_larger_than_the_nodes_pool() -> None:
    tree = PrefixTree(page_size=4, pool_tokens=400)
    rng = np.random.default_rng(1)
    for _ in range(50):
        tree.add_tokens(rng.integers(0, 1000, 100, dtype=np.int32), "")
    assert tree._cache.evictable_pages <= 100
    tree.add_tokens(np.arange(5000, dtype=np.int32), "")
    assert tree._cache.evictable_pages <= 100
    assert tree.count_cached(np.arange(5000, dtype=np.int32), "") == 400


@pytest.mark.parametrize("num_prefill", range(1, 7))
@pytest.mark.parametrize("num_decode", range(1, 7))
def test_round_robin_takes_turns_per_role_and_meets_every_pair(
    num_prefill: int, num_decode: int
) -> None:
    policy = RoundRobin()
    prefill = [handle("prefill", name) for name in "abcdef"[:num_prefill]]
    decode = [handle("decode", name) for name in "uvwxyz"[:num_decode]]
    pairs = [
        (
            policy.choose_prefill(prefill, LONG).node.url[-1],
            policy.choose_decode(decode, LONG).node.url[-1],
        )
        for _ in range(60 * 6)
    ]
    for side, nodes in ((0, num_prefill), (1, num_decode)):
        rounds = [{p[side] for p in pairs[i : i + nodes]} for i in range(0, len(pairs), nodes)]
        assert all(len(seen) == nodes for seen in rounds)
    assert len(set(pairs)) == num_prefill * num_decode


def test_random_uses_all() -> None:
    nodes = [handle("prefill", name) for name in "abc"]
    counts = Counter(Random().choose_prefill(nodes, LONG).node.url for _ in range(200))
    assert len(counts) == 3


def test_power_of_two_never_takes_the_most_loaded() -> None:
    nodes = [handle("prefill", name) for name in "abc"]
    nodes[1].queued_tokens = 10
    assert all(PowerOfTwo().choose_prefill(nodes, LONG).node is not nodes[1] for _ in range(50))
    assert PowerOfTwo().choose_prefill(nodes[:1], LONG).node is nodes[0]


def test_unknown_policies_are_named() -> None:
    with pytest.raises(UsageError, match="'best'"):
        make_policy("best")


class TestRouter:
    def router(self, *nodes: NodeHandle) -> Router:
        return Router(RoundRobin(), nodes)

    def test_pairs_fit_together(self) -> None:
        router = self.router(
            handle("prefill", "p1"),
            handle("decode", "d1", model="other"),
            handle("prefill", "p2", transfer_backend="nixl"),
            handle("decode", "d2", transfer_backend="nixl"),
        )
        for _ in range(4):
            route = router.choose_route("m", Demand(LONG))
            assert (
                route.first_node.instance_id,
                route.decode_node and route.decode_node.instance_id,
            ) == (
                "p2",
                "d2",
            )

    def test_one_transfer_backend_in_common_is_enough(self) -> None:
        """What each node shows as its backend is only the one that it likes best."""
        router = self.router(
            handle("prefill", "p", transfer_backend="nvlink", transfer_backends=["nvlink", "nixl"]),
            handle("decode", "d1", transfer_backend="tcp", transfer_backends=["tcp"]),
            handle("decode", "d2", transfer_backend="nixl", transfer_backends=["nixl", "tcp"]),
        )
        for _ in range(4):
            decode = router.choose_route("m", Demand(LONG)).decode_node
            assert decode is not None and decode.instance_id == "d2"

    def test_the_directory_of_a_model_whose_prompts_no_node_computes_names_none(self) -> None:
        router = self.router(
            handle("prefill", "p", model_path="/models/m"),
            handle("decode", "d", model_path="/models/m"),
            handle("decode", "other", model="other", model_path="/models/other"),
        )
        assert router.get_limits("/models/m").model == "m"
        for name in ("other", "/models/other"):
            with pytest.raises(NotFoundError, match=r"there is no model .*served: m"):
                router.get_limits(name)

    def test_a_node_that_no_partner_reaches_is_passed_over(self) -> None:
        cut, whole = handle("prefill", "cut"), handle("prefill", "whole")
        decoders = [handle("decode", "d1"), handle("decode", "d2")]
        router = self.router(cut, whole, *decoders)
        apart = frozenset((cut, decode) for decode in decoders)
        for _ in range(4):
            assert router.choose_route("m", Demand(LONG), apart=apart).first_node is whole
        one = frozenset({(cut, decoders[0])})
        pairs = [router.choose_route("m", Demand(LONG), apart=one)[:2] for _ in range(8)]
        assert {first for first, _ in pairs} == {cut, whole}
        assert (cut, decoders[0]) not in pairs
        nowhere = apart | {(whole, decode) for decode in decoders}
        assert router.choose_route("m", Demand(LONG), apart=nowhere).decode_node in decoders

    def test_unified_nodes_need_no_partner(self) -> None:
        router = self.router(handle("unified", "u"), handle("decode", "d"))
        assert router.can_serve()
        assert router.choose_route("m", Demand(LONG)).decode_node is None

    def test_a_prompt_goes_only_where_it_fits(self) -> None:
        small = handle("decode", "small", pages=Pages(10))
        router = self.router(handle("prefill", "p"), small, handle("decode", "large"))
        for _ in range(3):
            decode = router.choose_route("m", Demand(LONG)).decode_node
            assert decode is not None
            assert decode.instance_id == "large"
        # What a client may ask is bounded by the pair that can do most.
        router.get_limits("m").check_prompt(50_000, 50_000, explicit=True)

    def test_nothing_is_known_nothing_is_there(self) -> None:
        lonely = self.router(handle("prefill", "p"))
        assert not lonely.can_serve()
        with pytest.raises(UnavailableError):
            lonely.choose_route("m", Demand(LONG))
        with pytest.raises(UnavailableError):
            self.router().get_limits(None)
        with pytest.raises(NotFoundError, match="served: m"):
            lonely.get_limits("other")

    def test_limits_refuse_what_no_pair_can_do(self) -> None:
        limits = self.router(
            handle("prefill", "p", context_length=100), handle("decode", "d", pages=Pages(20))
        ).get_limits(None)
        limits.check_prompt(80, 1, explicit=True)
        limits.check_prompt(60, 21, explicit=True)
        for size, max_tokens, says in (
            (100, 1, "context"),
            (81, 1, "pools hold 80"),
            (60, 41, "maximum context length is 100 tokens"),
            (60, 22, "pools hold: 80"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                limits.check_prompt(size, max_tokens, explicit=True)
        limits.check_prompt(60, 41, explicit=False)
        assert limits.choose_max_tokens(60, 41) == 20
        assert limits.choose_max_tokens(60, 5) == 5
        assert limits.choose_max_tokens(60, None) == 20

    def test_limits_are_those_of_whole_routes(self) -> None:
        """One pair takes long prompts, another one long answers, and none both."""
        limits = self.router(
            handle("prefill", "p1", model_id="1", pages=Pages(10)),
            handle("decode", "d1", model_id="1", pages=Pages(100)),
            handle("prefill", "p2", model_id="2", pages=Pages(50)),
            handle("decode", "d2", model_id="2", pages=Pages(50)),
        ).get_limits(None)
        limits.check_prompt(40, 361, explicit=True)
        limits.check_prompt(41, 160, explicit=True)
        with pytest.raises(InvalidRequestError, match="pools hold: 200"):
            limits.check_prompt(41, 161, explicit=True)
        with pytest.raises(InvalidRequestError, match="pools hold 200"):
            limits.check_prompt(201, 1, explicit=True)
        assert limits.choose_max_tokens(40, None) == 360
        assert limits.choose_max_tokens(41, None) == 159

    def test_a_client_that_names_no_length_gets_one_that_fits_what_is_ready(self) -> None:
        large = handle("decode", "large", pages=Pages(100))
        router = self.router(handle("prefill", "p"), handle("decode", "d", pages=Pages(10)), large)
        assert router.get_limits("m").choose_max_tokens(30, None) == 370
        large.is_alive = False
        limits = router.get_limits("m")
        assert limits.choose_max_tokens(30, None) == 10
        assert limits.choose_max_tokens(50, None) == 350, "it waits for the large one"
        limits.check_prompt(30, 370, explicit=True)

    def test_a_context_bounds_prompts_like_a_pool(self) -> None:
        """One node has the context and another one the pool, and no node both."""
        limits = self.router(
            handle("unified", "a", context_length=1000),
            handle("unified", "b", pages=Pages(100)),
        ).get_limits(None)
        with pytest.raises(InvalidRequestError, match="contexts and KV pools hold 999"):
            limits.check_prompt(1000, 1, explicit=False)
        with pytest.raises(InvalidRequestError, match="contexts and KV pools hold: 1000 tokens"):
            limits.check_prompt(500, 501, explicit=True)
        limits.check_prompt(999, 1, explicit=True)

    def test_a_prompt_node_without_a_partner_is_not_ready(self) -> None:
        router = self.router(handle("prefill", "p"), handle("unified", "u", pages=Pages(100)))
        assert router.get_limits("m").choose_max_tokens(100, None) == 300

    def test_a_way_that_is_out_is_there_but_not_ready(self) -> None:
        small = handle("prefill", "small", elastic=True, pages=Pages(100))
        large = handle("decode", "large")
        router = self.router(small, large)
        assert router.get_limits("m").choose_max_tokens(10, None) == 99_990
        take_out(small.get_hand_off(large))
        limits = router.get_limits("m")
        limits.check_prompt(10, 1000, explicit=True)
        assert limits.choose_max_tokens(10, None) == 390
        with pytest.raises(UnavailableError, match="no node can serve"):
            router.choose_route("m", Demand(prompt(*range(10)), output=1000))

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_a_node_is_probed_with_a_partner_to_which_the_way_is_out(self, role: Any) -> None:
        """The probe of the way waits for the node, so the node must not wait for the way."""
        node = handle(role, "node")
        partner = handle("decode" if role == "prefill" else "prefill", "elastic", elastic=True)
        router = self.router(node, partner)
        first, decode = (node, partner) if role == "prefill" else (partner, node)
        take_out(first.get_hand_off(decode))
        take_out(node.breaker)
        route = router.choose_probe_route(node)
        assert route is not None
        assert (route.first_node, route.decode_node) == (first, decode)
        other = handle(partner.role, "other")
        route = self.router(node, partner, other).choose_probe_route(node)
        assert route is not None
        assert other in (route.first_node, route.decode_node), (
            "over a way that works, if there is one"
        )

    def test_limits_compare_no_elastic_nodes_with_each_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are asked for each request."""
        router = self.router(*(handle("unified", f"n{i}", elastic=True) for i in range(50)))

        def difference(*_: object) -> None:
            raise AssertionError("compared")

        monkeypatch.setattr(ServerInfo, "find_difference", difference)
        assert router.get_limits("m").choose_max_tokens(10, None) == 99_990

    def test_an_answer_is_generated_only_where_it_fits(self) -> None:
        """The last token needs no KV."""
        small = handle("decode", "small", pages=Pages(101))
        router = self.router(handle("prefill", "p"), small, handle("decode", "large"))

        def chosen(output: int) -> set[NodeHandle | None]:
            return {
                router.choose_route("m", Demand(LONG, output=output)).decode_node for _ in range(4)
            }

        assert len(chosen(5)) == 2
        assert small not in chosen(6)
        answering = [router.choose_alone("m", Demand(LONG, output=6)).first_node for _ in range(4)]
        assert small not in answering

    def test_a_prompt_needs_no_room_for_its_answer_where_it_is_only_computed(self) -> None:
        first = handle("prefill", "p", pages=Pages(100))
        router = self.router(first, handle("decode", "d"))
        assert router.choose_route("m", Demand(LONG, output=500)).first_node is first

    def test_a_unified_node_sends_nothing_to_another_that_has_more_room(self) -> None:
        small, large = handle("unified", "u", pages=Pages(101)), handle("unified", "large")
        router = self.router(small, handle("decode", "d"), large)
        routes = [router.choose_route("m", Demand(LONG, output=6)) for _ in range(4)]
        assert all((route.first_node, route.decode_node) == (large, None) for route in routes)

    def test_an_elastic_node_without_room_for_the_answer_only_computes_the_prompt(self) -> None:
        small = handle("prefill", "small", elastic=True, pages=Pages(101))
        large = handle("prefill", "large", elastic=True)
        router = self.router(small, large)
        routes = [router.choose_route("m", Demand(LONG, output=6)) for _ in range(4)]
        assert {(route.first_node, route.decode_node) for route in routes} == {
            (small, large),
            (large, None),
        }

    def test_without_a_node_that_has_room_the_request_waits_for_one(self) -> None:
        large = handle("decode", "large")
        router = self.router(handle("prefill", "p"), handle("decode", "d", pages=Pages(101)), large)
        large.is_alive = False
        with pytest.raises(UnavailableError, match="no node can serve"):
            router.choose_route("m", Demand(LONG, output=6))


def elastic_load() -> NodeLoad:
    return NodeLoad(cost=COST, itl=ITL, free_tokens=100_000, chunk=8192)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("failover", ["on", "off"])
def test_requests_go_where_prompt_and_answer_fit(
    cluster: Cluster, failover: str, *, elastic: bool
) -> None:
    """The small node is the idle one, and its role suits."""
    nodes = [cluster.node("prefill", elastic=elastic, pages={"total": 10, "free": 10})]
    nodes += [
        cluster.node("decode", elastic=elastic, pages={"total": pages, "free": pages})
        for pages in (10, 30)
    ]
    if elastic:
        for node in nodes:
            node.load = elastic_load()
        nodes[0].load = msgspec.structs.replace(elastic_load(), queue_seconds=9.0)
    _, small, large = nodes
    large.running = 50
    client = cluster.client(text=False, failover=failover, policy="cache_aware")
    wait_for_all(client)
    for number in range(4):
        body = {"input_ids": [number] * 4, "sampling_params": {"max_new_tokens": 100}}
        answer = client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["output_ids"]) == 100
    assert not _generating(small)
    # The node that computes the prompt may have answered before the other was told.
    wait_until(lambda: len(_generating(large)) == 4)


def test_a_request_that_no_node_can_hold_is_refused(cluster: Cluster) -> None:
    cluster.node("prefill")
    for pages in (10, 30):
        cluster.node("decode", pages={"total": pages, "free": pages})
    client = cluster.client(text=False, failover="on")
    wait_for_all(client)
    for max_tokens, status in ((117, 200), (118, 400)):
        body = {"input_ids": [7] * 4, "sampling_params": {"max_new_tokens": max_tokens}}
        answer = client.post("/generate", json=body)
        assert answer.status_code == status, answer.text
    assert "need more KV than the nodes' KV pools hold: 120 tokens" in answer.text
    answer = client.post("/generate", json={"input_ids": [7] * 4})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("elastic", [False, True])
def test_what_goes_on_after_a_failure_goes_where_it_fits(
    cluster: Cluster, *, elastic: bool
) -> None:
    """The node that would take it is too small, though most of the answer is there already."""
    make = partial(cluster.node, auto=False, elastic=elastic)
    prefill = make("prefill")
    small = make("decode", pages={"total": 10, "free": 10})
    others = [make("decode", pages={"total": 30, "free": 30}) for _ in range(2)]
    if elastic:
        for node in (prefill, small, *others):
            node.load = elastic_load()
        prefill.load = msgspec.structs.replace(elastic_load(), queue_seconds=9.0)
    for node in others:
        node.running = 50
    client = cluster.client(text=False, failover="on")
    wait_for_all(client)
    sampling = {"max_new_tokens": 100, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/generate", json=body)
        wait_until(lambda: any(_generating(node) for node in others))
        lost = next(node for node in others if _generating(node))
        request = _generating(lost)[0]
        lost.say(request, [10, 11, 12])
        lost.fail(request, "node_failed")
        other = next(node for node in others if node is not lost)
        wait_until(lambda: bool(_generating(other)))
        assert not _generating(small)
        (request,) = _generating(other)
        assert request.produced == 3
        other.say(request, [13], position=3, finish=Finish("length"))
        assert asked.result(20).status_code == 200


def _generating(node: FakeNode) -> list[Generate]:
    """Requests whose answer the node is to generate."""
    return [each for each in node.generates if each.peer_bootstrap or not each.peer]


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


@pytest.mark.one_process("each process counts its own requests before the nodes tell")
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
