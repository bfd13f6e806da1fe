"""Nodes with ``--elastic auto`` compute prompts and generate, whatever role they started in."""

from __future__ import annotations

import random
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Cluster, TokenClient, random_prompts, wait_idle, wait_until
from lacking import require_backend
from raw_peer import RawPeer
from requests_for_tests import make_request
from tiny import TOKEN_BYTES, tiny_cluster, tiny_node

from pd.core import step_cost
from pd.core.messages import NodeHeartbeat, ProxyHeartbeat
from pd.core.step_cost import StepCost, StepShape
from pd.node.load import node_load
from pd.scheduling.cost_model import step_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster import Pending

    from pd.core.node_load import NodeLoad
    from pd.launch import NodeServer
    from pd.scheduling.step import Work

SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 2}
ROLES = ("prefill", "decode", "unified")


def elastic_cluster(**settings: Any) -> Cluster:
    """A node of each role, each of which can do everything."""
    return tiny_cluster(1, 1, 1, elastic="auto", chunked_prefill_size=48, **settings)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with elastic_cluster(kv_digest=True) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> Callable[[list[list[int]]], list[list[list[int]]]]:
    """What a single node with ``--elastic off`` answers."""

    def answers(prompts: list[list[int]]) -> list[list[list[int]]]:
        with tiny_cluster(0, 0, 1) as single:
            sent = [single.client.generate(p, single.unified, **SAMPLED) for p in prompts]
            return [request.result(60) for request in sent]

    return answers


def test_every_way_of_a_request_gives_the_same_tokens(
    cluster: Cluster, expected: Callable[..., Any], seed: int
) -> None:
    """The ordinary split, the split the other way round, and whole requests on each node; all
    together, so that every node computes prompts and generates in the same steps."""
    prompts = list(random_prompts(seed, [1, 4, 33, 48, 100, 150]))
    prompts += [prompts[4][:60] + prompts[2], prompts[5][:77] + prompts[0]]
    ways = [(first,) for first in cluster.nodes]
    ways += [(p, d) for p in cluster.nodes for d in cluster.nodes if p is not d]
    random.Random(seed).shuffle(ways)
    pending = [[cluster.client.generate(p, way, **SAMPLED) for p in prompts] for way in ways]
    wanted = expected(prompts)
    for way, requests in zip(ways, pending, strict=True):
        roles = [server.node.role for server in way]
        assert [request.result(60) for request in requests] == wanted, (roles, seed)
    cluster.wait_idle()


def test_a_decode_node_hands_a_prompt_to_a_prefill_node(cluster: Cluster) -> None:
    (prompt,) = random_prompts(11, [80])
    prefill, decode = cluster.pair
    request = cluster.client.generate(prompt, (decode, prefill))
    assert len(request.tokens()) == 16
    assert request.transferred_bytes == 80 * TOKEN_BYTES
    cached = cluster.client.generate([*prompt, 1], (prefill, decode))
    cached.tokens()
    assert cached.cached_tokens == 80, "the node that received the KV has it as a prefix"
    assert cached.transferred_bytes == TOKEN_BYTES, "so has the one that computed it"


def test_the_last_node_serves_alone(cluster: Cluster) -> None:
    for server in cluster.nodes:
        assert len(cluster.client.generate(range(20), (server,)).tokens()) == 16


def test_a_step_computes_prompts_and_answers(cluster: Cluster) -> None:
    decode = cluster.decode[0]
    scheduler = decode.node.scheduler
    process, mixed = scheduler.process_step, []

    def watching(works: list[Work]) -> None:
        mixed.append({work.sequence.is_decoding for work in works} == {True, False})
        process(works)

    scheduler.process_step = watching  # type: ignore[method-assign]
    try:
        stream = cluster.client.generate(range(9), cluster.pair, max_tokens=200)
        wait_until(lambda: len(stream.choices[0].tokens) > 3, 20)
        cluster.client.generate(range(9, 109), (decode, cluster.prefill[0])).tokens()
        stream.tokens()
    finally:
        scheduler.process_step = process  # type: ignore[method-assign]
    assert any(mixed)


def test_the_node_says_that_it_is_elastic(cluster: Cluster) -> None:
    for server, role in zip(cluster.nodes, ROLES, strict=True):
        info: Any = server.node.server_info()
        assert (info["role"], info["elastic"]) == (role, True)
        assert info["endpoints"]["bootstrap"] == server.bootstrap_url
        assert info["transfer_backends"] == ["tcp"]


