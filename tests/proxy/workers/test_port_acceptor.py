"""Connections between the parent of a proxy's processes and children that are slow to take them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pd.proxy.server import bind_listener
from pd.proxy.workers.acceptor import PortAcceptor
from pd.proxy.workers.connections import HandedConnections, HandingSocket, get_kept_limit
from pd.proxy.workers.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLIENTS = 300


class Child:
    """A child with room for few connections that it has not taken."""

    def __init__(self, number: int, memory: memoryview) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        theirs.setblocking(False)
        self.handing = HandingSocket(ours)
        self._handed = HandedConnections(theirs, Ledger(memory, number))
        self.process: Any = SimpleNamespace(number=number, connections=self.handing)

    def take(self, limit: int = _CLIENTS) -> list[socket.socket]:
        """The connections that it was given and has not taken, so many at most."""
        found: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            while len(found) < limit:
                found.append(self._handed.accept()[0])
        return found

    def close(self) -> None:
        self.handing.close()
        self._handed.close()


@pytest.fixture
def memory() -> memoryview:
    """It holds the ledger of two children."""
    return memoryview(bytearray(Ledger.get_size(2)))


@pytest.fixture
def children(memory: memoryview) -> Iterator[list[Child]]:
    found = [Child(0, memory), Child(1, memory)]
    yield found
    for child in found:
        child.close()


def test_connections_that_no_child_takes_wait_and_none_is_closed(
    children: list[Child], memory: memoryview
) -> None:
    """Many clients come while both children stand still for a moment."""
    ledger = Ledger(memory)

    async def run() -> None:
        listener = bind_listener("127.0.0.1", 0)
        acceptor = PortAcceptor(listener, lambda: [c.process for c in children], ledger)
        acceptor.update_accepting()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(_CLIENTS)]
        await asyncio.sleep(0.3)
        for client in clients:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
        taken = [each for child in children for each in child.take()]
        assert 0 < len(taken) < _CLIENTS, "they had no room for all"
        while len(taken) < _CLIENTS:
            await asyncio.sleep(0.02)
            taken += [each for child in children for each in child.take()]
        acceptor.close()
        for each in (*clients, *taken):
            each.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_connection_that_waits_is_closed_with_the_port(
    children: list[Child], memory: memoryview
) -> None:
    async def run() -> None:
        listener = bind_listener("127.0.0.1", 0)
        ledger = Ledger(memory)
        acceptor = PortAcceptor(listener, lambda: [c.process for c in children], ledger)
        acceptor.update_accepting()
        for child in children:
            child.close()
        with socket.create_connection(listener.getsockname()) as client:
            await asyncio.sleep(0.05)
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
            acceptor.close()
            client.setblocking(True)
            assert client.recv(1) == b""

    asyncio.run(asyncio.wait_for(run(), 60))


def sockets_at(port: int) -> int:
    """How many sockets of this process have the port. Other tests of the process may leave threads
    that open files at any moment."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            each = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            found += each.getsockname()[1:2] == (port,)
        finally:
            each.detach()
    return found


def test_connections_go_on_to_other_children_when_one_dies_before_it_took_them(
    children: list[Child], memory: memoryview
) -> None:
    """Children take connections, die and are replaced at random moments. Each connection is taken
    by one child, and no client notices anything."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ledger = Ledger(memory)

    async def run() -> None:
        listener = bind_listener("127.0.0.1", 0)
        port = listener.getsockname()[1]
        acceptor = PortAcceptor(listener, lambda: [c.process for c in children], ledger)
        acceptor.update_accepting()
        clients: dict[Any, socket.socket] = {}
        taken: list[socket.socket] = []
        while len(taken) < _CLIENTS:
            for _ in range(min(chance.randrange(20), _CLIENTS - len(clients))):
                client = socket.create_connection(listener.getsockname())
                client.setblocking(False)
                clients[client.getsockname()] = client
            await asyncio.sleep(chance.choice((0.0, 0.001, 0.01)))
            number = chance.randrange(2)
            taken += children[number].take(chance.randrange(10))
            if chance.random() < 0.2:
                ended = children[number]
                ended.close()
                acceptor.take_back(ended.process)
                ledger.clear_row(number)
                children[number] = Child(number, memory)
        assert {each.getpeername() for each in taken} == clients.keys()
        for client in clients.values():
            with pytest.raises(BlockingIOError):
                client.recv(1)
        # Once children have them the parent has no copies, so that clients see their end at once.
        for each in taken:
            each.close()
        for client in clients.values():
            client.setblocking(True)
            client.settimeout(30)
            assert await asyncio.to_thread(client.recv, 1) == b""
            client.close()
        assert not any(child.handing.keeps_copies for child in children)
        assert sockets_at(port) == 1
        acceptor.close()
        assert sockets_at(port) == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_connections_wait_for_a_child_that_comes_when_all_have_died(
    children: list[Child], memory: memoryview
) -> None:
    ledger = Ledger(memory)

    async def run() -> None:
        listener = bind_listener("127.0.0.1", 0)
        serving: list[Child] = children[:]
        acceptor = PortAcceptor(listener, lambda: [c.process for c in serving], ledger)
        acceptor.update_accepting()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(10)]
        while sum(child.handing.count for child in children) < len(clients):
            await asyncio.sleep(0.005)
        for number, ended in enumerate(children[:]):
            ended.close()
            serving.remove(ended)
            acceptor.take_back(ended.process)
            ledger.clear_row(number)
            acceptor.update_accepting()
        children[0] = Child(0, memory)
        serving.append(children[0])
        acceptor.update_accepting()
        taken: list[socket.socket] = []
        while len(taken) < len(clients):
            await asyncio.sleep(0.005)
            taken += children[0].take()
        addresses = {client.getsockname() for client in clients}
        assert {each.getpeername() for each in taken} == addresses
        acceptor.close()
        for each in (*clients, *taken):
            each.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_no_more_connections_are_kept_than_there_is_room_for(
    memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    for soft, limits in ((resource.RLIM_INFINITY, (256, 256)), (1024, (256, 2)), (64, (16, 1))):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert (get_kept_limit(2), get_kept_limit(256)) == limits
    ours, theirs = socket.socketpair()
    handing, handed = HandingSocket(ours, 3), HandedConnections(theirs, Ledger(memory, 1))
    pairs = [socket.socketpair() for _ in range(4)]
    assert [handing.hand_over(mine) for mine, _ in pairs] == [True, True, True, False]
    taken, _ = handed.accept()
    handing.release_taken(Ledger(memory).get_taken(1))
    assert handing.hand_over(pairs[3][0])
    kept = handing.take_back(Ledger(memory).get_taken(1))
    assert kept == [mine for mine, _ in pairs[1:]]
    handing.close()
    handed.close()
    for each in (taken, *(end for pair in pairs for end in pair)):
        each.close()
