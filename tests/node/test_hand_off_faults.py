"""Two real nodes whose transfers or reservations are slow, late, lost or given up."""

from __future__ import annotations

import itertools
import random
import time
from typing import TYPE_CHECKING, Any

import held_transfers
import pytest
from cluster import is_idle, random_prompts, wait_until
from e2e.backends import MOONCAKE, NIXL, TCP
from hand_off_helpers import (
    CASES,
    PROMPT,
    Gate,
    check_abort,
    pages,
    queues,
    rules,
    scripted_cluster,
    sent,
)
from raw_peer import SOON
from tiny import tiny_cluster

from pd.core.errors import TransferError
from pd.prefill_node.sending import SendingEnd

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.mark import ParameterSet
    from cluster import Pending
    from e2e.backends import Backend

# ---- the first token waits for nothing but prefill


@pytest.mark.parametrize("slow", ["delay_write", "delay_reservation"])
def test_a_slow_hand_off_does_not_delay_token_1(tmp_path: Path, slow: str) -> None:
    """How long it takes is measured in ``e2e/test_serving.py``."""
    with scripted_cluster(tmp_path, {"do": slow, "seconds": 0.5}) as cluster:
        request = sent(cluster, max_tokens=3)
        wait_until(lambda: request.choices[0].tokens, 5)
        wait_until(lambda: queues(cluster.decode[0])["transfer"] == 1, 5)  # it is yet to come
        assert len(request.choices[0].tokens) == 1
        request.tokens()
        assert request.ended_at - request.sent_at >= 0.5
        cluster.wait_idle()


# ---- what fails where nobody expects it


@pytest.mark.parametrize(("side", "method"), [("decode", "receiver"), ("prefill", "sender")])
@pytest.mark.parametrize("late", [False, True])
def test_a_transfer_that_cannot_be_opened_fails_one_request(
    monkeypatch: pytest.MonkeyPatch, side: str, method: str, late: bool
) -> None:
    with tiny_cluster() as cluster:
        sent(cluster, max_tokens=2).tokens()
        transfer = getattr(cluster, side)[0].node.transfers[-1 if side == "decode" else 0]
        make = getattr(transfer, method)

        def once(*args: Any) -> Any:
            setattr(transfer, method, make)
            raise RuntimeError("no memory to pin")

        if late:  # then it is opened by another thread
            monkeypatch.setattr(
                cluster.decode[0].node.transfers[-1], "reservation_delay", lambda: 0.3
            )
        monkeypatch.setattr(transfer, method, once)
        request = sent(cluster, [*PROMPT, 1])
        assert request.done.wait(SOON)
        assert "no memory to pin" in str(request.error)
        sent(cluster, [*PROMPT, 2], max_tokens=2).tokens()
        cluster.wait_idle()


def test_a_transfer_that_fails_ends_a_prompt_that_is_being_computed() -> None:
    with tiny_cluster(chunked_prefill_size=8) as cluster:
        node = cluster.prefill[0].node
        forward = node.engine.runner.forward

        def slow(*args: Any) -> Any:
            time.sleep(0.1)
            return forward(*args)

        node.engine.runner.forward = slow
        request = sent(cluster, [i % 250 for i in range(800)])
        wait_until(lambda: request.room in node.requests, 5)
        wait_until(lambda: node.requests.find_request(request.room).outgoing.sender is not None, 5)
        node.requests.find_request(request.room).outgoing.sender.fail(
            TransferError("the link was lost")
        )
        assert request.done.wait(SOON)
        assert "the link was lost" in str(request.error)
        cluster.wait_idle()


# ---- an abort in every state, told to one node, frees both


@pytest.mark.parametrize(("state", "told"), CASES)
def test_an_abort_told_to_one_node_ends_the_room_on_both(
    tmp_path: Path, state: str, told: str
) -> None:
    with scripted_cluster(tmp_path, *rules(state), max_running_requests=1) as cluster:
        check_abort(cluster, state, told)


def aborts_over_real_backends() -> list[ParameterSet]:
    sample = {
        (TCP, "during", "decode"),
        (NIXL, "during", "prefill"),
        (MOONCAKE, "during", "decode"),
    }
    cells = itertools.product((TCP, NIXL, MOONCAKE), held_transfers.HELD, ("prefill", "decode"))
    return [
        pytest.param(
            *cell, id="-".join(map(str, cell)), marks=() if cell in sample else pytest.mark.full
        )
        for cell in cells
    ]


