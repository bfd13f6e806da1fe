"""What takes scripted nodes out that speak before they fail, and what lets them back in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from failing_nodes import (
    PROMPT,
    TOKENS,
    Asked,
    asked_of,
    assert_only_problem,
    next_of,
    post_to_pairs,
    problem_of,
    two_pairs,
)
from fake_node import wait_until
from proxy_cluster import wait_for_all

from pd.core.messages import Finish
from pd.proxy.nodes.breaker import FAILURES

if TYPE_CHECKING:
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate

BODY = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}

pytestmark = pytest.mark.one_process("each process has breakers of its own")


def test_a_node_that_fails_every_step_but_the_prompts_is_out_until_a_probe_ends(
    cluster: Cluster,
) -> None:
    """Token 1 comes from that step, for a probe as well."""
    bad, good = (cluster.node("unified", auto=False) for _ in range(2))
    good.auto = True
    client = cluster.client(failover="on", policy="round_robin", text=False)
    wait_for_all(client)
    for _ in range(3 * FAILURES):
        failed = len(bad.generates)
        thread = threading.Thread(target=client.post, args=("/generate",), kwargs={"json": BODY})
        thread.start()
        wait_until(lambda: len(bad.generates) > failed or not thread.is_alive())  # noqa: B023
        if len(bad.generates) > failed:
            bad.say(bad.generates[-1], TOKENS[:1], cached_tokens=0)
            bad.fail_step([bad.generates[-1]])
        thread.join()
        if problem_of(client, bad):
            break
    assert "taken out after 5 failures" in problem_of(client, bad)
    probe = bad.wait_generate(FAILURES + 1)
    bad.say(probe, TOKENS[:1], cached_tokens=0)
    bad.fail_step([probe])
    second = bad.wait_generate(FAILURES + 2)
    assert problem_of(client, bad)
    bad.reply(second)
    wait_for_all(client)


def test_a_decode_node_that_fails_behind_the_token_that_it_repeats_is_taken_out(
    cluster: Cluster,
) -> None:
    client = two_pairs(cluster)
    bad = cluster.decode[0]
    done = set[bytes]()

    def finish(_: FakeNode, decode: FakeNode, request: Generate) -> None:
        if decode is bad:
            decode.say(request, TOKENS[:1])
            decode.fail_step([request])
        else:
            decode.reply(request)

    for _ in range(3 * FAILURES):
        post_to_pairs(client, cluster, BODY, finish, done)
        if problem_of(client, bad):
            break
    assert "taken out after 5 failures" in problem_of(client, bad)
    assert_only_problem(client, cluster, bad)


def test_streams_that_left_a_prefill_node_do_not_vouch_for_it(cluster: Cluster) -> None:
    prefill, decode = cluster.pair(auto=False)
    client = cluster.client(failover="on", text=False, max_failovers=FAILURES - 1)
    old = Asked(client, {"max_new_tokens": FAILURES + 2})
    request = prefill.wait_generate()
    prefill.say(request, [10], cached_tokens=0)
    decode.say(request, [10])
    old.wait_tokens(1)
    new = Asked(client, {})
    for number in range(1, FAILURES + 1):
        failing = prefill.wait_generate(number + 1)
        decode.say(request, [10 + number], position=number)
        old.wait_tokens(number + 1)
        prefill.fail(failing, "node_failed")
    assert new.error()["message"] == "as scripted"
    assert "taken out after 5 failures" in problem_of(client, prefill)
    decode.say(request, [99], position=FAILURES + 1, finish=Finish("length"))
    assert len(old.result()["output_ids"]) == FAILURES + 2


@pytest.mark.parametrize("works", [True, False])
def test_a_proxy_that_drains_probes_nodes_for_the_requests_that_it_has(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """It does not wait for a probe when these have ended."""
    monkeypatch.setattr("pd.proxy.nodes.breaker.FAILURES", 1)
    nodes = [cluster.node("unified", auto=False) for _ in range(2)]
    proxy = cluster.proxy(failover="on", policy="round_robin", text=False)
    client = cluster.client(proxy)
    wait_for_all(client)
    asked = Asked(client, {})
    bad, request = asked_of(nodes)
    bad.fail(request, "node_failed")
    good, request = next_of(nodes, bad)
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(proxy.run(proxy.proxy.drain(10))))
    thread.start()
    probe = bad.wait_generate(2)
    if works:
        bad.reply(probe)
        wait_for_all(client)
        good.kill()
        good, request = bad, bad.wait_generate(3)
    good.reply(request)
    assert asked.result()["output_ids"] == TOKENS
    thread.join()
    assert drained == [True]
