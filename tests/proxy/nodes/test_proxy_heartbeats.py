"""Nodes hear a proxy whose event loop is busy, and no longer one whose event loop hangs."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from fake_node import wait_until

from pd.core.messages import heartbeat_identity
from pd.proxy.nodes.channel import Sockets
from pd.proxy.nodes.heartbeats import HUNG_SECONDS, LoopWatch
from pd.proxy.nodes.node_handle import NodeHandle

if TYPE_CHECKING:
    from proxy_cluster import Cluster


class Times:
    """A clock, and how long the loop's thread got no CPU."""

    def __init__(self) -> None:
        self.now = 100.0
        self.delay = 7.0

    def watch(self) -> LoopWatch:
        return LoopWatch(lambda: self.now, lambda thread: self.delay)


def test_a_loop_that_does_not_turn_hangs() -> None:
    times = Times()
    watch = times.watch()
    watch.note_turn()
    times.now += HUNG_SECONDS - 0.1
    assert not watch.is_hung()
    times.now += 0.2
    assert watch.is_hung()
    watch.note_turn()
    assert not watch.is_hung()


def test_a_loop_that_gets_no_cpu_does_not_hang() -> None:
    times = Times()
    watch = times.watch()
    watch.note_turn()
    times.now += 3 * HUNG_SECONDS
    times.delay += 2.5 * HUNG_SECONDS
    assert not watch.is_hung()
    times.now += HUNG_SECONDS
    assert watch.is_hung()


@pytest.mark.one_process("blocks the event loop of the proxy")
def test_heartbeats_go_on_while_the_loop_is_busy_and_end_when_it_hangs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.nodes.heartbeats.HEARTBEAT_INTERVAL", 0.05)
    nodes = cluster.pair()
    proxy = cluster.proxy()
    assert proxy.proxy is not None
    name = heartbeat_identity(proxy.proxy.instance_id)

    def heard() -> int:
        return min(node.heartbeats.get(name, 0) for node in nodes)

    async def block(seconds: float) -> None:
        time.sleep(seconds)

    wait_until(lambda: heard() > 0)
    before = heard()
    proxy.run(block(1.0))
    assert heard() >= before + 3

    monkeypatch.setattr("pd.proxy.nodes.heartbeats.HUNG_SECONDS", 1.0)
    blocked = asyncio.run_coroutine_threadsafe(block(3.0), proxy._loop)
    time.sleep(2.0)
    before = heard()
    time.sleep(0.5)
    assert heard() == before
    blocked.result()
    wait_until(lambda: heard() > before)


@pytest.mark.one_process("replaces a function of the proxy")
def test_a_lease_that_cannot_be_kept_for_want_of_a_socket_costs_no_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.node("unified"), cluster.node("unified")
    proxy = cluster.proxy()
    assert proxy.proxy is not None
    name = heartbeat_identity(proxy.proxy.instance_id)
    wait_until(lambda: name in first.heartbeats and name in second.heartbeats)
    connect, lacking = Sockets.connect_socket, [True]

    def connect_if_possible(sockets: Sockets, context: Any, identity: str, *rest: str) -> Any:
        if identity == name and lacking:
            raise zmq.ZMQError(errno.EMFILE)
        return connect(sockets, context, identity, *rest)

    monkeypatch.setattr(Sockets, "connect_socket", connect_if_possible)
    third = cluster.node("unified")
    body = {"role": "unified", "url": third.url}
    assert cluster.client(proxy).post("/workers", json=body).status_code == 200
    wait_until(lambda: proxy.proxy._pool._heartbeats._endpoints.keys() >= {third.instance_id})
    count = first.heartbeats[name]
    wait_until(lambda: first.heartbeats[name] > count + 2)
    assert name not in third.heartbeats
    lacking.clear()
    wait_until(lambda: name in third.heartbeats)


@pytest.mark.one_process("reads the heartbeats of one instance id")
def test_a_node_that_was_removed_is_no_longer_told(cluster: Cluster) -> None:
    first, second = cluster.node("unified"), cluster.node("unified")
    proxy = cluster.proxy()
    assert proxy.proxy is not None
    name = heartbeat_identity(proxy.proxy.instance_id)
    wait_until(lambda: name in first.heartbeats and name in second.heartbeats)
    client = cluster.client(proxy)
    assert client.delete(f"/workers/{first.instance_id}").status_code == 200
    count = second.heartbeats[name]
    wait_until(lambda: second.heartbeats[name] > count)
    told = first.heartbeats[name]
    wait_until(lambda: second.heartbeats[name] > count + 2)
    assert first.heartbeats[name] == told


@pytest.mark.one_process("replaces a function of the proxy")
def test_a_fault_with_one_node_does_not_end_the_heartbeats_of_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = cluster.node("unified"), cluster.node("unified")
    beat = NodeHandle.send_heartbeat

    def fail_for_one(node: NodeHandle, *arguments: Any) -> bool:
        if node.url == first.url:
            raise RuntimeError("a fault of ours")
        return beat(node, *arguments)

    monkeypatch.setattr(NodeHandle, "send_heartbeat", fail_for_one)
    proxy = cluster.proxy()
    assert proxy.proxy is not None
    name = proxy.proxy.instance_id
    wait_until(lambda: second.heartbeats.get(name, 0) > 3)
    assert f"cannot check {first.url}" in caplog.text


def test_nodes_are_told_of_the_delays_of_all_nodes(cluster: Cluster) -> None:
    """Before they have met, a prefill and a decode node know of each other by the proxy only."""
    prefill, decode = cluster.node("prefill"), cluster.node("decode")
    cluster.proxy()
    prefill.run_delay, decode.run_delay = 1.5, 2.5
    known = {prefill.instance_id: 1.5, decode.instance_id: 2.5}
    wait_until(lambda: known.items() <= prefill.run_delays.items())
    wait_until(lambda: known.items() <= decode.run_delays.items())