def test_nodes_whose_pools_are_full_of_each_others_prompts_get_on(seed: int) -> None:
    """Every prompt takes nearly half of a pool; half of them go each way, while streams grow until
    they are retracted."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {"kv_cache_tokens": 256, "reserved_decode_tokens": 2}
    with tiny_cluster(1, 1, elastic="auto", chunked_prefill_size=32, **settings) as cluster:
        there, back = cluster.pair, cluster.pair[::-1]
        prompts = list(random_prompts(seed, [rng.randrange(60, 125) for _ in range(24)]))
        pending = [
            cluster.client.generate(
                prompt,
                rng.choice([there, back, there[:1], back[:1]]),
                max_tokens=rng.choice([1, 8, 60]),
            )
            for prompt in prompts
        ]
        for request in pending:
            request.tokens()
        cluster.wait_idle()


def send_both_ways(
    cluster: Cluster,
    prompts: Iterator[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    max_tokens: int = 60,
) -> list[Pending]:
    """One prompt each way; neither is computed before both have memory at the other node."""
    there, back = cluster.pair, cluster.pair[::-1]
    with monkeypatch.context() as patch:
        for server in cluster.nodes:
            prefill = server.node.scheduler.prefill
            patch.setattr(prefill, "plan_step", lambda budget, max_running: [])
        pending = [
            cluster.client.generate(prompt, way, max_tokens=max_tokens)
            for prompt, way in zip(prompts, (there, back), strict=True)
        ]

        def promised(server: NodeServer) -> bool:
            return all(r.outgoing is None or r.outgoing.reservation for r in server.node.requests)

        wait_until(lambda: all(s.node.receiving.incoming for s in cluster.nodes), 5)
        wait_until(lambda: all(promised(server) for server in cluster.nodes), 5)
    return pending


def test_answers_that_will_come_keep_no_memory_from_the_prompts_they_wait_for(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of each pool is promised, the prompt here takes the rest: the answer cannot grow yet.
    with tiny_cluster(1, 1, elastic="auto", kv_cache_tokens=128) as cluster:
        pending = send_both_ways(cluster, random_prompts(seed, [60, 60]), monkeypatch)
        for request in pending:
            request.tokens(20)
        cluster.wait_idle()


@pytest.mark.parametrize(
    "backend",
    ["tcp", "fake", *(pytest.param(name, marks=pytest.mark.full) for name in ("nixl", "mooncake"))],
)
def test_nodes_that_promised_each_other_more_than_half_of_their_memory_get_on(
    seed: int, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    # Either prompt fits into a pool alone, and neither beside the other.
    settings: dict[str, Any] = {"kv_cache_tokens": 128, "transfer_backend": backend}
    with tiny_cluster(1, 1, elastic="auto", **settings) as cluster:
        pending = send_both_ways(cluster, random_prompts(seed, [100, 90]), monkeypatch, 20)
        for request in pending:
            assert len(request.tokens(20)) == 20
        cluster.wait_idle()


@pytest.mark.parametrize(
    ("small", "large", "places"),
    [
        pytest.param(
            ("decode",),
            ("prefill", "decode"),
            256,
            id="the-large-one-from-its-peer",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("prefill", "decode"),
            ("decode",),
            256,
            id="the-small-ones-from-its-peer",
            marks=pytest.mark.full,
        ),
        pytest.param(("decode", "prefill"), ("prefill", "decode"), 256, id="both-ways"),
        pytest.param(
            ("prefill", "decode"), ("decode",), 4, id="few-places", marks=pytest.mark.full
        ),
    ],
)
def test_a_large_request_gets_its_turn_though_small_ones_come_all_the_time(
    seed: int, small: tuple[str, ...], large: tuple[str, ...], places: int
) -> None:
    (long,), others = random_prompts(seed, [440]), random_prompts(seed + 1, [30] * 10_000)
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "kv_cache_tokens": 512,
        "page_size": 8,
        "reserved_decode_tokens": 1,
        "max_running_requests": places,
    }
    with tiny_cluster(1, 1, elastic="auto", **settings) as cluster:
        servers = {server.node.role: server for server in cluster.nodes}
        pending: list[Pending] = []

        def keep_busy(until: Callable[[], bool], seconds: float) -> None:
            ended = time.monotonic() + seconds
            while not until() and time.monotonic() < ended:
                pending[:] = [request for request in pending if not request.done.is_set()]
                while len(pending) < 24:
                    way, length = [servers[role] for role in small], rng.randrange(10, 40)
                    pending.append(cluster.client.generate(next(others), way, max_tokens=length))
                time.sleep(0.005)

        keep_busy(lambda: False, 1.0)
        way = [servers[role] for role in large]
        request = cluster.client.generate(long, way, max_tokens=8)
        keep_busy(request.done.is_set, 60.0)
        assert request.done.is_set(), cluster.decode[0].node.server_info()


def test_a_lost_node_takes_only_what_depends_on_it(seed: int) -> None:
    with elastic_cluster() as cluster:
        (prefill, decode), unified = cluster.pair, cluster.unified[0]
        for way in ((decode, prefill), (prefill, decode), (prefill, unified)):
            cluster.client.generate(range(30), way).tokens()
        unaffected = cluster.client.generate(range(40), (prefill, unified), max_tokens=100)
        decode.node.stop()
        assert len(unaffected.tokens()) == 100
        replacement = tiny_node("decode", elastic="auto")
        client = TokenClient([prefill, unified, replacement])
        try:
            for way in ((prefill, replacement), (replacement, prefill), (replacement, unified)):
                assert len(client.generate(range(30), way).tokens()) == 16
        finally:
            client.close()
            replacement.stop()


def full(*cell: Any) -> Any:
    return pytest.param(*cell, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("first", "second", "backend"),
    [
        (1, 1, "tcp"),
        full(2, 1, "tcp"),
        full(1, 2, "tcp"),
        full(2, 2, "tcp"),
        full(1, 1, "nixl"),
        full(1, 1, "mooncake"),
        full(2, 1, "nixl"),
        full(2, 2, "mooncake"),
    ],
)
def test_nodes_of_any_number_of_ranks_hand_prompts_over_both_ways(
    expected: Callable[..., Any], seed: int, first: int, second: int, backend: str
) -> None:
    """Over every backend, and between pages of different sizes."""
    require_backend(backend)
    prompts = list(random_prompts(seed, [5, 48, 150]))
    settings: dict[str, Any] = {"elastic": "auto", "transfer_backend": backend}
    nodes = [
        tiny_node("prefill", tp_size=first, **settings),
        tiny_node("decode", tp_size=second, page_size=8, **settings),
    ]
    client = TokenClient(nodes)
    try:
        ways = [nodes, nodes[::-1], nodes[:1], nodes[1:]]
        pending = [[client.generate(p, way, **SAMPLED) for p in prompts] for way in ways]
        wanted = expected(prompts)
        for number, requests in enumerate(pending):
            assert [r.result(60) for r in requests] == wanted, (number, seed)
        for server in nodes:
            assert server.node.transfer_peers(), "each has sent KV, and received some"
            wait_idle(server)
    finally:
        client.close()
        for server in nodes:
            server.stop()


def test_the_heartbeat_reports_what_requests_would_meet(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = cluster.decode[0]
    costs = decode.node.core.costs
    assert costs is not None
    # A fit to steps of so few tokens may find that they take no time.
    monkeypatch.setattr(costs, "fit", lambda: None)
    monkeypatch.setattr(costs, "cost", StepCost(base=1e-3, first=1e-4, middle=1e-5))
    with RawPeer(decode.node.endpoint, "asking-proxy") as proxy:

        def load(number: int) -> NodeLoad:
            proxy.send(ProxyHeartbeat(to="", sender=proxy.name, number=number))
            beat = proxy.receive(NodeHeartbeat)
            assert beat.answers == number
            return beat.load

        idle = load(1)
        assert (idle.queued_tokens, idle.queue_seconds, idle.streams) == (0, 0.0, 0)
        assert idle.cost.predict_seconds(StepShape(streams=1, context=100)) > 0
        assert idle.free_tokens == 2048
        with decode.node.core.events.lock:
            decode.node.scheduler.prompt_share._seconds = 0.0
        stream = cluster.client.generate(range(9), (decode,), max_tokens=400)
        wait_until(lambda: len(stream.choices[0].tokens) > 3, 20)
        busy = load(2)
        assert 0 < busy.prompt_share < 1, "its prompt was the only one"
        assert (busy.streams, busy.context > 9) == (1, True)
        stream.tokens()
        cluster.wait_idle()
        with decode.node.core.events.lock:  # no step is planned meanwhile
            for prompt in random_prompts(71, [200, 100]):
                decode.node.scheduler.prefill.add_request(make_request(prompt))
            decode.node.scheduler.prefill.add_request(make_request([*range(8), 99, 99]))
            node = decode.node
            waiting = node_load(node.core, node.scheduler, node.receiving, 0.0)
            for request in list(decode.node.scheduler.prefill.waiting):
                decode.node.scheduler.prefill.remove_request(request)
        assert waiting is not None
        assert waiting.queued_tokens == 302, "of the last one, two pages are cached"
        assert waiting.queue_seconds > idle.cost.predict_seconds(StepShape(streams=1, context=100))


def test_prompts_that_wait_are_ordered_by_their_objectives(cluster: Cluster) -> None:
    node = cluster.decode[0].node
    prompts = random_prompts(72, [100, 100, 100])
    with node.core.events.lock:  # no step is planned meanwhile
        queue = node.scheduler.prefill.waiting
        patient, urgent, late = (
            make_request(prompt, ttft=60.0, waited=waited)
            for prompt, waited in zip(prompts, [0.0, 50.0, 70.0], strict=True)
        )
        for request in (late, patient, urgent):
            queue.add_request(request)
        assert list(queue.iter_candidates()) == [urgent, patient, late]
        for request in (late, patient, urgent):
            queue.remove_request(request)


def test_prompts_are_computed_in_slices_beside_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy asks for a pace that a step with more than 8 prompt tokens would miss."""
    decode = cluster.decode[0]
    slow = StepCost(base=1.0, first=0.1)
    costs = decode.node.core.costs
    monkeypatch.setattr(costs, "cost", slow)
    monkeypatch.setattr(costs, "observe_step", lambda shape, seconds: 0.0)
    monkeypatch.setattr(step_cost, "LEAST_SLICE", 1)
    sizes: list[tuple[int, int]] = []
    process = decode.node.scheduler.process_step

    def watching(works: list[Work]) -> None:
        shape = step_shape(works)
        sizes.append((shape.streams, shape.tokens))
        process(works)

    monkeypatch.setattr(decode.node.scheduler, "process_step", watching)
    with RawPeer(decode.node.endpoint, "patient-proxy") as proxy:
        proxy.send(ProxyHeartbeat(to="", sender=proxy.name, itl=1.901))
        proxy.receive(NodeHeartbeat)
        stream = cluster.client.generate(range(9), (decode,), max_tokens=300)
        wait_until(lambda: len(stream.choices[0].tokens) > 3, 20)
        cluster.client.generate(range(100, 200), (decode,), max_tokens=1).tokens()
        stream.tokens()
    assert max(tokens for streams, tokens in sizes if streams == 1) == 8
    cluster.client.generate(range(50, 250), (decode,), max_tokens=1).tokens()
    assert max(tokens for streams, tokens in sizes if not streams) == 48


