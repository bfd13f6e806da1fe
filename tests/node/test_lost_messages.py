"""Connections that are reset between processes that live: what they lost ends with an error."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from cluster import is_idle, wait_until
from raw_peer import proxy_of
from relay import Relay
from requests_for_tests import make_generate
from tiny import VOCAB_SIZE, tiny_cluster, tiny_node

from pd.core.messages import (
    LEASE_SECONDS,
    NodeHeartbeat,
    ProxyHeartbeat,
    encode_message,
    heartbeat_identity,
)
from pd.util.numbering import SentNumbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster import Cluster
    from raw_peer import RawPeer

    from pd.core.messages import Generate, Message
    from pd.launch import NodeServer

# After a lease silence on one side tells the other.
ENDS_WITHIN = LEASE_SECONDS + 3.0


@pytest.fixture
def relayed() -> Iterator[tuple[Cluster, Relay]]:
    """A pair whose messages pass a relay; KV does not."""
    with tiny_cluster() as cluster:
        node = cluster.prefill[0].node
        relay = Relay(node.control.port)
        registry = cluster.prefill[0]._registry
        endpoint = f"tcp://127.0.0.1:{relay.address()['port']}"
        registry.own = msgspec.structs.replace(registry.own, endpoint=endpoint)
        cluster.client.generate([1, 2, 3], cluster.pair, max_tokens=2).tokens()
        yield cluster, relay
        relay.close()


def test_whatever_a_reset_loses_between_nodes_ends_with_an_error(
    relayed: tuple[Cluster, Relay], seed: int
) -> None:
    print(f"seed {seed}")
    rng, (cluster, relay) = random.Random(seed), relayed
    for _ in range(12):
        requests = [
            cluster.client.generate(
                [rng.randrange(VOCAB_SIZE - 2) for _ in range(rng.randrange(4, 120))],
                cluster.pair,
                max_tokens=rng.choice([2, 3, 8]),
            )
            for _ in range(rng.randrange(1, 6))
        ]
        if rng.random() < 0.5:
            relay.stall()
        time.sleep(rng.uniform(0.0, 0.03))
        relay.cut()
        relay.resume()
        for request in requests:
            assert request.done.wait(ENDS_WITHIN), "nobody says what became of it"
            if request.error is not None:
                cluster.client.abort(request)  # as a proxy does on both nodes
    # Those that failed too: nothing is left of them.
    wait_until(lambda: all(is_idle(node) for node in cluster.nodes), ENDS_WITHIN)
    for node in cluster.nodes:
        node.node.check_books()


def endless(server: NodeServer, peer: RawPeer) -> Generate:
    """900 tokens, of which each takes 10 ms."""
    forward = server.node.engine.runner.forward

    def slow(*args: Any) -> Any:
        time.sleep(0.01)
        return forward(*args)

    server.node.engine.runner.forward = slow
    params = {"max_tokens": 900, "ignore_eos": True}
    return make_generate(range(9), to=server.instance_id, sender=peer.name, params=params)


class Numbered:
    """A proxy that numbers its messages, some of which are lost."""

    def __init__(self, peer: RawPeer) -> None:
        self.peer, self.sent = peer, SentNumbers()

    def send(self, message: Message, *, lost: bool = False) -> None:
        counts = not isinstance(message, ProxyHeartbeat)
        number = self.sent.number_message(counts=counts)
        if not lost:
            self.peer.send_bytes(number, encode_message(message))

    def beat(self) -> int:
        """How many losses the node knows of."""
        self.send(ProxyHeartbeat(to="", sender=self.peer.name))
        losses: int = self.peer.receive(NodeHeartbeat).losses
        return losses


def test_a_node_gives_up_a_proxy_of_which_it_lacks_messages_and_says_so() -> None:
    server = tiny_node("unified")
    try:
        with proxy_of(server) as peer:
            proxy = Numbered(peer)

            def generate() -> bytes:
                message = endless(server, peer)
                proxy.send(message)
                return message.room

            before = proxy.beat()
            kept = generate()
            wait_until(lambda: kept in server.node.requests, 5)
            assert proxy.beat() == before
            lost = make_generate(range(9), to=server.instance_id, sender=peer.name)
            proxy.send(lost, lost=True)
            assert proxy.beat() == before + 1
            wait_until(lambda: is_idle(server), 5)
            again = generate()
            wait_until(lambda: again in server.node.requests, 5)
            assert proxy.beat() == before + 1
            # A new stream: the proxy forgot what it had here.
            proxy.sent = SentNumbers()
            assert proxy.beat() == before + 1
            wait_until(lambda: is_idle(server), 5)
    finally:
        server.stop()


def test_a_proxy_that_was_silent_for_a_lease_hears_that_its_requests_are_gone() -> None:
    server = tiny_node("unified")
    try:
        with proxy_of(server) as peer:
            proxy = Numbered(peer)
            before = proxy.beat()
            message = endless(server, peer)
            proxy.send(message)
            wait_until(lambda: message.room in server.node.requests, 5)
            wait_until(lambda: is_idle(server), LEASE_SECONDS + 2)
            assert proxy.beat() == before + 1
    finally:
        server.stop()


def test_an_unnumbered_message_is_taken_as_it_is() -> None:
    server = tiny_node("unified")
    try:
        with proxy_of(server) as peer:
            peer.beat()
            assert peer.receive(NodeHeartbeat).losses == 0
            peer.send_bytes(b"no number", encode_message(ProxyHeartbeat(to="", sender=peer.name)))
            assert peer.receive(NodeHeartbeat).losses == 0
    finally:
        server.stop()


def test_the_heartbeat_thread_of_a_proxy_keeps_its_requests_while_its_loop_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pd.core.leases.LEASE_SECONDS", 1.2)
    server = tiny_node("unified")
    try:
        with proxy_of(server) as peer, proxy_of(server, heartbeat_identity(peer.name)) as thread:
            message = endless(server, peer)
            peer.send(message)
            wait_until(lambda: message.room in server.node.requests, 5)
            for _ in range(10):
                time.sleep(0.3)
                thread.beat()
            assert not server.node.requests.find_request(message.room).state.is_terminal
            assert not thread.answers(NodeHeartbeat, 0.1)
            wait_until(lambda: is_idle(server), 5)  # the thread fell silent too
            peer.beat()
            assert peer.receive(NodeHeartbeat).losses == 1
    finally:
        server.stop()
