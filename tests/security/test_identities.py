"""Strangers on the message sockets of nodes do not speak in the name of others.

Each attack aims at a stream that is under way while its proxy goes on.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import zmq
from hand_off_helpers import Gate
from processes import wait_until
from proxy.fake_node import FakeNode
from raw_peer import RawPeer, proxy_of
from requests_for_tests import make_generate
from tiny import tiny_node

from pd.core.messages import (
    HEARTBEAT_INTERVAL,
    Abort,
    NodeHeartbeat,
    ProxyHeartbeat,
    StepOutputs,
    encode_message,
)
from pd.net.cluster_key import derive_client_keypair, derive_server_keypair
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.launch import NodeServer

KEY = b"0123456789abcdef0123456789abcdef"
OTHER_KEY = b"fedcba9876543210fedcba9876543210"
TOKENS = 20
# What a stranger is given to be heard in; a holder of the key is heard within milliseconds.
PATIENCE_MS = 500


@pytest.fixture(scope="module")
def node() -> Iterator[NodeServer]:
    server = tiny_node("unified", cluster_key=KEY)
    yield server
    server.stop()


class Victim:
    """A proxy with a stream that stands still until :meth:`ends_unharmed`."""

    def __init__(self, node: NodeServer) -> None:
        self.node = node
        self.peer = proxy_of(node)
        # The connection stands before anybody else claims its identity.
        self.peer.beat()
        self.peer.receive(NodeHeartbeat)
        self._gate = Gate(node)
        self.request = make_generate(
            range(10),
            to=node.instance_id,
            sender=self.peer.name,
            room=secrets.token_bytes(16),
            params={"max_tokens": TOKENS, "ignore_eos": True},
        )
        self.peer.send(self.request)
        assert self._gate.entered.wait(5)

    def ends_unharmed(self) -> None:
        """All tokens come, to the socket that asked."""
        self._gate.open()
        positions: list[int] = []
        while len(positions) < TOKENS:
            for output in self.peer.receive(StepOutputs).outputs:
                positions += range(output.position, output.position + len(output.token_ids))
        assert positions == list(range(TOKENS))

    def close(self) -> None:
        self._gate.open()
        self.peer.close()


@pytest.fixture
def victim(node: NodeServer) -> Iterator[Victim]:
    found = Victim(node)
    yield found
    found.close()


def dealer(context: zmq.Context[zmq.Socket[bytes]], victim: Victim, knows: str) -> Any:
    """A stranger's socket that claims the identity of the victim's proxy."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, victim.peer.name.encode())
    socket.setsockopt(zmq.LINGER, 0)
    if knows == "plain":
        socket.plain_username, socket.plain_password = b"proxy", b"proxy"
    elif knows == "another cluster's key":
        socket.curve_publickey, socket.curve_secretkey = derive_client_keypair(OTHER_KEY)
        socket.curve_serverkey, _ = derive_server_keypair(OTHER_KEY, victim.node.instance_id)
    elif knows == "the node's public key":
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey, _ = derive_server_keypair(KEY, victim.node.instance_id)
    socket.connect(victim.node.node.endpoint)
    return socket


@pytest.mark.parametrize(
    "knows", ["nothing", "plain", "another cluster's key", "the node's public key"]
)
def test_a_stranger_cannot_take_a_proxys_identity(victim: Victim, knows: str) -> None:
    name, instance = victim.peer.name, victim.node.instance_id
    with zmq.Context() as context, dealer(context, victim, knows) as stranger:
        stranger.send(encode_message(ProxyHeartbeat(to="", sender=name)))
        stranger.send(encode_message(Abort(to=instance, sender=name, room=victim.request.room)))
        assert not stranger.poll(PATIENCE_MS)
        victim.ends_unharmed()
        assert not stranger.poll(0), "it hears what is meant for the proxy"


def test_a_connection_led_to_another_node_takes_nobodys_place(victim: Victim) -> None:
    """As by a worker of the proxy that names another node's endpoint as its own, or by whoever
    sits between two hosts: the proxy itself then opens the second connection, with the key."""
    endpoint, name = victim.node.node.endpoint, victim.peer.name
    with RawPeer(endpoint, name, KEY, node="the-instance-it-believes-in") as diverted:
        diverted.beat()
        assert not diverted.answers(NodeHeartbeat, PATIENCE_MS / 1000)
        victim.ends_unharmed()
        assert not diverted.seen


def test_a_worker_that_names_another_nodes_endpoint_harms_nobody() -> None:
    honest = FakeNode("unified", cluster_key=KEY)
    liar = FakeNode("unified", cluster_key=KEY, endpoints={"zmq": honest.endpoint, "bootstrap": ""})
    try:
        urls = [honest.url, liar.url]
        with ProxyThread(ProxyConfig(unified=urls, port=0, cluster_key=KEY)) as proxy:
            # Until one of the two has proved itself they may take each other's place.
            wait_until(lambda: httpx.get(f"{proxy.url}/readiness").status_code == 200, 20.0)
            begin = time.monotonic()
            while time.monotonic() < begin + 2 * HEARTBEAT_INTERVAL + PATIENCE_MS / 1000:
                response = httpx.post(f"{proxy.url}/generate", json={"input_ids": [5, 6]})
                assert response.status_code == 200, response.text
            workers = httpx.get(f"{proxy.url}/workers").json()["workers"]
            assert {w["url"]: w["ready"] for w in workers} == {honest.url: True, liar.url: False}
    finally:
        honest.kill()
        liar.kill()


@pytest.mark.parametrize("key", [KEY, None], ids=["holder of the key", "local user, no key"])
def test_who_is_trusted_may_use_any_identity(key: bytes | None) -> None:
    """What docs/security.md says: a holder of the key, or without one any local user."""
    server = tiny_node("unified", cluster_key=key)
    try:
        with proxy_of(server, "the-proxy") as first:
            first.beat()
            first.receive(NodeHeartbeat)
            with proxy_of(server, "the-proxy") as second:
                second.beat()
                second.receive(NodeHeartbeat)
    finally:
        server.stop()
