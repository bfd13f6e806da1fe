"""A node gives a waiting request back to its proxy, and keeps one that it has begun with."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from cluster import TokenClient, random_prompts, wait_until
from tiny import tiny_cluster

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster import Cluster, Pending


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tiny_cluster(1, 1, elastic="auto", chunked_prefill_size=48) as made:
        yield made


class Standstill:
    """While it lasts the prefill node begins with no prompt."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self._node = cluster.prefill[0].node
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(self._node.scheduler.prefill, "plan_step", lambda budget, most: [])

    def end(self) -> None:
        self._monkeypatch.undo()
        self._node.core.events.work_available.set()


def answer(pending: Pending) -> bool | None:
    wait_until(lambda: pending.taken_back is not None, 10)
    return pending.taken_back


@pytest.mark.parametrize("way", [slice(0, 2), slice(0, 1)], ids=["pair", "alone"])
def test_a_waiting_request_is_given_back_and_leaves_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, way: slice
) -> None:
    """The decode node has its reservation already, and learns of the end from the prefill node."""
    standstill = Standstill(cluster, monkeypatch)
    client, (first, second) = cluster.client, random_prompts(3, [100, 120])
    stays = client.generate(first, cluster.pair[way])
    goes = client.generate(second, cluster.pair[way])
    receiving = cluster.decode[0].node.receiving
    wait_until(lambda: way.stop == 1 or len(receiving.incoming) == 2, 10)
    client.take_back(goes)
    assert answer(goes)
    standstill.end()
    assert len(stays.tokens()) == 16
    cluster.wait_idle()
    assert not goes.late


@pytest.mark.parametrize("way", [slice(0, 2), slice(0, 1)], ids=["pair", "alone"])
def test_a_request_whose_grammar_is_compiled_is_given_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, way: slice
) -> None:
    wanted: list[Any] = []
    node = cluster.prefill[0].node
    monkeypatch.setattr(
        node.core.grammars, "request_rules", lambda *asked, **_: wanted.append(asked)
    )
    grammar = Grammar("regex", "[a-z]+")
    request = cluster.client.generate(range(50), cluster.pair[way], grammar=grammar)
    wait_until(lambda: wanted, 10)
    cluster.client.take_back(request)
    assert answer(request)
    cluster.client.abort(request)  # as proxies do
    _, compiled, _ = wanted[0]
    compiled(InvalidRequestError("too late"))
    cluster.wait_idle()
    # The decode node may find its peer without the request before the abort comes.
    assert node.core.instance_id not in request.late


def test_a_request_that_the_node_has_begun_with_stays(cluster: Cluster) -> None:
    request = cluster.client.generate(range(40), cluster.pair, max_tokens=300)
    wait_until(lambda: len(request.choices[0].tokens) > 0, 20)
    cluster.client.take_back(request)
    assert answer(request) is False
    assert len(request.tokens()) == 300
    request.taken_back = None
    cluster.client.take_back(request)
    assert answer(request) is False, "it has ended"


def test_a_request_is_given_back_to_its_own_proxy_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    standstill = Standstill(cluster, monkeypatch)
    request = cluster.client.generate(range(50), cluster.pair)
    other = TokenClient(cluster.nodes)
    try:
        wait_until(lambda: len(cluster.prefill[0].node.requests) == 1, 10)
        other._rooms[request.room] = request
        other.take_back(request)
        assert answer(request) is False
    finally:
        other.close()
    standstill.end()
    assert len(request.tokens()) == 16


def test_requests_that_are_asked_back_at_any_moment(cluster: Cluster, seed: int) -> None:
    """Each is either given back without a word, or gets all of its tokens; some are aborted too."""
    rng, client = random.Random(seed), cluster.client
    prompts = list(random_prompts(seed, [rng.randrange(1, 250) for _ in range(40)]))
    ways = [cluster.pair, cluster.pair[::-1], cluster.pair[:1]]
    sent = [(client.generate(p, rng.choice(ways)), p) for p in prompts]
    aborted = set()
    for number, (request, _) in enumerate(rng.sample(sent, len(sent))):
        if number > len(sent) // 2 and rng.random() < 0.5:
            wait_until(lambda r=request: len(r.choices[0].tokens) > 0 or r.done.is_set(), 30)
        if rng.random() < 0.15:
            client.abort(request)
            aborted.add(request.room)
        client.take_back(request)
        if rng.random() < 0.15:
            client.abort(request)
            aborted.add(request.room)
    taken = [answer(request) for request, _ in sent]
    stayed = [(r, p) for r, p in sent if not r.taken_back and r.room not in aborted]
    again = [client.generate(prompt, cluster.pair) for _, prompt in stayed]
    assert [r.tokens() for r, _ in stayed] == [r.tokens() for r in again], seed
    cluster.wait_idle()
    assert not any(request.late for request, _ in sent), seed
    assert set(taken) == {True, False}, seed
