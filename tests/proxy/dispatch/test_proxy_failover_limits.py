"""How often, how long and behind which deaths of scripted nodes the proxy goes on elsewhere."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import two_processes
from failing_nodes import (
    PROMPT,
    TOKENS,
    Asked,
    asked_of,
    ids_of,
    newest_of,
    next_of,
    ready_urls,
    two_pairs,
)
from fake_node import wait_until
from proxy_cluster import nodes_of, wait_for_all

from pd.core.messages import Finish
from pd.proxy.dispatch.suspicion import AT_ONCE_SECONDS, DEATHS_IN_COMPANY

if TYPE_CHECKING:
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate


def test_no_more_failovers_than_allowed(cluster: Cluster) -> None:
    asked = Asked(two_pairs(cluster, max_failovers=1), {})
    prefill, first = asked_of(cluster.prefill)
    prefill.say(first, TOKENS[:1], cached_tokens=0)
    prefill.fail(first, "node_failed", "the first")
    other, second = next_of(cluster.prefill, prefill)
    other.fail(second, "node_failed", "the second")
    assert asked.error()["message"] == "the second"


def refuse(node: FakeNode, request: Generate) -> None:
    """Answer a request as a node that has begun to drain."""
    node.fail(request, "unavailable", fault="nobody")


def test_a_refusal_by_a_node_that_drains_is_no_failover(cluster: Cluster) -> None:
    """Requests that were sent before its heartbeat said so."""
    nodes = [cluster.node("unified", auto=False) for _ in range(4)]
    client = cluster.client(failover="on", policy="round_robin", text=False, max_failovers=1)
    wait_for_all(client)
    asked, seen = Asked(client, {}), set[bytes]()
    for _ in range(2):
        node, request = newest_of(nodes, seen)
        seen.add(request.room)
        refuse(node, request)
    node, request = newest_of(nodes, seen)
    node.say(request, TOKENS[:2], cached_tokens=0)
    node.fail(request, "node_failed")
    node, request = newest_of([n for n in nodes if not n.generates], seen)
    node.say(request, TOKENS[2:], position=2, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


def test_nodes_that_refuse_again_and_again_end_a_request(cluster: Cluster) -> None:
    nodes = [cluster.node("unified", auto=False) for _ in range(2)]
    client = cluster.client(failover="on", policy="round_robin", text=False, max_failovers=1)
    wait_for_all(client)
    asked = Asked(client, {})
    answered = set[bytes]()
    while asked.is_under_way:
        for node in nodes:
            for request in [r for r in node.generates if r.room not in answered]:
                answered.add(request.room)
                refuse(node, request)
        time.sleep(0.01)
    assert asked.error()["message"] == "as scripted"
    assert len(answered) == 4, "each node once, one failover and the last"


@pytest.mark.parametrize("kind", ["invalid_request", "deadline", "aborted"])
def test_what_no_other_node_could_do_better_is_not_tried_again(cluster: Cluster, kind: str) -> None:
    client = two_pairs(cluster)
    body = {"input_ids": PROMPT}
    thread = threading.Thread(
        target=lambda: asked_of(cluster.prefill)[0].fail(asked_of(cluster.prefill)[1], kind)
    )
    thread.start()
    response = client.post("/generate", json=body)
    thread.join()
    assert response.status_code in (400, 408, 200)
    assert sum(len(node.generates) for node in cluster.prefill) == 1


def test_a_request_waits_for_a_node_that_is_started_again(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    client = cluster.client(failover="on", text=False)
    asked = Asked(client, {})
    first = node.wait_generate()
    node.say(first, TOKENS[:2], cached_tokens=0)
    asked.wait_tokens(2)
    node.restart()
    second = node.wait_generate()
    assert (ids_of(second), second.produced) == (PROMPT + TOKENS[:2], 2)
    node.say(second, TOKENS[2:], position=2, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


def test_a_request_waits_no_longer_than_it_may(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    asked = Asked(cluster.client(failover="on", text=False, failover_wait=1.0), {})
    node.say(node.wait_generate(), TOKENS[:1], cached_tokens=0)
    asked.wait_tokens(1)
    node.kill()
    assert "no other node could go on within 1 s" in asked.error()["message"]


def test_a_request_that_the_only_node_refuses_is_no_failure_of_a_node(cluster: Cluster) -> None:
    """It drains, and the proxy was not told before it sent the request."""
    node = cluster.node("unified", auto=False)
    client = cluster.client(failover="on", text=False, failover_wait=0.5)
    asked = Asked(client, {})
    request = node.wait_generate()
    node.ready = False
    refuse(node, request)
    error = asked.error()
    assert error["type"] == "service_unavailable_error", error
    assert "no other node could go on within 0.5 s" in error["message"]


@pytest.mark.parametrize("params", [{}, {"regex": "a*"}], ids=["free", "grammar"])
def test_a_decode_node_goes_on_alone_where_no_other_can(
    cluster: Cluster, params: dict[str, Any]
) -> None:
    prefill, decode = cluster.pair(auto=False)
    client = cluster.client(failover="on", text=False)
    asked = Asked(client, params)
    first = prefill.wait_generate()
    prefill.say(first, TOKENS[:1], cached_tokens=0)
    asked.wait_tokens(1)
    prefill.kill()
    second = decode.wait_generate(2)
    assert (second.peer, second.peer_bootstrap, second.produced) == ("", "", 1)
    decode.say(second, TOKENS[1:], position=1, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


def test_a_request_that_two_nodes_died_of_is_not_given_a_third(cluster: Cluster) -> None:
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(failover="on", policy="round_robin", text=False, max_failovers=9)
    asked = Asked(client, {})
    first, request = asked_of(nodes)
    first.say(request, TOKENS[:1], cached_tokens=0)
    asked.wait_tokens(1)
    first.kill()
    wait_until(lambda: sum(len(node.generates) for node in nodes) == 2)
    second = next(node for node in nodes if node is not first and node.generates)
    second.say(second.generates[-1], TOKENS[1:2], position=1)
    asked.wait_tokens(2)
    time.sleep(1.1 * AT_ONCE_SECONDS)
    second.kill()
    assert "in the steps in which 2 nodes died in a row" in asked.error()["message"]
    assert sum(len(node.generates) for node in nodes) == 2


@pytest.mark.one_process("each process weighs its own requests")
def test_a_request_of_which_processes_end_behind_a_failed_step_is_not_given_a_third(
    cluster: Cluster,
) -> None:
    """Each process ends a moment after the step, when the request has gone elsewhere."""
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(failover="on", policy="round_robin", text=False, max_failovers=9)
    wait_for_all(client)
    asked = Asked(client, {})
    first, request = asked_of(nodes)
    first.fail_step([request])
    wait_until(lambda: sum(len(node.generates) for node in nodes) == 2)
    second = next(node for node in nodes if node is not first and node.generates)
    first.kill()
    wait_until(lambda: first.url not in ready_urls(client))
    time.sleep(1.1 * AT_ONCE_SECONDS)
    second.fail_step(second.generates)
    assert "in the steps in which 2 nodes died in a row" in asked.error()["message"]
    assert sum(len(node.generates) for node in nodes) == 2


@pytest.mark.one_process("each process weighs its own requests")
def test_a_request_in_whose_steps_one_node_hung_twice_is_not_given_a_third_time(
    cluster: Cluster,
) -> None:
    node = cluster.node("unified", auto=False)
    client = cluster.client(failover="on", text=False, max_failovers=9)
    asked = Asked(client, {})
    for number in (1, 2):
        node.wait_generate(number)
        node.stuck = True
        wait_until(lambda: ready_urls(client) == [])
        node.stuck = False
        wait_for_all(client)
    assert "in the steps in which 2 nodes died in a row" in asked.error()["message"]
    assert len(node.generates) == 2


@pytest.mark.one_process("each process weighs its own requests")
@pytest.mark.parametrize("fault", ["peer", "pair"])
def test_a_death_that_the_peer_reported_first_does_not_speak_for_the_request(
    cluster: Cluster, fault: Any
) -> None:
    """The request had gone to another node when the first one was noticed to be dead."""
    for _ in range(3):
        cluster.node("prefill", auto=False)
    decode = cluster.node("decode", auto=False)
    client = cluster.client(failover="on", policy="round_robin", text=False, max_failovers=9)
    wait_for_all(client)
    asked = Asked(client, {})
    first, request = asked_of(cluster.prefill)
    left, seen = [node for node in cluster.prefill if node is not first], {request.room}
    decode.fail(decode.wait_generate(), "transfer", fault=fault)
    second, request = newest_of(left, seen)
    first.kill()
    wait_until(lambda: first.url not in ready_urls(client))
    seen.add(request.room)
    left.remove(second)
    second.kill()
    third, _ = newest_of(left, seen)
    time.sleep(1.1 * AT_ONCE_SECONDS)
    third.kill()
    assert "in the steps in which 2 nodes died in a row" in asked.error()["message"]


def test_a_poisonous_request_ends_three_nodes_at_most(cluster: Cluster, seed: int) -> None:
    """A node dies as soon as it has the request; those that were beside it are answered. Each
    process of a proxy weighs its own requests, so one of another process may be beside it every
    time."""
    rng = random.Random(seed)
    nodes = [cluster.node("unified", auto=False) for _ in range(6)]
    client = cluster.client(failover="on", text=False, policy="random", max_failovers=20)
    wait_for_all(client)
    poison, answers = [66, 66], list[tuple[list[int], Any]]()

    def ask(prompt: list[int]) -> None:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}}
        answers.append((prompt, client.post("/generate", json=body)))

    prompts = [[5, number] for number in range(24)]
    prompts.insert(rng.randrange(24), poison)
    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    alive, replied = list(nodes), set[bytes]()
    while any(thread.is_alive() for thread in threads):
        for node in list(alive):
            if any(ids_of(request) == poison for request in node.generates):
                node.kill()
                alive.remove(node)
                continue
            waiting = [r for r in node.generates if r.room not in replied]
            for request in waiting if rng.random() < 0.2 else []:
                replied.add(request.room)
                node.reply(request)
        time.sleep(0.01)
    dead = [node for node in nodes if node not in alive]
    assert len(dead) <= DEATHS_IN_COMPANY
    assert len(answers) == 25
    failed = [(prompt, answer) for prompt, answer in answers if answer.status_code != 200]
    assert all("nodes died in a row" in answer.text for _, answer in failed)
    ended = [prompt for prompt, _ in failed]
    assert poison in ended
    if two_processes.PROCESSES == 1:
        assert ended == [poison]
    for prompt in ended:
        assert all(prompt in map(ids_of, node.generates) for node in dead)


@pytest.mark.one_process("each process weighs its own requests")
@pytest.mark.parametrize("size", [2, 6])
def test_those_suspected_together_are_tried_one_at_a_time(cluster: Cluster, size: int) -> None:
    """Two nodes died with all of them in the step; each goes on when the one before has tokens."""
    nodes = [cluster.node("unified", auto=False) for _ in range(2)]
    third = cluster.node("unified", auto=False)
    third.ready = False
    client = cluster.client(failover="on", text=False, policy="round_robin", max_failovers=9)
    nodes[1].ready = False
    wait_until(lambda: [w["ready"] for w in nodes_of(client)] == [True, False, False])
    asked = [Asked(client, {}) for _ in range(size)]
    for node, after in zip(nodes, [nodes[1], third], strict=True):
        node.wait_generate(size)
        after.ready = True
        wait_until(lambda after=after: after.url in ready_urls(client))
        node.kill()
    for number in range(1, size + 1):
        request = third.wait_generate(number)
        beats = sum(third.heartbeats.values())
        wait_until(lambda beats=beats: sum(third.heartbeats.values()) > beats + 4)
        assert len(third.generates) == number
        third.say(request, TOKENS[:2], cached_tokens=0)
    for request in third.generates:
        third.say(request, TOKENS[2:], position=2, finish=Finish("length"))
    assert [one.result()["output_ids"] for one in asked] == [TOKENS] * size


@pytest.mark.one_process("each process weighs its own requests")
def test_those_whose_turn_to_be_tried_has_not_come_do_not_wait_for_a_node(cluster: Cluster) -> None:
    """There was none for a moment; then the first one takes longer than others may wait for one."""
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(
        failover="on", text=False, policy="round_robin", max_failovers=9, failover_wait=2.0
    )
    nodes[1].ready = nodes[2].ready = False
    wait_until(lambda: ready_urls(client) == [nodes[0].url])
    asked = [Asked(client, {}) for _ in range(3)]
    nodes[0].wait_generate(3)
    nodes[1].ready = True
    wait_until(lambda: nodes[1].url in ready_urls(client))
    nodes[0].kill()
    nodes[1].wait_generate(3)
    nodes[1].kill()
    wait_until(lambda: ready_urls(client) == [])
    nodes[2].ready = True
    nodes[2].wait_generate()
    beats = sum(nodes[2].heartbeats.values())
    wait_until(lambda: sum(nodes[2].heartbeats.values()) > beats + 8)
    for number in range(1, 4):
        nodes[2].reply(nodes[2].wait_generate(number))
    assert [one.result()["output_ids"] for one in asked] == [TOKENS] * 3


def test_an_answer_that_gets_on_between_deaths_is_given_more_nodes(cluster: Cluster) -> None:
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(failover="on", policy="round_robin", text=False)
    asked = Asked(client, {"max_new_tokens": 20})
    tokens, used = list(range(10, 30)), set[int]()
    for position in (0, 6, 12):
        wait_until(lambda: sum(len(node.generates) for node in nodes) == len(used) + 1)
        (number,) = {i for i, node in enumerate(nodes) if node.generates} - used
        used.add(number)
        node, end = nodes[number], position + 6
        finish = None if end < 18 else Finish("length")
        part = tokens[position : end if finish is None else 20]
        node.say(node.generates[0], part, position=position, finish=finish)
        if finish is None:
            asked.wait_tokens(end)
            node.kill()
    assert asked.result()["output_ids"] == tokens
