"""Several proxies over the same elastic nodes: one of them moves roles, and all follow."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster import wait_until
from processes import Process
from tiny import tiny_node

from pd.core.messages import LEASE_SECONDS, PreferRole
from pd.proxy.config import ProxyConfig
from pd.proxy.server import ProxyThread
from pd.proxy.workers.parent import ProxyProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.core.node_info import Role
    from pd.launch import NodeServer

ROLES: tuple[Role, ...] = ("prefill", "decode", "decode")


@pytest.fixture
def nodes() -> Iterator[list[NodeServer]]:
    with ExitStack() as stack:
        made = []
        for role in ROLES:
            made.append(tiny_node(role, elastic="auto"))
            stack.callback(made[-1].stop)
        yield made


def leases(nodes: list[NodeServer]) -> list[dict[str, Any]]:
    found: list[Any] = [node.node.server_info()["preferred_role"] for node in nodes]
    return found


def deciders(nodes: list[NodeServer]) -> set[str]:
    return {lease["decider"] for lease in leases(nodes)}


def has_one(nodes: list[NodeServer]) -> bool:
    """Whether one proxy has the lease of every node."""
    found = deciders(nodes)
    return len(found) == 1 and "" not in found


def has_another(nodes: list[NodeServer], first: str) -> bool:
    """Whether one proxy has the lease of every node, and not ``first``. The nodes are asked once:
    leases may end between two looks."""
    found = deciders(nodes)
    return len(found) == 1 and found.isdisjoint({"", first})


def flags(nodes: list[NodeServer]) -> dict[str, list[str]]:
    return {"prefill": [nodes[0].url], "decode": [node.url for node in nodes[1:]]}


def workers(url: str) -> list[dict[str, Any]]:
    found: list[Any] = httpx.get(f"{url}/workers").json()["workers"]
    return found


def roles(url: str) -> list[str]:
    return [worker["role"] for worker in workers(url)]


def all_ready(url: str) -> bool:
    """Whether a proxy has heard from every node; leases come to the nodes a moment earlier."""
    return all(worker["ready"] for worker in workers(url))


def knows(url: str, instance: str) -> bool:
    """Whether a proxy may send requests to this instance of a node."""
    return any(worker["instance_id"] == instance and worker["ready"] for worker in workers(url))


def test_every_proxy_follows_the_one_that_decides_and_administrators(
    nodes: list[NodeServer],
) -> None:
    with ExitStack() as stack:
        proxies = [
            stack.enter_context(ProxyThread(ProxyConfig(port=0, **flags(nodes)))) for _ in range(2)
        ]
        wait_until(lambda: has_one(nodes), 20, lambda: leases(nodes))
        (decider,) = deciders(nodes)
        pools = {p.proxy._pool._sockets.instance_id: p.proxy._pool for p in proxies}
        pool = pools[decider]
        assert [p._lease.is_decider() for p in pools.values()].count(True) == 1

        async def move(role: Role) -> None:
            pool._order_role(pool.nodes[2], role)

        by_decider = next(p for p in proxies if p.proxy._pool is pool)
        by_decider.run(move("prefill"))
        expected = ["prefill", "decode", "prefill"]
        wait_until(lambda: all(roles(p.url) == expected for p in proxies), 20)

        other = next(p for p in proxies if p.proxy._pool is not pool)
        changed = httpx.post(
            f"{other.url}/workers/{nodes[1].instance_id}", json={"role": "unified"}
        )
        assert changed.json()["role"] == "unified"
        expected[1] = "unified"
        wait_until(lambda: all(roles(p.url) == expected for p in proxies), 20)
        assert leases(nodes)[1]["fixed"]

        # The node does not follow a proxy without the lease, and the proxy learns the role from it.
        async def move_without() -> None:
            worker = other.proxy._pool.nodes[2]
            assert worker.roles is not None
            term = worker.roles.term
            sender = other.proxy._pool._sockets.instance_id
            worker.send_message(
                PreferRole(to=worker.instance_id, sender=sender, role="decode", term=term)
            )

        other.run(move_without())
        by_decider.run(move("unified"))  # comes after it
        expected[2] = "unified"
        wait_until(lambda: all(roles(p.url) == expected for p in proxies), 20)

        # One proxy fixed the role, the other one gives it back.
        url = f"{by_decider.url}/workers/{nodes[1].instance_id}"
        assert httpx.post(url, json={"role": "auto"}).json()["role"] == "unified"
        served = [p.proxy._pool.nodes[1] for p in proxies]
        wait_until(lambda: not any(worker.role_is_fixed for worker in served), 20)
        assert not leases(nodes)[1]["fixed"]

        async def move_again() -> None:
            pool._order_role(pool.nodes[1], "decode")

        by_decider.run(move_again())
        expected[1] = "decode"
        wait_until(lambda: all(roles(p.url) == expected for p in proxies), 20)


def test_a_node_that_is_started_again_gets_the_role_that_an_administrator_set(
    nodes: list[NodeServer],
) -> None:
    with ProxyThread(ProxyConfig(port=0, **flags(nodes))) as proxy:
        wait_until(lambda: has_one(nodes), 20, lambda: leases(nodes))
        wait_until(lambda: all_ready(proxy.url), 20)
        url = f"{proxy.url}/workers/{nodes[2].instance_id}"
        response = httpx.post(url, json={"role": "prefill"})
        assert response.status_code == 200, response.text
        wait_until(lambda: leases(nodes)[2]["role"] == "prefill", 20)
        port = int(nodes[2].url.rpartition(":")[2])
        nodes[2].stop()
        nodes[2] = tiny_node("decode", elastic="auto", port=port)
        try:
            wait_until(lambda: leases(nodes)[2]["role"] == "prefill", 30, lambda: leases(nodes))
            assert leases(nodes)[2]["fixed"] and roles(proxy.url)[2] == "prefill"
        finally:
            nodes[2].stop()


@pytest.mark.parametrize("elastic", ["auto", "off"])
def test_a_node_that_was_moved_and_is_started_again_has_its_own_role_at_every_proxy(
    nodes: list[NodeServer], elastic: str
) -> None:
    with ExitStack() as stack:

        def start() -> ProxyThread:
            return stack.enter_context(ProxyThread(ProxyConfig(port=0, **flags(nodes))))

        old = start()
        wait_until(lambda: has_one(nodes), 20, lambda: leases(nodes))
        wait_until(lambda: all_ready(old.url), 20)

        async def move() -> None:
            pool = old.proxy._pool
            pool._order_role(pool.nodes[2], "prefill")

        old.run(move())
        wait_until(lambda: roles(old.url)[2] == "prefill", 20)
        port = int(nodes[2].url.rpartition(":")[2])
        nodes[2].stop()
        nodes[2] = tiny_node("decode", elastic=elastic, port=port)
        stack.callback(nodes[2].stop)
        instance = nodes[2].instance_id
        wait_until(lambda: knows(old.url, instance), 30, lambda: workers(old.url))
        new = start()
        wait_until(lambda: all_ready(new.url), 20)
        assert roles(old.url) == roles(new.url) == list(ROLES)


@pytest.mark.full
def test_another_proxy_decides_when_one_is_killed_or_stands_still(
    nodes: list[NodeServer], tmp_path: Path
) -> None:
    """The one that stood still finds the leases taken, and leaves them there."""
    urls = flags(nodes)
    command = ["proxy", "--port", "0"]
    command += [flag for role, found in urls.items() for u in found for flag in (f"--{role}", u)]
    with ExitStack() as stack:
        proxies = []
        for number in range(3):
            proxies.append(Process(*command, log=tmp_path / f"proxy{number}.log"))
            stack.callback(proxies[-1].stop)
        names = {proxy.ready()["instance_id"]: proxy for proxy in proxies}
        wait_until(lambda: has_one(nodes), 30, lambda: leases(nodes))
        (first,) = deciders(nodes)
        names[first].kill()
        wait_until(lambda: has_another(nodes, first), 30, lambda: leases(nodes))
        (second,) = deciders(nodes)
        wait_until(lambda: "decides on" in names[second].log.read_text(), 30)
        terms = [lease["term"] for lease in leases(nodes)]
        names[second].child.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: has_another(nodes, second), 30, lambda: leases(nodes))
        finally:
            names[second].child.send_signal(signal.SIGCONT)
        (third,) = deciders(nodes)
        assert all(lease["term"] > term for lease, term in zip(leases(nodes), terms, strict=True))
        # It is there again, reads and is heard, for longer than a lease.
        for _ in range(int(2 * LEASE_SECONDS) + 1):
            assert len(roles(names[second].url)) == 3
            assert deciders(nodes) == {third}
            time.sleep(0.5)
        assert "no longer decides" in names[second].log.read_text()


@pytest.mark.full
def test_one_process_of_a_proxy_decides_and_another_when_it_is_killed(
    nodes: list[NodeServer],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each process of a proxy is one of several proxies to the nodes."""
    caplog.set_level(logging.INFO)  # of the processes, too, which say when they decide
    config = ProxyConfig(port=0, workers=2, **flags(nodes))
    make: Any = ProxyProcesses
    said = ""

    def news() -> list[tuple[str, str]]:
        """What processes said, in its order: their numbers, and whether they decide."""
        nonlocal said
        said += capfd.readouterr().err
        return re.findall(r"\[(\d)\] \S*role_lease: this proxy (decides|no longer decides)", said)

    def deciding(since: int = 0) -> set[str]:
        """Numbers of the processes that decide, as they said themselves."""
        last = dict(news()[since:])
        return {number for number, state in last.items() if state == "decides"}

    def look(decider: str, number: int, since: int = 0) -> None:
        """Look on for longer than a lease while one decides. The nodes hear the other one, too."""
        wait_until(lambda: deciding(since) == {str(number)}, 30, lambda: said)
        for _ in range(int(2 * LEASE_SECONDS) + 1):
            assert deciders(nodes) == {decider}
            assert deciding(since) == {str(number)}
            time.sleep(0.5)

    with ProxyThread(config, make) as thread:
        parent: Any = thread.proxy
        wait_until(lambda: has_one(nodes), 30, lambda: leases(nodes))
        (first,) = deciders(nodes)
        victim = next(child for child in parent.children if child.instance_id == first)
        look(first, victim.number)
        terms, before = [lease["term"] for lease in leases(nodes)], len(news())
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: has_another(nodes, first), 30, lambda: leases(nodes))
        assert all(lease["term"] > term for lease, term in zip(leases(nodes), terms, strict=True))

        def replaced() -> bool:
            child = parent.children[victim.number]
            return child is not None and child is not victim and child.serves

        wait_until(replaced, 30)
        # Whichever has the leases first keeps them: the one that lived, or the successor.
        (second,) = deciders(nodes)
        decider = next(child for child in parent.children if child.instance_id == second)
        look(second, decider.number, before)
