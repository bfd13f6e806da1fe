"""Scripted nodes that leave, get stuck, fail what they are sent or answer nonsense."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
from failing_nodes import (
    NOT_READY,
    PROMPT,
    TOKENS,
    Asked,
    asked_of,
    assert_only_problem,
    ids_of,
    next_of,
    post_to_pairs,
    problem_of,
    ready_urls,
    two_pairs,
)
from fake_node import wait_until
from proxy_cluster import wait_for_all

from pd.core.messages import ErrorInfo, Finish, StepFailed
from pd.proxy.nodes.breaker import FAILURES

if TYPE_CHECKING:
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate


@pytest.mark.parametrize("sign", ["leaving", "stuck"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_leave_a_node_that_is_to_be_empty_or_gets_stuck(
    cluster: Cluster, role: str, sign: str
) -> None:
    asked = Asked(two_pairs(cluster, max_failovers=1), {})
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    count = 2 if role == "decode" else 0
    if count:
        prefill.say(first, TOKENS[:1], cached_tokens=0)
        decode.say(first, TOKENS[:count])
        asked.wait_tokens(count)
    node = prefill if role == "prefill" else decode
    node.ready = sign != "leaving"
    setattr(node, sign, True)
    peers = cluster.prefill if role == "prefill" else cluster.decode
    _, second = next_of(peers, node)
    wait_until(lambda: sum(len(d.generates) for d in cluster.decode) == 2)
    assert ids_of(second) == PROMPT + TOKENS[:count]
    prefill.wait_abort(first.room)
    decode.wait_abort(first.room)
    for last in cluster.decode:
        if any(request.room == second.room for request in last.generates):
            last.say(second, TOKENS[count:], position=count, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


def test_streams_leave_a_decode_node_for_one_that_goes_on_alone(cluster: Cluster) -> None:
    """There is no node that computes prompts meanwhile."""
    prefill, first = cluster.pair(auto=False)
    other = cluster.node("decode", auto=False)
    other.ready = False
    client = cluster.client(failover="on", text=False)
    wait_until(lambda: set(ready_urls(client)) == {prefill.url, first.url})
    asked = Asked(client, {})
    request = first.wait_generate()
    prefill.say(request, TOKENS[:1], cached_tokens=0)
    first.say(request, TOKENS[:2])
    asked.wait_tokens(2)
    other.ready = True
    prefill.kill()
    wait_until(lambda: set(ready_urls(client)) == {first.url, other.url})
    first.ready, first.leaving = False, True
    second = other.wait_generate()
    assert (second.peer, second.produced) == ("", 2)
    other.say(second, TOKENS[2:], position=2, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


def test_a_node_that_is_to_be_empty_finishes_what_no_other_could(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    asked = Asked(cluster.client(failover="on", text=False), {})
    request = node.wait_generate()
    node.say(request, TOKENS[:1], cached_tokens=0)
    node.ready, node.leaving = False, True
    beats = sum(node.heartbeats.values())
    wait_until(lambda: sum(node.heartbeats.values()) > beats + 3)
    node.say(request, TOKENS[1:], position=1, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS
    assert (len(node.generates), node.aborts) == (1, [])


@pytest.mark.one_process("reads the dispatcher's state")
def test_a_node_that_was_removed_while_it_left_is_forgotten(cluster: Cluster) -> None:
    nodes = [cluster.node("unified", auto=False) for _ in range(2)]
    proxy = cluster.proxy(failover="on", text=False)
    client = cluster.client(proxy)
    asked = Asked(client, {})
    first, request = asked_of(nodes)
    first.say(request, TOKENS[:1], cached_tokens=0)
    asked.wait_tokens(1)
    assert client.delete(f"/workers/{first.instance_id}").status_code == 200
    first.ready, first.leaving = False, True
    other, second = next_of(nodes, first)
    other.say(second, TOKENS[1:], position=1, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS
    served: Any = proxy.proxy
    wait_until(lambda: not served._dispatcher._failovers._leaving)


def test_nodes_that_leave_together_do_not_send_each_other_their_streams(
    cluster: Cluster,
) -> None:
    nodes = [cluster.node("unified", auto=False) for _ in range(2)]
    client = cluster.client(failover="on", policy="round_robin", text=False)
    wait_for_all(client)
    asked = [Asked(client, {}) for _ in range(2)]
    wait_until(lambda: sum(len(node.generates) for node in nodes) == 2)
    streams = [(node, request) for node in nodes for request in node.generates]
    for node, request in streams:
        node.say(request, TOKENS[:1], cached_tokens=0)
    for one in asked:
        one.wait_tokens(1)
    for node in nodes:
        node.ready, node.leaving = False, True
        wait_until(lambda url=node.url: url not in ready_urls(client))
    beats = [sum(node.heartbeats.values()) for node in nodes]
    for node, before in zip(nodes, beats, strict=True):
        wait_until(lambda node=node, before=before: sum(node.heartbeats.values()) > before + 6)
    for node, request in streams:
        node.say(request, TOKENS[1:], position=1, finish=Finish("length"))
    assert [one.result()["output_ids"] for one in asked] == [TOKENS] * 2
    assert (sum(len(node.generates) for node in nodes), nodes[0].aborts) == (2, [])


def test_streams_come_back_to_a_node_that_they_left_when_it_was_started_again(
    cluster: Cluster,
) -> None:
    """The third node has more to do, but would be the only one that is not avoided."""
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(failover="on", policy="power_of_two", text=False)
    wait_for_all(client)
    asked = Asked(client, {})
    first, request = asked_of(nodes)
    first.say(request, TOKENS[:1], cached_tokens=0)
    asked.wait_tokens(1)
    first.ready, first.leaving = False, True
    wait_until(lambda: sum(len(node.generates) for node in nodes) == 2)
    second, third = sorted((n for n in nodes if n is not first), key=lambda n: -len(n.generates))
    first.kill()
    first.ready, first.leaving = True, False
    third.queued_tokens = 10_000
    beats = sum(third.heartbeats.values())
    first.start()
    wait_for_all(client)
    wait_until(lambda: sum(third.heartbeats.values()) > beats + 3)
    second.fail(second.generates[-1], "node_failed")
    again = first.wait_generate()
    first.say(again, TOKENS[1:], position=1, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


def test_a_node_that_fails_its_requests_is_taken_out_until_a_probe_succeeds(
    cluster: Cluster,
) -> None:
    """Its heartbeats come all the time. Clients' requests do not go there meanwhile."""
    bad, good = (cluster.node("unified", auto=False) for _ in range(2))
    good.auto = True
    client = cluster.client(failover="on", policy="round_robin", text=False)
    wait_for_all(client)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    while not problem_of(client, bad):
        failed = len(bad.generates)
        thread = threading.Thread(target=client.post, args=("/generate",), kwargs={"json": body})
        thread.start()
        wait_until(lambda: len(bad.generates) > failed or not thread.is_alive())  # noqa: B023
        if len(bad.generates) > failed:
            bad.fail(bad.generates[-1], "node_failed")
        thread.join()
    assert len(bad.generates) == FAILURES
    assert "taken out after 5 failures" in problem_of(client, bad)
    first = bad.wait_generate(FAILURES + 1)
    assert ids_of(first) == [0]
    for _ in range(4):
        assert client.post("/generate", json=body).status_code == 200
    bad.fail(first, "node_failed")
    bad.reply(bad.wait_generate(FAILURES + 2))
    wait_for_all(client)
    assert not problem_of(client, bad)
    assert len(bad.generates) == FAILURES + 2


