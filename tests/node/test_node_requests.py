"""What every node does with messages of proxies: checks, duplicates, aborts, deadlines."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster import is_idle, random_prompts, wait_until
from hand_off_helpers import Gate
from raw_peer import RawPeer, proxy_of
from requests_for_tests import make_generate
from tiny import CONTEXT, VOCAB_SIZE, tiny_cluster, tiny_node

from pd.core.errors import AbortedError, DeadlineExceededError, NodeFailedError, UnavailableError
from pd.core.messages import (
    Abort,
    Failed,
    GenerateTogether,
    NodeHeartbeat,
    StepFailed,
    StepOutputs,
)
from pd.node import step_loop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.launch import NodeServer

LONG = {"max_tokens": 900}


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, NodeServer]]:
    servers = {role: tiny_node(role) for role in ("prefill", "decode", "unified")}
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture
def unified(nodes: dict[str, NodeServer]) -> Iterator[NodeServer]:
    yield nodes["unified"]
    wait_until(lambda: is_idle(nodes["unified"]), 10)
    nodes["unified"].node.check_books()


@pytest.fixture
def proxy(unified: NodeServer) -> Iterator[RawPeer]:
    with proxy_of(unified) as peer:
        yield peer


def ask(proxy: RawPeer, server: NodeServer, tokens: Any = range(10), **fields: Any) -> Any:
    message = make_generate(tokens, to=server.instance_id, sender=proxy.name, **fields)
    proxy.send(message)
    return message


def abort(proxy: RawPeer, server: NodeServer, room: bytes, index: int | None = None) -> None:
    proxy.send(Abort(to=server.instance_id, sender=proxy.name, room=room, index=index))


def answered(proxy: RawPeer) -> None:
    """Everything sent so far was handled."""
    proxy.beat()
    proxy.receive(NodeHeartbeat)


# ---- bad requests

BAD = {
    "room": ({"room": b"short"}, "16 bytes, not 5"),
    "no tokens": ({"token_ids": b""}, "multiple of 4 bytes, not 0"),
    "broken tokens": ({"token_ids": b"12345"}, "multiple of 4 bytes, not 5"),
    "negative token": ({"tokens": [1, -2]}, "token id -2 is outside the vocabulary of 256"),
    "large token": ({"tokens": [1, VOCAB_SIZE]}, "token id 256 is outside"),
    "long prompt": ({"tokens": [1] * CONTEXT}, "context of 1024 has no room for output"),
    "timeout": ({"timeout": math.nan}, "timeout must be a number of seconds, not nan"),
    "max_tokens": ({"params": {"max_tokens": 0}}, "max_tokens must be between 1"),
    "min_tokens": ({"params": {"min_tokens": 5}}, "min_tokens must be between 0 and 4"),
    "temperature": ({"params": {"temperature": math.inf}}, "temperature must be between"),
    "top_p": ({"params": {"top_p": 0.0}}, "top_p must be above 0"),
    "top_k": ({"params": {"top_k": -1}}, "top_k must be between"),
    "min_p": ({"params": {"min_p": 1.5}}, "min_p must be between"),
    "presence": ({"params": {"presence_penalty": 3.0}}, "presence_penalty must be between"),
    "frequency": ({"params": {"frequency_penalty": -3.0}}, "frequency_penalty must be between"),
    "repetition": (
        {"params": {"repetition_penalty": 0.0}},
        "repetition_penalty must be between",
    ),
    "seed": ({"params": {"seed": -1}}, "seed must be between"),
    "n": ({"params": {"n": 65}}, "n must be between 1 and 64"),
    "top_logprobs": ({"params": {"top_logprobs": 21}}, "top_logprobs must be between"),
    "prompt_logprobs": ({"params": {"prompt_logprobs_start": -1}}, "must be at least 0, not -1"),
    "stop id": ({"params": {"stop_token_ids": (999,)}}, "stop_token_ids: token id 999"),
    "bias id": ({"params": {"logit_bias": {-1: 1.0}}}, "logit_bias: token id -1"),
    "bias": ({"params": {"logit_bias": {1: math.nan}}}, "logit_bias of token 1"),
}


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
def test_a_bad_request_is_refused_with_the_value_and_leaves_nothing(
    nodes: dict[str, NodeServer], role: str
) -> None:
    server = nodes[role]
    with proxy_of(server) as proxy:
        for name, (fields, text) in BAD.items():
            fields = dict(fields)
            message = ask(proxy, server, fields.pop("tokens", range(10)), **fields)
            failed = proxy.receive(Failed)
            assert failed.room == message.room, name
            assert failed.error.kind == "invalid_request", name
            assert text in failed.error.message, name
    assert server.node.idle


@pytest.mark.parametrize(
    ("role", "fields", "text"),
    [
        ("prefill", {}, "max_tokens is above 1, which needs a decode node"),
        ("decode", {}, "address of the prefill node is missing"),
        ("decode", {"peer": "p"}, "address of the prefill node is missing"),
        ("decode", {"params": LONG | {"max_tokens": 1020}}, "exceed the context of 1024"),
        ("unified", {"params": LONG | {"max_tokens": 1015}}, "exceed the context of 1024"),
    ],
)
def test_what_one_role_cannot_do_is_refused(
    nodes: dict[str, NodeServer], role: str, fields: dict[str, Any], text: str
) -> None:
    server = nodes[role]
    with proxy_of(server) as proxy:
        ask(proxy, server, **fields)
        failed = proxy.receive(Failed)
        assert (failed.error.kind, text in failed.error.message) == ("invalid_request", True)
    assert server.node.idle


def test_a_request_that_the_pool_can_never_hold_is_refused_at_once() -> None:
    server = tiny_node("unified", kv_cache_tokens=64)
    try:
        with proxy_of(server) as proxy:
            ask(proxy, server, [1] * 65)
            assert (
                "KV for 68 tokens; the unified node holds 64" in proxy.receive(Failed).error.message
            )
            ask(proxy, server, [1] * 32, params={"max_tokens": 34})
            failed = proxy.receive(Failed)
            assert (failed.error.kind, failed.error.param) == ("invalid_request", "max_tokens")
            ask(proxy, server, [1] * 32, params={"max_tokens": 33})
            proxy.receive(StepOutputs)
    finally:
        server.stop()


def test_a_draining_node_refuses_new_requests_and_finishes_the_old() -> None:
    server = tiny_node("unified")
    try:
        with proxy_of(server) as proxy:
            old = ask(proxy, server, params={"max_tokens": 200})
            proxy.receive(StepOutputs)
            server.node.drain()
            new = ask(proxy, server)
            failed = proxy.receive(Failed)
            assert (failed.room, failed.error.kind) == (new.room, UnavailableError.kind)
            assert failed.fault == "nobody"
            while not (output := proxy.receive(StepOutputs).outputs[0]).finish:
                assert output.room == old.room
            proxy.beat()
            assert not proxy.receive(NodeHeartbeat).ready
    finally:
        server.stop()


def test_of_requests_that_come_together_only_the_bad_ones_are_refused(
    unified: NodeServer, proxy: RawPeer
) -> None:
    ends = {"to": unified.instance_id, "sender": proxy.name}
    one = {"max_tokens": 1}
    prompts = ([1, 2, 3], [VOCAB_SIZE], [1, 2, 4], [1, 2, 5])
    good, bad, aborted, also_good = (make_generate(p, params=one, **ends) for p in prompts)
    abort(proxy, unified, aborted.room)
    proxy.send(GenerateTogether(requests=[good, bad, aborted, also_good], **ends))
    assert proxy.receive(Failed).room == bad.room
    rooms: list[bytes] = []
    while len(rooms) < 2:
        rooms += [output.room for output in proxy.receive(StepOutputs).outputs]
    assert rooms == [good.room, also_good.room]
    wait_until(lambda: not len(unified.node.requests), 5)


# ---- rooms


def test_a_duplicate_of_a_running_room_changes_nothing(unified: NodeServer, proxy: RawPeer) -> None:
    message = ask(proxy, unified, params={"max_tokens": 60})
    proxy.receive(StepOutputs)
    proxy.send(message)
    positions = [0]
    while not (output := proxy.receive(StepOutputs).outputs[0]).finish:
        positions.append(output.position)
    assert positions == list(range(59))
    assert not any(isinstance(seen, Failed) for seen in proxy.seen)


def test_a_duplicate_of_a_finished_room_is_not_computed_again(
    unified: NodeServer, proxy: RawPeer
) -> None:
    message = ask(proxy, unified, params={"max_tokens": 1})
    assert proxy.receive(StepOutputs).outputs[0].finish is not None
    wait_until(lambda: not len(unified.node.requests), 5)
    proxy.send(message)
    answered(proxy)
    assert not len(unified.node.requests)


def test_a_room_of_another_proxy_is_refused_and_unharmed(
    unified: NodeServer, proxy: RawPeer
) -> None:
    message = ask(proxy, unified, params=LONG)
    proxy.receive(StepOutputs)
    with proxy_of(unified, "intruder") as intruder:
        ask(intruder, unified, room=message.room)
        assert "is in use" in intruder.receive(Failed).error.message
        abort(intruder, unified, message.room)
        answered(intruder)
    assert not unified.node.requests.find_request(message.room).state.is_terminal
    abort(proxy, unified, message.room)


def test_an_abort_that_comes_first_leaves_a_tombstone_for_a_lease(
    unified: NodeServer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.scheduling.live_requests.LEASE_SECONDS", 0.3)
    room = b"never seen yet.."
    abort(proxy, unified, room)
    ask(proxy, unified, room=room)
    answered(proxy)
    assert room not in unified.node.requests
    wait_until(lambda: not unified.node.requests.has_tombstone(room), 5)
    ask(proxy, unified, room=room)
    proxy.receive(StepOutputs)
    assert not [seen for seen in proxy.seen if isinstance(seen, Failed)]


def test_tombstones_do_not_pile_up(
    unified: NodeServer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.scheduling.live_requests.LEASE_SECONDS", 0.2)
    rooms = [number.to_bytes(16, "big") for number in range(50)]
    for room in rooms:
        abort(proxy, unified, room)
    abort(proxy, unified, b"not a room")
    answered(proxy)
    assert unified.node.requests.has_tombstone(
        rooms[0]
    ) and not unified.node.requests.has_tombstone(b"not a room")
    wait_until(lambda: not any(map(unified.node.requests.has_tombstone, rooms)), 5)


def test_an_abort_is_silent_and_frees_everything(unified: NodeServer, proxy: RawPeer) -> None:
    message = ask(proxy, unified, params=LONG)
    proxy.receive(StepOutputs)
    abort(proxy, unified, message.room)
    wait_until(lambda: is_idle(unified), 2)
    answered(proxy)
    assert not any(isinstance(seen, Failed) for seen in proxy.seen)


@pytest.mark.parametrize("index", [-1, 2, 1 << 40])
def test_an_abort_of_a_choice_that_does_not_exist_is_dropped(
    unified: NodeServer, proxy: RawPeer, index: int
) -> None:
    message = ask(proxy, unified, params={**LONG, "n": 2})
    proxy.receive(StepOutputs)
    for _ in range(3):
        abort(proxy, unified, message.room, index)
    answered(proxy)
    request = unified.node.requests.find_request(message.room)
    assert not request.state.is_terminal and not request.ended_choices
    abort(proxy, unified, message.room)


# ---- time


def test_a_passed_deadline_ends_the_request_with_its_own_error(
    unified: NodeServer, proxy: RawPeer
) -> None:
    ask(proxy, unified, params=LONG, timeout=0.05)
    assert proxy.receive(Failed).error.kind == DeadlineExceededError.kind
    wait_until(lambda: is_idle(unified), 2)


def test_requests_of_a_silent_proxy_are_aborted_and_those_of_others_go_on(
    unified: NodeServer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.core.leases.LEASE_SECONDS", 0.4)
    with proxy_of(unified, "silent") as silent:
        dead = ask(silent, unified, params=LONG)
        alive = ask(proxy, unified, params=LONG)
        step = unified.node.engine.runner.forward

        def slowly(*args: Any) -> Any:
            time.sleep(0.01)
            return step(*args)

        monkeypatch.setattr(unified.node.engine.runner, "forward", slowly)
        wait_until(lambda: len(unified.node.requests) == 2, 5)

        def is_dead() -> bool:
            proxy.beat()
            return dead.room not in unified.node.requests

        wait_until(is_dead, 5)
        assert not unified.node.requests.find_request(alive.room).state.is_terminal
        abort(proxy, unified, alive.room)


def test_abort_request_tells_the_proxy_and_counts_what_lived(
    unified: NodeServer, proxy: RawPeer
) -> None:
    ask(proxy, unified, params=LONG, rid="one")
    ask(proxy, unified, params=LONG, rid="two")
    answered(proxy)
    with unified.node.core.events.event():
        assert unified.node.abort_rid("one") == 1
        assert unified.node.abort_rid("one") == 0
        assert unified.node.abort_rid(None) == 1
    kinds = [proxy.receive(Failed).error.kind for _ in range(2)]
    assert kinds == [AbortedError.kind] * 2


# ---- failures inside


def test_a_step_that_fails_ends_its_requests_only_and_tells_so_in_one_message(
    unified: NodeServer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = unified.node.engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", lambda *args: 1 / 0)
        ends = {"to": unified.instance_id, "sender": proxy.name}
        requests = [make_generate(range(begin, 20), **ends) for begin in (5, 9)]
        proxy.send(GenerateTogether(requests=requests, **ends))
        failed = proxy.receive(StepFailed)
    assert (failed.error.kind, "division" in failed.error.message) == ("node_failed", True)
    assert sorted(failed.rooms) == sorted(request.room for request in requests)
    ask(proxy, unified)
    proxy.receive(StepOutputs)
    assert unified.node.ready


def test_logits_that_are_no_numbers_fail_the_request_not_the_node(
    unified: NodeServer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = unified.node.engine.runner
    forward = runner.forward
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", lambda *args: forward(*args) * math.nan)
        ask(proxy, unified)
        assert "not finite" in proxy.receive(Failed).error.message


def test_a_step_that_never_ends_fails_its_requests_and_the_node_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_loop, "STEP_LIMIT_SECONDS", 0.5)
    server = tiny_node("unified")
    gate = Gate(server)
    try:
        with proxy_of(server) as proxy:
            ask(proxy, server, params=LONG)
            failed = proxy.receive(StepFailed)
            assert "has not ended within 0.5 s" in failed.error.message
            assert not server.node.ready
    finally:
        gate.open()
        server.stop()


def test_a_broken_scheduler_fails_its_requests_and_is_not_ready() -> None:
    server = tiny_node("unified")
    try:
        with proxy_of(server) as proxy:
            ask(proxy, server, params=LONG)
            proxy.receive(StepOutputs)
            server.node.scheduler.plan_step = lambda: 1 / 0
            failed = proxy.receive(Failed)
            assert failed.error.kind == NodeFailedError.kind
            assert "the scheduler failed" in failed.error.message
            ask(proxy, server)
            assert proxy.receive(Failed).error.kind == UnavailableError.kind
            proxy.beat()
            assert not proxy.receive(NodeHeartbeat).ready
    finally:
        server.stop()


def test_outputs_of_one_step_travel_in_one_message_per_proxy() -> None:
    with tiny_cluster(0, 0, 1) as cluster, proxy_of(cluster.unified[0], "other") as other:
        server = cluster.unified[0]
        posted: list[tuple[int, bytes]] = []
        steps = 0
        post, process = server.node.requests.outputs._post, server.node.scheduler.process_step

        def count_step(works: Any) -> None:
            nonlocal steps
            steps += 1
            process(works)

        def watch(identity: bytes, message: Any) -> None:
            posted.append((steps, identity))
            post(identity, message)

        server.node.scheduler.process_step, server.node.requests.outputs._post = count_step, watch
        prompts = list(random_prompts(0, [8, 9, 10, 11]))
        sent = [cluster.client.generate(p, cluster.unified, max_tokens=20) for p in prompts]
        ask(other, server, np.arange(12), params={"max_tokens": 20})
        for request in sent:
            request.tokens()
        wait_until(lambda: server.node.idle, 5)
        assert len(posted) == len(set(posted))
        assert {identity for _, identity in posted} == {cluster.client.instance.encode(), b"other"}