@pytest.mark.parametrize(("backend", "stage", "told"), aborts_over_real_backends())
def test_an_abort_told_to_one_node_ends_the_room_over_every_backend(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, stage: str, told: str
) -> None:
    backend.require()
    monkeypatch.setattr(SendingEnd, "_start_sending", held_transfers.open_held)
    (held, whole) = random_prompts(25, [held_transfers.HELD[stage], 300])
    with tiny_cluster(transfer_backend=backend.flag, chunked_prefill_size=128) as cluster:
        expected = sent(cluster, whole, max_tokens=4).tokens()
        request = sent(cluster, held)
        prefill, decode = cluster.pair
        wait_until(lambda: queues(prefill)["in_flight"] and queues(decode)["transfer"], 5)
        request.nodes = [prefill if told == "prefill" else decode]
        cluster.client.abort(request)
        for server in cluster.pair:
            found = server.node.requests.find_request(request.room)
            wait_until(lambda one=found: one is None or one.state.is_terminal, SOON)
        # Its pages serve others, and nothing of it lands in them.
        again = sent(cluster, whole, max_tokens=4, namespace="another")
        assert again.tokens() == expected
        with decode.node.core.events.lock, prefill.node.core.events.lock:
            for server in cluster.pair:
                server.node.check_books()
        cluster.client.abort(request)
        cluster.wait_idle()


def test_an_abort_of_a_retracted_request_frees_its_host_memory() -> None:
    with tiny_cluster(kv_cache_tokens=120, reserved_decode_tokens=1) as cluster:
        decode = cluster.decode[0].node.scheduler.decode
        resume, aborted = decode._give_pages, []
        # Whoever is retracted stays it until the test has seen it.
        decode._give_pages = lambda one: (aborted or one not in decode.retracted) and resume(one)
        requests = [sent(cluster, prompt, max_tokens=60) for prompt in random_prompts(3, [20] * 4)]
        wait_until(lambda: decode.retracted, 10)
        room = decode.retracted[0].request.room
        (victim,) = [request for request in requests if request.room == room]
        cluster.client.abort(victim)
        wait_until(lambda: all(one.request.room != room for one in list(decode.retracted)), 10)
        aborted.append(room)
        for request in requests:
            if request is not victim:
                request.tokens(20)
        cluster.wait_idle()
        assert decode._host_used == 0


# ---- pages that a late write may still hit


def test_quarantine_is_visible_while_the_drain_is_outstanding_and_ends_after(
    tmp_path: Path,
) -> None:
    with scripted_cluster(tmp_path, {"do": "late_write", "seconds": 2.0}) as cluster:
        prefill, decode = cluster.pair
        request = sent(cluster)
        wait_until(lambda: queues(prefill)["in_flight"] and pages(decode)["reserved"], 5)
        outgoing = prefill.node.requests.find_request(request.room).outgoing
        wait_until(lambda: outgoing.first_sent is not None, 1)
        cluster.client.abort(request)
        wait_until(lambda: pages(decode)["quarantined"] == 10, 1.8, lambda: pages(decode))
        assert pages(prefill)["locked"] == 10, "the late write has yet to read its source"
        counts = pages(decode)
        assert sum(counts.values()) == 2 * counts["total"]
        for server in cluster.pair:
            server.node.check_books()
        cluster.wait_idle()
        assert pages(decode)["quarantined"] == 0


