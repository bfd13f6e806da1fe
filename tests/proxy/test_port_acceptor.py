"""Connections between the parent of a proxy's processes and children that are slow to take them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pd.proxy.ledger import Ledger
from pd.proxy.processes.acceptor import PortAcceptor
from pd.proxy.processes.connections import HandedConnections, HandingSocket
from pd.proxy.server import bind

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLIENTS = 300


class Child:
    """A child with room for few connections that it has not taken."""

    def __init__(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        theirs.setblocking(False)
        self.handing, self._handed = HandingSocket(ours), HandedConnections(theirs)
        self.process: Any = SimpleNamespace(number=number, connections=self.handing)

    def take(self) -> list[socket.socket]:
        """All connections that it was given and has not taken."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._handed.accept()[0])
        return found

    def close(self) -> None:
        self.handing.close()
        self._handed.close()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    found = [Child(0), Child(1)]
    yield found
    for child in found:
        child.close()


def test_connections_that_no_child_takes_wait_and_none_is_closed(children: list[Child]) -> None:
    """Many clients come while both children stand still for a moment."""
    ledger = Ledger(memoryview(bytearray(Ledger.size(2))))

    async def run() -> None:
        listener = bind("127.0.0.1", 0)
        acceptor = PortAcceptor(listener, lambda: [c.process for c in children], ledger)
        acceptor.update()
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


def test_a_connection_that_waits_is_closed_with_the_port(children: list[Child]) -> None:
    async def run() -> None:
        listener = bind("127.0.0.1", 0)
        ledger = Ledger(memoryview(bytearray(Ledger.size(2))))
        acceptor = PortAcceptor(listener, lambda: [c.process for c in children], ledger)
        acceptor.update()
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
