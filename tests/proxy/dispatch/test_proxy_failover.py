"""What the proxy sends to whom when scripted nodes fail, and what clients see: answers go on
where they stood."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
from failing_nodes import (
    PROMPT,
    TOKENS,
    Asked,
    asked_of,
    ids_of,
    newest_of,
    next_of,
    problem_of,
    two_pairs,
)
from fake_node import EOS, wait_until
from proxy_tokenizers import byte_level

from pd.core.messages import Finish, Stages
from pd.core.sampling_params import choice_seed

if TYPE_CHECKING:
    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_before_token_1_the_same_request_goes_to_other_nodes(cluster: Cluster, role: str) -> None:
    asked = Asked(two_pairs(cluster), {"sampling_seed": 3})
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    (prefill if role == "prefill" else decode).fail(first, "node_failed")
    other, second = next_of(cluster.prefill, prefill)
    assert (second.room != first.room, second.produced) == (True, 0)
    assert (second.token_ids, second.params) == (first.token_ids, first.params)
    # Both halves of the first attempt end together.
    prefill.wait_abort(first.room)
    decode.wait_abort(first.room)
    last, _ = next_of(cluster.decode, decode)
    other.say(second, TOKENS[:1], cached_tokens=0)
    last.say(second, TOKENS, finish=Finish("length"))
    result = asked.result()
    assert result["output_ids"] == TOKENS
    (failover,) = result["meta_info"]["failovers"]
    assert (failover["position"], failover["choice"]) == (0, None)


def test_a_stream_goes_on_behind_the_tokens_that_the_client_has(cluster: Cluster) -> None:
    asked = Asked(two_pairs(cluster), {"sampling_seed": 3, "presence_penalty": 1.0})
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    stages = Stages(queue=1.0, prefill=2.0)
    prefill.say(first, TOKENS[:1], cached_tokens=4, stages=stages)
    asked.wait_tokens(1)
    decode.say(first, TOKENS[:3], stages=Stages(bootstrap=0.5, transfer=0.25))
    decode.fail(first, "transfer")
    other, second = next_of(cluster.prefill, prefill)
    last, also = next_of(cluster.decode, decode)
    for resumed in (second, also):
        assert ids_of(resumed) == PROMPT + TOKENS[:3]
        assert (resumed.produced, resumed.params) == (3, first.params)
    # Late words of the first attempt are ignored.
    decode.say(first, [99], position=3)
    other.say(second, TOKENS[3:4], position=3, cached_tokens=8, stages=Stages(queue=9.0))
    last.say(second, TOKENS[3:], position=3, finish=Finish("length"), stages=Stages(transfer=9.0))
    result = asked.result()
    meta = result["meta_info"]
    assert result["output_ids"] == TOKENS
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(TOKENS))
    assert meta["cached_tokens"] == 4
    assert (meta["stages"]["queue"], meta["stages"]["transfer"]) == (1.0, 0.25)
    (failover,) = meta["failovers"]
    assert (failover["position"], failover["choice"]) == (3, 0)
    assert "as scripted" in failover["reason"]


def test_every_answer_to_a_prompt_goes_on_where_it_stands(cluster: Cluster) -> None:
    """One has ended, one has tokens, one has none."""
    asked = Asked(two_pairs(cluster), {"sampling_seed": 3, "n": 3, "ignore_eos": False})
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    prefill.say(first, [EOS], index=0, finish=Finish("stop", EOS), cached_tokens=0)
    prefill.say(first, [20], index=1, cached_tokens=0)
    prefill.say(first, [30], index=2, cached_tokens=0)
    for index in range(3):
        asked.wait_tokens(1, index)
    decode.say(first, [20, 21], index=1)
    decode.fail(first, "node_failed")
    other, _ = next_of(cluster.prefill, prefill)
    other.wait_generate(2)
    last, _ = next_of(cluster.decode, decode)
    by_length = sorted(other.generates, key=lambda request: -request.produced)
    for request, number, output in zip(by_length, (1, 2), ([20, 21], [30]), strict=True):
        assert (request.params.n, ids_of(request)) == (1, PROMPT + output)
        assert request.params.seed == choice_seed(3, number)
        rest = [10 * (number + 1) + i for i in range(len(output), len(TOKENS))]
        last.say(request, rest, position=len(output), finish=Finish("length"))
    asked.result()
    found = {}
    for event in asked.events[:-1]:
        found[event["index"]] = event["output_ids"]
    assert found == {0: [EOS], 1: [20, 21, 22, 23, 24, 25], 2: [30, 31, 32, 33, 34, 35]}


def test_what_the_client_has_not_seen_begins_again(cluster: Cluster) -> None:
    """Tokens wait for the log probabilities of the prompt, which nodes send with the first one."""
    fields = {"return_logprob": True, "logprob_start_len": 0}
    asked = Asked(two_pairs(cluster), {}, **fields)
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    decode.say(first, TOKENS[:2], logprobs=decode.logprobs(TOKENS[:2], 0))
    decode.fail(first, "node_failed")
    other, second = next_of(cluster.prefill, prefill)
    wait_until(lambda: sum(len(node.generates) for node in cluster.decode) == 2)
    assert (ids_of(second), second.produced) == (PROMPT, 0)
    assert second.params.prompt_logprobs_start == 0
    for node in cluster.decode:
        for request in node.generates:
            if request.room == second.room:
                other.reply(second)
                node.reply(request)
    meta = asked.result()["meta_info"]
    assert len(meta["input_token_logprobs"]) == len(PROMPT)
    assert len(meta["output_token_logprobs"]) == len(TOKENS)


def test_an_answer_that_begins_again_has_all_the_time_of_the_new_nodes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill node fails behind the end of the answer, while its log probabilities of the
    prompt are waited for."""
    monkeypatch.setattr("pd.proxy.dispatch.delivery.LINGER_SECONDS", linger := 0.4)
    asked = Asked(two_pairs(cluster), {}, return_logprob=True, logprob_start_len=0)
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    decode.say(first, TOKENS, logprobs=decode.logprobs(TOKENS, 0), finish=Finish("length"))
    prefill.fail(first, "node_failed")
    other, second = next_of(cluster.prefill, prefill)
    last, _ = newest_of(cluster.decode, {first.room})
    other.reply(second)
    asked.wait_tokens(1)
    time.sleep(2 * linger)
    last.say(second, TOKENS, logprobs=last.logprobs(TOKENS, 0), finish=Finish("length"))
    result = asked.result()
    assert result["output_ids"] == TOKENS
    assert len(result["meta_info"]["failovers"]) == 1