@pytest.mark.one_process("each process has a breaker of its own")
def test_a_node_is_probed_while_the_queue_is_full(cluster: Cluster) -> None:
    bad, good = (cluster.node("unified", auto=False) for _ in range(2))
    client = cluster.client(failover="on", policy="round_robin", text=False, max_queue=1, workers=1)
    wait_for_all(client)
    served = 0
    while True:
        failed = len(bad.generates)
        asked = Asked(client, {})
        wait_until(lambda: len(bad.generates) > failed or len(good.generates) > served)  # noqa: B023
        if len(bad.generates) > failed:
            bad.fail(bad.generates[-1], "node_failed")
        request = good.wait_generate(served + 1)
        if problem_of(client, bad):
            break  # the last answer, which fills the queue, is not sent yet
        served += 1
        good.reply(request)
        asked.result()
    bad.reply(bad.wait_generate(FAILURES + 1))
    wait_for_all(client)
    good.reply(request)
    asked.result()


@pytest.mark.parametrize("culprit", ["prefill", "decode"])
def test_the_half_that_fails_with_every_partner_is_taken_out(
    cluster: Cluster, culprit: str
) -> None:
    """Each failure is reported by the decode node, which cannot know whose it is."""
    client = two_pairs(cluster, max_failovers=9)
    bad = (cluster.prefill if culprit == "prefill" else cluster.decode)[0]
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}
    done = set[bytes]()

    def finish(prefill: FakeNode, decode: FakeNode, request: Generate) -> None:
        if bad in (prefill, decode):
            decode.fail(request, "transfer", fault="pair")
        else:
            decode.reply(request)

    while not problem_of(client, bad):
        post_to_pairs(client, cluster, body, finish, done)
    assert_only_problem(client, cluster, bad)


