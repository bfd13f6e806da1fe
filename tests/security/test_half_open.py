"""Strangers who connect to a node's message ports and say nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

import pytest
import zmq
from cluster import wait_until
from raw_peer import RawPeer, proxy_of
from relay import Relay
from tiny import tiny_node

from pd.core.messages import NodeHeartbeat, ProxyHeartbeat
from pd.net import half_open
from pd.net.half_open import HalfOpenLimit

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = b"0123456789abcdef0123456789abcdef"


@contextlib.contextmanager
def strangers(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that send nothing."""
    with contextlib.ExitStack() as stack:
        connect = socket.create_connection
        yield [stack.enter_context(connect(("127.0.0.1", port))) for _ in range(count)]


def was_ended(connection: socket.socket) -> bool:
    """Whether the other side ended it. Until then there is its greeting to read, and no more."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 10):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("key", [None, KEY])
def test_the_oldest_unproven_connections_are_ended_but_no_proven_ones(
    monkeypatch: pytest.MonkeyPatch, key: bytes | None
) -> None:
    monkeypatch.setattr(half_open, "MAX_HALF_OPEN", 20)
    server = tiny_node("unified", cluster_key=key)
    try:
        port = server.node.control.port
        with proxy_of(server) as known:
            known.send(ProxyHeartbeat(to="", sender=known.name))
            known.receive(NodeHeartbeat)
            before = len(os.listdir("/proc/self/fd"))
            with strangers(port, 100) as connections:
                wait_until(lambda: all(was_ended(each) for each in connections[:80]), 20)
                assert not any(was_ended(each) for each in connections[80:])
                # Both ends are in this process.
                wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 100 + 20, 20)
                known.send(ProxyHeartbeat(to="", sender=known.name))
                known.receive(NodeHeartbeat)
                with proxy_of(server) as late:
                    late.send(ProxyHeartbeat(to="", sender=late.name))
                    late.receive(NodeHeartbeat)
    finally:
        server.stop()


def disconnections(peer: RawPeer) -> zmq.Socket[bytes]:
    """Becomes readable when the peer's connection ends; from now on."""
    monitor: zmq.Socket[bytes] = peer._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    return monitor


@pytest.mark.parametrize("key", [None, KEY])
def test_proven_connections_are_never_ended(
    monkeypatch: pytest.MonkeyPatch, key: bytes | None
) -> None:
    """However many there are, and whoever connects after them."""
    monkeypatch.setattr(half_open, "MAX_HALF_OPEN", 3)
    server = tiny_node("unified", cluster_key=key)
    try:
        with contextlib.ExitStack() as stack:
            peers, ends = [], []
            for _ in range(6):
                peers.append(stack.enter_context(proxy_of(server)))
                ends.append(disconnections(peers[-1]))
                peers[-1].beat()
                peers[-1].receive(NodeHeartbeat)
            with strangers(server.node.control.port, 12) as connections:
                wait_until(lambda: all(was_ended(each) for each in connections[:9]), 20)
                for peer in peers:
                    peer.beat()
                    peer.receive(NodeHeartbeat)
            assert not any(end.poll(0) for end in ends)
    finally:
        server.stop()


def test_a_connection_older_than_a_handshake_counts_as_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a subscriber, which never says anything."""
    monkeypatch.setattr(half_open, "MAX_HALF_OPEN", 3)
    monkeypatch.setattr(half_open, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(half_open, "_SLACK_MS", 0)
    context = zmq.Context()
    try:
        listener = context.socket(zmq.PUB)
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        limit = HalfOpenLimit(listener)
        subscriber = context.socket(zmq.SUB)
        end = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        assert limit.monitor.poll(5000)
        limit.process_events()
        assert limit.has_unproven
        time.sleep(0.3)
        with strangers(port, 8) as connections:

            def enough_were_ended() -> bool:
                limit.process_events()
                return all(was_ended(each) for each in connections[:5])

            wait_until(enough_were_ended, 20)
        assert not end.poll(0)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_slow_handshake_is_ended_and_its_peer_reconnects(
    monkeypatch: pytest.MonkeyPatch, key: bytes | None
) -> None:
    """Nothing that the peer had to say is lost."""
    monkeypatch.setattr(half_open, "HANDSHAKE_MS", 500)
    server = tiny_node("unified", cluster_key=key)
    relay = Relay(server.node.control.port)
    try:
        relay.stall()
        endpoint = f"tcp://127.0.0.1:{relay.address()['port']}"
        with RawPeer(endpoint, "slow", key, node=server.instance_id) as peer:
            peer.beat()
            wait_until(lambda: relay.connections == 1, 5)
            with strangers(server.node.control.port, 1) as (silent,):
                wait_until(lambda: was_ended(silent), 5)
            relay.resume()
            peer.receive(NodeHeartbeat)
            assert relay.connections == 2
    finally:
        relay.close()
        server.stop()


def test_a_reused_descriptor_is_not_ended() -> None:
    context = zmq.Context()
    try:
        listener = context.socket(zmq.ROUTER)
        listener.bind("tcp://127.0.0.1:*")
        limit = HalfOpenLimit(listener)
        one, other = socket.socketpair()
        with one, other:
            limit._end_connection(one.fileno())
            limit._end_connection(10_000)
            one.sendall(b"here")
            assert other.recv(9) == b"here"
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as connection,
            server.accept()[0] as accepted,
        ):
            limit._end_connection(accepted.fileno())
            accepted.sendall(b"here")
            assert connection.recv(9) == b"here"
    finally:
        context.destroy(linger=0)