def test_late_and_duplicated_writes_of_aborted_rooms_hit_nobody_else(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = list(random_prompts(seed, [rng.randrange(20, 60) for _ in range(12)]))
    with tiny_cluster() as cluster:
        expected = [sent(cluster, prompt, max_tokens=6).tokens() for prompt in prompts]
    rules = (
        {"do": "late_write", "seconds": [0.0, 0.3], "probability": 0.5},
        {"do": "duplicate_write", "seconds": [0.0, 0.3], "probability": 0.3},
        {"do": "delay_reservation", "seconds": [0.0, 0.1], "probability": 0.3},
    )
    # The decode node has memory for three: pages given up are needed again at once.
    small = {"decode_settings": {"kv_cache_tokens": 200, "reserved_decode_tokens": 8}}
    with scripted_cluster(tmp_path, *rules, chunked_prefill_size=16, **small) as cluster:
        kept: list[tuple[int, Pending]] = []
        for _ in range(6):
            for index in rng.sample(range(len(prompts)), 6):
                request = sent(cluster, prompts[index], max_tokens=6)
                if rng.random() < 0.5:
                    kept.append((index, request))
                else:
                    time.sleep(rng.random() * 0.05)
                    cluster.client.abort(request)
            for server in cluster.pair:
                server.node.check_books()
        for index, request in kept:
            assert request.tokens(60) == expected[index], f"prompt {index}"
        cluster.wait_idle()


# ---- transfers that fail


@pytest.mark.parametrize(
    "rule",
    [
        {"do": "fail_room", "rooms": 1},
        {"do": "lose_write", "rooms": 1, "seconds": 0.05},
    ],
    ids=lambda rule: rule["do"],
)
def test_a_failed_transfer_fails_its_request_with_its_cause_and_no_other(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    with scripted_cluster(tmp_path, rule) as cluster:
        first = sent(cluster, max_tokens=4)
        with pytest.raises(TransferError, match="fake script"):
            first.tokens(5)
        (other,) = random_prompts(23, [30])
        assert len(sent(cluster, other, max_tokens=4).tokens(5)) == 4
        assert all(server.node.ready for server in cluster.pair)
        cluster.wait_idle()


# ---- memory that one side lacks


def test_a_parked_prefill_is_computed_again_and_handed_over(tmp_path: Path) -> None:
    # The first waits long for its reservation; the second has one but no pages on P.
    prompts = list(random_prompts(24, [40, 44]))
    with tiny_cluster() as cluster:
        expected = [sent(cluster, prompt, max_tokens=8).tokens() for prompt in prompts]
    slow = {"do": "delay_reservation", "seconds": 1.0, "rooms": 1}
    small = {"prefill_settings": {"kv_cache_tokens": 64}}
    with scripted_cluster(tmp_path, slow, **small) as cluster:
        parked: list[Pending] = []
        first = sent(cluster, prompts[0], max_tokens=8)
        wait_until(lambda: first.choices[0].tokens, 5)
        outgoing = cluster.prefill[0].node.requests.find_request(first.room).outgoing
        second = sent(cluster, prompts[1], max_tokens=8)
        wait_until(lambda: outgoing.parked or (not parked and first.done.is_set()), 5)
        assert outgoing.parked
        cluster.prefill[0].node.check_books()
        assert second.tokens(10) == expected[1]
        assert first.tokens(10) == expected[0]
        positions = [output.position for output in first.outputs]
        assert positions == [0, 0, *range(1, 8)], "token 1 came once from each node"
        cluster.wait_idle()


# ---- steps longer than a lease


@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_a_step_longer_than_a_lease_makes_nobody_believe_that_a_node_is_gone(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.core.leases.LEASE_SECONDS", 1.2)
    with tiny_cluster() as cluster:
        sent(cluster, [1] * 8, max_tokens=2).tokens()
        gate = Gate(cluster.prefill[0] if slow == "prefill" else cluster.decode[0])
        request = sent(cluster, max_tokens=5)
        assert gate.entered.wait(5)
        time.sleep(2.0)
        gate.open()
        assert len(request.tokens(5)) == 5
        cluster.wait_idle()


def test_stopping_a_node_tells_proxy_and_peer() -> None:
    with tiny_cluster() as cluster:
        gate = Gate(cluster.prefill[0])
        request = sent(cluster)
        assert gate.entered.wait(5)
        wait_until(lambda: queues(cluster.decode[0])["transfer"] == 1, 5)
        with cluster.prefill[0].node.core.events.event():
            for waiting in list(cluster.prefill[0].node.requests):
                cluster.prefill[0].node.requests.fail_request(waiting, TransferError("stopped"))
        wait_until(lambda: is_idle(cluster.decode[0]), SOON)
        with pytest.raises(TransferError, match="stopped"):
            request.tokens(1)
        gate.open()
        cluster.wait_idle()