@pytest.mark.one_process("each process has a breaker of its own")
def test_a_node_is_back_as_soon_as_the_partner_that_it_failed_with_was_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.nodes.breaker.FIRST_PAUSE", 600.0)
    monkeypatch.setattr("pd.proxy.nodes.breaker.RESET_SECONDS", 0.0)
    prefill, decode = cluster.pair(auto=False)
    options = {"failover": "on", "text": False, "max_failovers": FAILURES - 1, "workers": 1}
    client = cluster.client(**options)
    asked = Asked(client, {})
    for number in range(1, FAILURES + 1):
        prefill.wait_generate(number)
        decode.fail(decode.wait_generate(number), "transfer", fault="pair")
    assert asked.error()["message"] == "as scripted"
    assert ready_urls(client) == []
    prefill.restart()
    wait_for_all(client)


@pytest.mark.one_process("each process weighs its own requests")
def test_a_step_that_fails_counts_once_however_many_were_in_it(cluster: Cluster) -> None:
    """The last time, one of them is alone in it."""
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(failover="on", text=False, policy="round_robin", max_failovers=9)
    nodes[1].ready = nodes[2].ready = False
    wait_until(lambda: ready_urls(client) == [nodes[0].url])
    asked = [Asked(client, {}) for _ in range(FAILURES + 1)]
    for node, after in itertools.pairwise(nodes):
        node.wait_generate(FAILURES + 1)
        after.ready, node.ready = True, False
        wait_until(lambda url=after.url: ready_urls(client) == [url])
        node.fail_step(node.generates[-FAILURES - 1 :])
    poison = nodes[2].wait_generate(1)
    assert [problem_of(client, node) for node in nodes[:2]] == [NOT_READY] * 2
    nodes[2].fail_step([poison])
    for number in range(2, FAILURES + 2):
        nodes[2].reply(nodes[2].wait_generate(number))
    for one in asked:
        one.join()
    errors = [one.error() for one in asked if one.events[-1] != "DONE"]
    assert ["nodes died in a row" in error["message"] for error in errors] == [True]


@pytest.mark.parametrize("position", [0, 1, 4])
def test_a_node_that_goes_on_with_nonsense_is_left_for_another(
    cluster: Cluster, position: int
) -> None:
    """It contradicts tokens that the client has, or leaves a gap; no wrong token is shown."""
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(failover="on", policy="round_robin", text=False)
    asked = Asked(client, {})
    first, request = asked_of(nodes)
    first.say(request, TOKENS[:2], cached_tokens=0)
    asked.wait_tokens(2)
    first.fail(request, "node_failed")
    wait_until(lambda: sum(len(node.generates) for node in nodes) == 2)
    second = next(node for node in nodes if node is not first and node.generates)
    second.say(second.generates[0], [77, 78], position=position)
    wait_until(lambda: sum(len(node.generates) for node in nodes) == 3)
    third = next(node for node in nodes if node not in (first, second))
    third.say(third.generates[0], TOKENS, finish=Finish("length"))  # repeats what is known
    assert ids_of(third.generates[0]) == PROMPT + TOKENS[:2]
    assert asked.result()["output_ids"] == TOKENS
    second.wait_abort(second.generates[0].room)


@pytest.mark.one_process("counts on the turns that one process gives to nodes")
def test_a_node_fails_no_rooms_but_its_own(cluster: Cluster) -> None:
    """Not those of other nodes, nor those that ended, however often it names them."""
    good, bad = (cluster.node("unified", auto=False) for _ in range(2))
    client = cluster.client(failover="on", policy="round_robin", text=False)
    wait_for_all(client)
    asked = [Asked(client, {}) for _ in range(2)]
    theirs, own = good.wait_generate(), bad.wait_generate()
    rooms, error = [theirs.room, own.room, own.room, b"x" * 16], ErrorInfo("internal", "nonsense")
    bad.send(own.sender, StepFailed(to="", sender="", rooms=rooms, error=error))
    again = good.wait_generate(2)
    assert (ids_of(again), again.room != own.room) == (PROMPT, True)
    bad.send(own.sender, StepFailed(to="", sender="", rooms=[*rooms, again.room], error=error))
    bad.fail(again, "invalid_request")
    beats = sum(bad.heartbeats.values())
    wait_until(lambda: sum(bad.heartbeats.values()) > beats + 2)
    assert (len(good.generates), good.aborts) == (2, [])
    for request in good.generates:
        good.reply(request)
    assert [one.result()["output_ids"] for one in asked] == [TOKENS] * 2


def test_nothing_is_sent_for_a_client_that_left_while_there_was_no_node(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy(failover="on", text=False)
    client = cluster.client(proxy)
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"ignore_eos": True}}

    def begin() -> None:
        node.say(node.wait_generate(), TOKENS[:2], cached_tokens=0)

    threading.Thread(target=begin).start()
    with client.stream("POST", "/generate", json=body):
        node.kill()
        wait_until(lambda: not ready_urls(client))
    running = "pd_proxy_running_requests 0"
    wait_until(lambda: running in client.get("/metrics").text)
    node.start()
    wait_for_all(client)
    beats = sum(node.heartbeats.values())
    wait_until(lambda: sum(node.heartbeats.values()) > beats + 3)
    assert node.generates == []
