"""Digests are computed where they hold nobody up, and whoever waits for one may be aborted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from cluster import random_prompts, wait_until
from hand_off_helpers import pages
from raw_peer import SOON
from tiny import tiny_cluster

from pd.core.errors import AbortedError, TransferError

if TYPE_CHECKING:
    from cluster import Cluster

    from pd.launch import NodeServer

PROMPTS = list(random_prompts(41, [40, 44, 30]))
ROLES = ("prefill", "decode")


class SlowDigest:
    """Holds a node's digests until it is opened; ``fail`` makes them fail then."""

    def __init__(self, server: NodeServer) -> None:
        pool = server.node.engine.pool
        self._digest = pool.compute_digest
        self.entered, self._open = threading.Event(), threading.Event()
        self.fail = False
        pool.compute_digest = self._wait

    def _wait(self, *args: Any) -> bytes:
        self.entered.set()
        assert self._open.wait(30)
        if self.fail:
            raise RuntimeError("out of memory")
        return self._digest(*args)

    def open(self) -> None:
        self._open.set()


def slow(cluster: Cluster, role: str) -> tuple[NodeServer, SlowDigest]:
    server = getattr(cluster, role)[0]
    return server, SlowDigest(server)


@pytest.mark.parametrize("role", ROLES)
def test_a_node_that_computes_a_digest_answers_and_computes(role: str) -> None:
    with tiny_cluster(kv_digest=True) as cluster:
        cluster.client.generate(PROMPTS[2], cluster.pair, max_tokens=2).tokens()
        streaming = cluster.client.generate(PROMPTS[2], cluster.pair, max_tokens=600)
        wait_until(lambda: len(streaming.choices[0].tokens) > 2, 30)
        server, digest = slow(cluster, role)
        request = cluster.client.generate(PROMPTS[0], cluster.pair, max_tokens=4)
        assert digest.entered.wait(5)
        before = len(streaming.choices[0].tokens)
        wait_until(lambda: len(streaming.choices[0].tokens) > before + 20, 30)
        assert server.node.core.events.lock.acquire(timeout=SOON), "the node's lock is held"
        server.node.core.events.lock.release()
        assert list(request.choices[0].tokens) == [0], "token 1 did not wait"
        digest.open()
        assert len(request.tokens(30)) == 4
        cluster.client.abort(streaming)
        cluster.wait_idle()


@pytest.mark.parametrize("role", ROLES)
def test_an_abort_while_the_digest_is_computed_keeps_the_pages_until_its_end(role: str) -> None:
    with tiny_cluster(kv_digest=True) as cluster:
        server, digest = slow(cluster, role)
        running = cluster.client.generate(PROMPTS[0], cluster.pair)
        assert digest.entered.wait(5)
        waiting = cluster.client.generate(PROMPTS[1], cluster.pair)
        wait_until(
            lambda: server.node.requests.find_request(waiting.room) and waiting.choices[0].tokens,
            30,
        )
        with server.node.core.events.event():
            assert server.node.abort_rid(None) == 2
        for request in (running, waiting):
            with pytest.raises(AbortedError):
                request.tokens(SOON)
        state = "locked" if role == "prefill" else "quarantined"
        wait_until(lambda: waiting.room not in server.node.requests, SOON)
        assert pages(server)[state] >= len(PROMPTS[0]) // 4, "the digest still reads them"
        server.node.check_books()
        digest.open()
        cluster.wait_idle()
        assert len(cluster.client.generate(PROMPTS[2], cluster.pair).tokens(30)) == 16
        cluster.wait_idle()


@pytest.mark.parametrize("role", ROLES)
def test_a_digest_that_cannot_be_computed_fails_its_request_only(role: str) -> None:
    with tiny_cluster(kv_digest=True) as cluster:
        _, digest = slow(cluster, role)
        digest.fail = True
        digest.open()
        request = cluster.client.generate(PROMPTS[0], cluster.pair)
        with pytest.raises(TransferError, match=r"could not be computed: out of memory"):
            request.tokens(30)
        digest.fail = False
        assert len(cluster.client.generate(PROMPTS[1], cluster.pair).tokens(30)) == 16
        cluster.wait_idle()


@pytest.mark.parametrize("role", ROLES)
def test_the_loss_of_the_peer_while_the_digest_is_computed_fails_the_request(role: str) -> None:
    with tiny_cluster(kv_digest=True) as cluster:
        server, digest = slow(cluster, role)
        other = cluster.decode[0] if role == "prefill" else cluster.prefill[0]
        request = cluster.client.generate(PROMPTS[0], cluster.pair)
        assert digest.entered.wait(5)
        node = server.node
        lose = node.sending.drop_peer if role == "prefill" else node.receiving.drop_peer
        on_control = threading.Event()

        def gone() -> None:
            with node.core.events.event():
                lose(other.instance_id, "the test said so")
            on_control.set()

        node.control.call_soon(gone)
        assert on_control.wait(5)
        with pytest.raises(Exception, match="the test said so"):
            request.tokens(30)
        assert pages(server)["free"] + pages(server)["cached"] < pages(server)["total"]
        digest.open()
        cluster.wait_idle()
        assert len(cluster.client.generate(PROMPTS[1], cluster.pair).tokens(30)) == 16


def test_a_node_stops_in_the_middle_of_a_digest() -> None:
    with tiny_cluster(kv_digest=True) as cluster:
        server, digest = slow(cluster, "decode")
        cluster.client.generate(PROMPTS[0], cluster.pair)
        assert digest.entered.wait(5)
        stopping = threading.Thread(target=server.node.stop)
        stopping.start()
        digest.open()
        stopping.join(10)
        assert not stopping.is_alive()
