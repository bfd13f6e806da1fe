"""What the proxy does when scripted nodes fail: which tokens it sends to whom, and what clients
see."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fake_node import EOS, wait_until
from proxy_cluster import wait_for_all
from proxy_tokenizers import byte_level

from pd.core.messages import ErrorInfo, Finish, Stages, StepFailed
from pd.core.sampling_params import choice_seed
from pd.proxy.breaker import FAILURES
from pd.proxy.suspicion import AT_ONCE_SECONDS, DEATHS_IN_COMPANY

if TYPE_CHECKING:
    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate

PROMPT = [5, 6, 7, 8, 9]
NOT_READY = "the node is not ready or drains"
TOKENS = [10, 11, 12, 13, 14, 15]


class Asked:
    """A streamed request of a client, read by a thread of its own."""

    def __init__(self, client: httpx.Client, params: dict[str, Any], **fields: Any) -> None:
        sampling = {"max_new_tokens": len(TOKENS), "ignore_eos": True} | params
        self._body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True} | fields
        self._client, self.events = client, list[Any]()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._client.stream("POST", "/generate", json=self._body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data:
                    self.events.append("DONE" if data == "[DONE]" else json.loads(data))

    def wait_tokens(self, count: int, index: int = 0) -> None:
        """Wait until the client has so many tokens of an answer."""

        def has() -> bool:
            events = [e for e in self.events if e != "DONE" and e.get("index", 0) == index]
            return bool(events) and len(events[-1]["output_ids"]) >= count

        wait_until(has)

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(20)

    def result(self) -> Any:
        """The last event, which has the whole answer."""
        self._thread.join(20)
        assert self.events[-1] == "DONE", self.events
        return self.events[-2]

    def error(self) -> Any:
        self._thread.join(20)
        return self.events[-1]["error"]


def worker_entries(client: httpx.Client) -> list[Any]:
    return list(client.get("/workers").json()["workers"])


def ready_urls(client: httpx.Client) -> list[str]:
    return [worker["url"] for worker in worker_entries(client) if worker["ready"]]


def two_pairs(cluster: Cluster, node: dict[str, Any] | None = None, **options: Any) -> httpx.Client:
    for _ in range(2):
        cluster.pair(auto=False, **(node or {}))
    options = {"failover": "on", "policy": "round_robin", "text": False} | options
    client = cluster.client(**options)
    wait_for_all(client)
    return client


def asked_of(nodes: list[FakeNode], count: int = 1) -> tuple[FakeNode, Generate]:
    """The node that got a request, among those that got ``count`` in all, and the last of them."""
    wait_until(lambda: sum(len(node.generates) for node in nodes) >= count)
    node = max(nodes, key=lambda node: len(node.generates))
    return node, node.generates[-1]


def next_of(nodes: list[FakeNode], before: FakeNode) -> tuple[FakeNode, Generate]:
    """The other node, once it was asked."""
    (other,) = (node for node in nodes if node is not before)
    return other, other.wait_generate()


def newest_of(nodes: list[FakeNode], seen: set[bytes]) -> tuple[FakeNode, Generate]:
    """The node that was asked for a room that none of those is, and what it was asked."""

    def found() -> list[tuple[FakeNode, Generate]]:
        last = [(node, node.generates[-1]) for node in nodes if node.generates]
        return [pair for pair in last if pair[1].room not in seen]

    wait_until(lambda: bool(found()))
    return found()[0]


def ids_of(request: Generate) -> list[int]:
    return np.frombuffer(request.token_ids, "<i4").tolist()


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
    monkeypatch.setattr("pd.proxy.dispatcher.LINGER_SECONDS", linger := 0.4)
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


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_grammar_goes_on_behind_token_1_where_other_nodes_choose_another(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """Both are as good, and which one rounding makes the likelier differs. No node is at fault, and
    the request may still fail over as often as before."""
    monkeypatch.setattr("pd.proxy.breaker.FAILURES", 1)
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


def test_options_of_a_choice_go_to_one_other_node(cluster: Cluster) -> None:
    nodes = [cluster.node("unified", auto=False) for _ in range(3)]
    client = cluster.client(failover="on", policy="round_robin", text=False)
    body = {"input_ids": PROMPT, "choices": [[30], [10], [20]]}
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(client.post("/generate", json=body)))
    thread.start()
    wait_until(lambda: any(len(node.generates) == 3 for node in nodes))
    (first,) = (node for node in nodes if node.generates)
    others = [node for node in nodes if node is not first]
    for node in others:
        node.auto = True
    first.kill()
    thread.join(20)
    (answer,) = found
    assert answer.status_code == 200
    assert answer.json()["output_ids"] == [10]
    assert [f["choice"] for f in answer.json()["meta_info"]["failovers"]] == [None] * 3
    assert sorted(len(node.generates) for node in others) == [0, 3]


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


def test_a_decode_node_goes_on_alone_where_no_other_can(cluster: Cluster) -> None:
    prefill, decode = cluster.pair(auto=False)
    client = cluster.client(failover="on", text=False)
    asked = Asked(client, {})
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


def test_a_poisonous_request_ends_three_nodes_at_most(cluster: Cluster, seed: int) -> None:
    """A node dies as soon as it has the request; those that were beside it are answered."""
    rng = random.Random(seed)
    nodes = [cluster.node("unified", auto=False) for _ in range(6)]
    client = cluster.client(failover="on", text=False, policy="random", max_failovers=20)
    wait_for_all(client)
    poison, answers = [66, 66], list[Any]()

    def ask(prompt: list[int]) -> None:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}}
        answers.append(client.post("/generate", json=body))

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
    assert len(nodes) - len(alive) <= DEATHS_IN_COMPANY
    failed = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) == 25
    assert ["nodes died in a row" in answer.text for answer in failed] == [True]


@pytest.mark.parametrize("size", [2, 6])
def test_those_suspected_together_are_tried_one_at_a_time(cluster: Cluster, size: int) -> None:
    """Two nodes died with all of them in the step; each goes on when the one before has tokens."""
    nodes = [cluster.node("unified", auto=False) for _ in range(2)]
    third = cluster.node("unified", auto=False)
    third.ready = False
    client = cluster.client(failover="on", text=False, policy="round_robin", max_failovers=9)
    nodes[1].ready = False
    wait_until(lambda: [w["ready"] for w in worker_entries(client)] == [True, False, False])
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


def problem_of(client: httpx.Client, node: FakeNode) -> str:
    return next(w["problem"] or "" for w in worker_entries(client) if w["url"] == node.url)


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

    def serve() -> None:
        for decode in cluster.decode:
            for request in [r for r in decode.generates if r.room not in done]:
                prefill = next(p for p in cluster.prefill if p.instance_id == request.peer)
                if all(r.room != request.room for r in prefill.generates):
                    continue
                done.add(request.room)
                prefill.reply(request)
                if bad in (prefill, decode):
                    decode.fail(request, "transfer", fault="pair")
                else:
                    decode.reply(request)

    while not problem_of(client, bad):
        thread = threading.Thread(target=client.post, args=("/generate",), kwargs={"json": body})
        thread.start()
        while thread.is_alive():
            serve()
            time.sleep(0.002)
    others = [node for node in (*cluster.prefill, *cluster.decode) if node is not bad]
    assert [problem_of(client, node) for node in others] == ["", "", ""]


def test_a_node_is_back_as_soon_as_the_partner_that_it_failed_with_was_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.breaker.FIRST_PAUSE", 600.0)
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