def test_a_node_hears_when_a_prompt_for_it_will_be_computed(cluster: Cluster) -> None:
    """The other node says so with each chunk, so that no long step begins before the answer."""
    prefill, decode = cluster.pair
    end: Any = decode.node.receiving
    heard: list[tuple[bool, float]] = []
    take = end._find_incoming

    def watching(room: bytes) -> Any:
        incoming = take(room)
        if incoming is not None and incoming.expected_at is not None:
            heard.append((incoming.commit is None, incoming.expected_at))
        return incoming

    end._find_incoming = watching
    try:
        (prompt,) = random_prompts(12, [150])
        cluster.client.generate(prompt, (prefill, decode)).tokens()
    finally:
        del end._find_incoming
    assert heard
    assert heard[0][0], "it was told before the commit"
    assert not list(end.iter_expected(1e6)), "nothing is expected of what has come"


def test_errors_of_predictions_are_a_metric(cluster: Cluster) -> None:
    cluster.client.generate(range(20), cluster.pair).tokens()
    text = cluster.decode[0].node.core.metrics.render_text().decode()
    steps = re.search(r"^pd_steps_total ([\d.]+)$", text, re.M)
    errors = re.search(r"^pd_step_prediction_error_count ([\d.]+)$", text, re.M)
    assert steps is not None and errors is not None
    assert float(errors[1]) == float(steps[1]) > 0
