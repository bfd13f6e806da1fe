"""Mooncake's ports read and write registered memory for every connection, so they need a filter.

The tests speak the library's protocol over plain sockets. The prefill node of the link is at
127.0.0.1, and an intruder connects from 127.0.0.9.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from pd.core.errors import SetupError
from pd.transfer.staged.mooncake import library
from pd.transfer.staged.mooncake.library import ENGINES, MooncakeEngine, load_library
from pd.transfer.staged.mooncake.mover import MooncakeMover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.transfer.staged.mover import Target

try:
    load_library()
except SetupError as error:
    if os.environ.get("CI"):
        raise
    pytest.skip(error.message, allow_module_level=True)

HOST, INTRUDER = "127.0.0.1", "127.0.0.9"
# Operation codes of a request: whether it writes, and that an answer is wanted.
READ, WRITE = 0x80, 0x81
HANDSHAKE = 1
SIZE = 4096
SECRET = 0x2A


def connect(port: int, source: str) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=1.0, source_address=(source, 0))


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more, "the library closed the connection"
        data += more
    return data


def describe(engine: str, source: str) -> tuple[int, int]:
    """Data port and first registered address, which the port of descriptions tells to anybody."""
    body = json.dumps({"name": "x:1", "protocol": "tcp", "buffers": []}).encode()
    with connect(int(engine.rpartition(":")[2]), source) as sock:
        sock.sendall(struct.pack("<QB", 1 + len(body), HANDSHAKE) + body)
        (size,) = struct.unpack("<Q", receive(sock, 8))
        answer = json.loads(receive(sock, size)[1:])
    return answer["tcp_data_port"], answer["buffers"][0]["addr"]


def request(
    port: int, source: str, code: int, address: int, data: bytes = b""
) -> tuple[int, bytes]:
    """Read or write ``SIZE`` bytes; returns the library's status, 0 if it did, and what it read."""
    with connect(port, source) as sock:
        sock.sendall(struct.pack("<QQQ", SIZE, address, code) + data)
        (status,) = struct.unpack("<I4x", receive(sock, 8))
        return status, receive(sock, SIZE) if code == READ and not status else b""


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.full((1, SIZE), SECRET, dtype=torch.uint8)


@pytest.fixture
def target(memory: torch.Tensor) -> Iterator[Target]:
    made = MooncakeMover(HOST).make_target(memory, "P", HOST)
    yield made
    made.close()


@pytest.fixture
def unfiltered(memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeEngine]:
    """An engine as the library makes it."""
    with monkeypatch.context() as patch:
        patch.setattr(library, "_attach_filter", lambda sock, code: None)
        engine = MooncakeEngine(HOST)
        engine.register_memory(memory.data_ptr(), SIZE)
        yield engine
        engine.unregister_memory(memory.data_ptr())


def test_without_a_filter_anybody_reads_and_writes_the_staging_memory(
    unfiltered: MooncakeEngine, memory: torch.Tensor
) -> None:
    """The intruder knows nothing but the number of a port."""
    port, address = describe(unfiltered.name, INTRUDER)
    assert address == memory.data_ptr()
    assert request(port, INTRUDER, READ, address) == (0, bytes([SECRET]) * SIZE)
    assert request(port, INTRUDER, WRITE, address, b"x" * SIZE) == (0, b"")
    assert bytes(memory[0].tolist()) == b"x" * SIZE


def test_memory_that_is_not_registered_is_out_of_reach(
    unfiltered: MooncakeEngine, memory: torch.Tensor
) -> None:
    """So the pool is, whose pages are never registered."""
    pool = torch.full((SIZE,), SECRET, dtype=torch.uint8)
    port, _ = describe(unfiltered.name, INTRUDER)
    for address in (pool.data_ptr(), memory.data_ptr() + 1):
        assert request(port, INTRUDER, READ, address)[0] != 0
        assert request(port, INTRUDER, WRITE, address, b"x" * SIZE)[0] != 0
    assert bool((pool == SECRET).all()) and bool((memory == SECRET).all())


def test_the_filter_lets_only_the_address_of_the_proven_peer_in(
    target: Target, memory: torch.Tensor
) -> None:
    engine = msgspec.msgpack.decode(target.description)["engine"]
    with pytest.raises(TimeoutError):
        describe(engine, INTRUDER)
    port, address = describe(engine, HOST)
    for code, data in ((READ, b""), (WRITE, b"x" * SIZE)):
        with pytest.raises(TimeoutError):
            request(port, INTRUDER, code, address, data)
    assert bool((memory == SECRET).all())
    assert request(port, HOST, READ, address) == (0, bytes([SECRET]) * SIZE)


def test_the_prefill_node_s_staging_memory_is_read_by_nobody(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds prompts' KV as well, and no peer ever has to connect to it."""
    taken: list[MooncakeEngine] = []
    take = ENGINES.take_engine

    def watch(host: str, peer: str = "") -> MooncakeEngine:
        taken.append(take(host, peer))
        return taken[-1]

    monkeypatch.setattr(ENGINES, "take_engine", watch)
    own = torch.full((1, SIZE), SECRET, dtype=torch.uint8)
    path = MooncakeMover(HOST).make_path(own, target.description, "D", lambda: None)
    try:
        (engine,) = taken
        for source in (HOST, INTRUDER):
            with pytest.raises(TimeoutError):
                describe(engine.name, source)
    finally:
        path.close()