def test_a_grammar_forces_behind_token_1_what_it_forced_before(cluster: Cluster) -> None:
    """The decode node adds forced tokens when it has token 1, so that one is asked for again."""
    asked = Asked(two_pairs(cluster), {"regex": "a*"})
    prefill, first = asked_of(cluster.prefill)
    prefill.say(first, TOKENS[:1], cached_tokens=0)
    prefill.fail(first, "node_failed")
    other, second = next_of(cluster.prefill, prefill)
    assert (ids_of(second), second.produced) == (PROMPT, 0)
    other.say(second, TOKENS[:1])
    wait_until(lambda: sum(len(node.generates) for node in cluster.decode) == 2)
    (node,) = (n for n in cluster.decode if any(g.room == second.room for g in n.generates))
    node.say(second, TOKENS[:5])
    node.fail(second, "node_failed")
    wait_until(lambda: sum(len(node.generates) for node in cluster.prefill) == 3)
    third = prefill.generates[-1]
    assert (ids_of(third), third.produced) == (PROMPT + TOKENS[:5], 5)
    prefill.say(third, TOKENS[5:], position=5, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


@pytest.mark.parametrize("says_again", [False, True])
def test_a_grammar_forces_behind_the_first_token_of_any_attempt(
    cluster: Cluster, says_again: bool
) -> None:
    """Also where the third attempt got no further than to repeat it."""
    asked = Asked(two_pairs(cluster, max_failovers=3), {"regex": "a*"})
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    prefill.say(first, TOKENS[:1], cached_tokens=0)
    decode.say(first, TOKENS[:3])
    decode.fail(first, "node_failed")
    seen = {first.room}
    for number in range(2 + says_again):
        first_node, request = newest_of(cluster.prefill, seen)
        decode_node, _ = newest_of(cluster.decode, seen)
        assert (ids_of(request), request.produced) == (PROMPT + TOKENS[:3], 3)
        if number == 1 + says_again:
            break
        seen.add(request.room)
        first_node.say(request, TOKENS[3:4], position=3)
        asked.wait_tokens(4)
        first_node.fail(request, "node_failed")
        decode_node.wait_abort(request.room)
    first_node.say(request, TOKENS[3:4], position=3)
    decode_node.say(request, TOKENS[3:], position=3, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_grammar_goes_on_behind_token_1_where_other_nodes_choose_another(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """Both are as good, and which one rounding makes the likelier differs. No node is at fault, and
    the request may still fail over as often as before."""
    monkeypatch.setattr("pd.proxy.nodes.breaker.FAILURES", 1)
    client = two_pairs(cluster, max_failovers=1)
    asked = Asked(client, {"regex": "a*"})
    prefill, first = asked_of(cluster.prefill)
    prefill.say(first, TOKENS[:1], cached_tokens=0)
    prefill.fail(first, "node_failed")
    other, second = next_of(cluster.prefill, prefill)
    decode, _ = newest_of(cluster.decode, {first.room})
    (other if role == "prefill" else decode).say(second, [77])
    seen = {first.room, second.room}
    last, third = newest_of(cluster.decode, seen)
    assert (ids_of(third), third.produced) == (PROMPT + TOKENS[:1], 1)
    assert third.params == second.params
    last.say(third, TOKENS[1:], position=1, finish=Finish("length"))
    result = asked.result()
    assert result["output_ids"] == TOKENS
    assert [f["reason"] for f in result["meta_info"]["failovers"]] == ["as scripted"]
    others = [node for node in (*cluster.prefill, *cluster.decode) if node is not prefill]
    assert [problem_of(client, node) for node in others] == ["", "", ""]


@pytest.mark.parametrize("said", [1, 2, 3])
def test_a_stop_string_that_a_failover_divides_is_found(cluster: Cluster, said: int) -> None:
    """Its first part came from a node that is lost, and the client has not seen it: it is held back
    until the rest is known."""
    text = byte_level()
    tokens = text.encode("hello world, the quick brown fox").ids
    stop = text.decode(tokens[-3:])
    params = {"stop": [stop, "never"], "max_new_tokens": 2 * len(tokens)}
    asked = Asked(two_pairs(cluster, text=True), params, incremental=True)
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    cut = len(tokens) - 3 + said
    prefill.say(first, tokens[:1])
    decode.say(first, tokens[: cut - 1])
    decode.say(first, tokens[cut - 1 : cut], position=cut - 1)
    if said < 3:
        decode.fail(first, "node_failed")
        other, second = next_of(cluster.prefill, prefill)
        last, _ = next_of(cluster.decode, decode)
        assert ids_of(second) == PROMPT + tokens[:cut]
        other.say(second, tokens[cut : cut + 1], position=cut)
        last.say(second, [*tokens[cut:], *TOKENS], position=cut)
    result = asked.result()
    shown = "".join(event["text"] for event in asked.events[:-1])
    assert shown == text.decode(tokens[:-3])
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(result["meta_info"].get("failovers", [])) == int(said < 3)


def test_a_client_that_reads_nothing_meanwhile_gets_every_token_once(cluster: Cluster) -> None:
    """It reads again only when its answer has moved twice and ended."""
    client = two_pairs(cluster, {"context_length": 1 << 20, "pages": {"total": 1 << 20}})
    tokens = [number % 499 for number in range(20_000)]
    sampling = {"max_new_tokens": len(tokens), "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, "incremental": True}
    content = json.dumps(body)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((client.base_url.host, client.base_url.port))
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        kind = "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        connection.sendall((head + kind + content).encode())
        asked = [asked_of(nodes) for nodes in (cluster.prefill, cluster.decode)]
        done = 0
        for stop in (6_000, 12_000, len(tokens)):
            (prefill, request), (decode, _) = asked
            assert ids_of(request) == PROMPT + tokens[:done]
            prefill.say(request, tokens[done : done + 1], position=done)
            for start in range(done, stop, 100):
                ends = Finish("length") if start + 100 == len(tokens) else None
                decode.say(request, tokens[start : start + 100], position=start, finish=ends)
            if stop < len(tokens):
                seen = {node.generates[-1].room for node in cluster.decode if node.generates}
                decode.fail(request, "node_failed")
                asked = [newest_of(nodes, seen) for nodes in (cluster.prefill, cluster.decode)]
            done = stop
        received = b""
        while data := connection.recv(1 << 16):
            received += data
    events = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", received)]
    assert [token for event in events for token in event["output_ids"]] == tokens
    assert len(events[-1]["meta_info"]["failovers"]) == 2


def ask_for_choice(cluster: Cluster) -> tuple[Future[httpx.Response], FakeNode, list[FakeNode]]:
    """Ask for one of three options: the answer to come, the node that got them, the others."""
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(failover="on", policy="round_robin", text=False)
    body = {"input_ids": PROMPT, "choices": [[30], [10], [20]]}
    answer: Future[httpx.Response] = Future()

    def post() -> None:
        answer.set_result(client.post("/generate", json=body))

    threading.Thread(target=post).start()
    wait_until(lambda: any(len(node.generates) == 3 for node in nodes))
    (first,) = (node for node in nodes if node.generates)
    return answer, first, [node for node in nodes if node is not first]


def test_options_of_a_choice_go_to_one_other_node(cluster: Cluster) -> None:
    answer, first, others = ask_for_choice(cluster)
    for node in others:
        node.auto = True
    first.kill()
    response = answer.result(20)
    assert response.status_code == 200
    assert response.json()["output_ids"] == [10]
    assert [f["choice"] for f in response.json()["meta_info"]["failovers"]] == [None] * 3
    assert sorted(len(node.generates) for node in others) == [0, 3]


def test_an_option_does_not_go_back_to_the_node_that_failed_it(cluster: Cluster) -> None:
    """The other options are there."""
    answer, first, others = ask_for_choice(cluster)
    first.kill()
    wait_until(lambda: any(len(node.generates) == 3 for node in others))
    second, third = sorted(others, key=lambda node: -len(node.generates))
    second.fail(second.generates[0], "node_failed")
    third.reply(third.wait_generate())
    for request in second.generates[1:]:
        second.reply(request)
    assert answer.result(20).status_code == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_lost_its_peer_is_asked_again(cluster: Cluster, role: str) -> None:
    """It has the prompt, or serves as well as before; its peer is avoided."""
    node = {"context_length": 4000, "pages": {"total": 2000, "free": 2000}, "page_size": 1}
    prompt = list(range(5, 205))
    asked = Asked(two_pairs(cluster, node, policy="cache_aware"), {}, input_ids=prompt)
    prefill, first = asked_of(cluster.prefill)
    decode, _ = asked_of(cluster.decode)
    reporter = prefill if role == "prefill" else decode
    reporter.fail(first, "node_failed", fault="peer")
    wait_until(lambda: sum(len(n.generates) for n in (*cluster.prefill, *cluster.decode)) == 4)
    again = {
        n.role: n
        for n in (*cluster.prefill, *cluster.decode)
        if n.generates and n.generates[-1].room != first.room
    }
    lost = decode if role == "prefill" else prefill
    assert again[lost.role] is not lost
    if role == "prefill":
        assert again["prefill"] is prefill, "it has the prompt"
    second = again["prefill"].generates[-1]
    again["prefill"].say(second, TOKENS[:1], cached_tokens=0)
    again["decode"].say(second, TOKENS, finish=Finish("length"))
    assert asked.result()["output_ids"] == TOKENS
