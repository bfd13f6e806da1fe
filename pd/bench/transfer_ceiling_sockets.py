"""Ceiling of ``tcp`` and ``fake``: as many plain sockets, which only send and receive."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from pd.bench.transfer_control import accept_socket, connect_socket, listen
from pd.core.errors import SetupError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pd.bench.transfer_control import Control
    from pd.bench.transfer_spec import TransferSpec
    from pd.engine.kv_pool import KVPool

T = TypeVar("T")

# Sockets are fastest while a call's bytes stay in the cache.
SOCKET_CALL = 512 << 10
# Beside a pool in GPU memory sockets use a host buffer, as small as what backends stage through.
HOST_BUFFER = 16 << 20


def host_memory(spec: TransferSpec, pool: KVPool) -> memoryview:
    """The pool's own bytes if they can be had, else a small buffer that is used over and over."""
    if pool.memory.is_cuda:
        return memoryview(bytearray(HOST_BUFFER))
    view: memoryview = pool.memory.numpy().data[: spec.num_bytes]
    return view


def share_out(
    spec: TransferSpec, memory: memoryview, connections: int
) -> list[tuple[memoryview, int]]:
    """Return the memory of each connection, and the number of bytes that it moves."""
    cuts = [spec.num_bytes * n // connections for n in range(connections + 1)]
    sizes = [stop - start for start, stop in pairwise(cuts)]
    if len(memory) < spec.num_bytes:
        part = len(memory) // connections
        return [(memory[n * part : (n + 1) * part], size) for n, size in enumerate(sizes)]
    return [(memory[cuts[n] : cuts[n + 1]], size) for n, size in enumerate(sizes)]


def in_threads(work: Callable[[T], None], items: list[T]) -> None:
    """One thread each; raises what the first of them raised."""
    errors: list[OSError] = []

    def run(item: T) -> None:
        try:
            work(item)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise SetupError(f"a plain socket broke: {errors[0]}")


class PlainSockets:
    """P's half: as many connections as the backend has, with nothing but send and receive."""

    def __init__(
        self,
        spec: TransferSpec,
        pool: KVPool,
        control: Control,
        key: bytes | None,
        connections: int,
        described: dict[str, Any],
    ) -> None:
        self.name = "plain socket" if connections == 1 else f"{connections} plain sockets"
        self._spec, self._control, self._key = spec, control, key
        self._address = (described["host"], described["port"])
        self._parts = share_out(spec, host_memory(spec, pool), connections)

    def measure(self) -> float:
        self._control.send({"op": "step"})
        socks = [connect_socket(*self._address, self._key) for _ in self._parts]
        begun = time.perf_counter()
        in_threads(send_all, list(zip(socks, self._parts, strict=True)))
        self._control.answer()
        seconds = time.perf_counter() - begun
        for sock in socks:
            sock.close()
        return self._spec.num_bytes / seconds / 1e9

    def close(self) -> None:
        """Connections live as long as one measurement."""


def send_all(item: tuple[socket.socket, tuple[memoryview, int]]) -> None:
    sock, (memory, size) = item
    done = 0
    while done < size:
        place = done % len(memory)
        done += sock.send(memory[place : place + min(SOCKET_CALL, size - done)])


class SocketsCeilingTarget:
    """Reads what comes into host memory."""

    def __init__(
        self, spec: TransferSpec, pool: KVPool, host: str, key: bytes | None, connections: int
    ) -> None:
        self._key, self._host = key, host
        self._listener = listen(host, 0, key)
        self._parts = share_out(spec, host_memory(spec, pool), connections)

    def describe(self) -> dict[str, Any]:
        return {"host": self._host, "port": self._listener.getsockname()[1]}

    def step(self) -> None:
        socks = [accept_socket(self._listener, self._key) for _ in self._parts]
        in_threads(receive_all, list(zip(socks, self._parts, strict=True)))
        for sock in socks:
            sock.close()

    def close(self) -> None:
        self._listener.close()


def receive_all(item: tuple[socket.socket, tuple[memoryview, int]]) -> None:
    sock, (memory, size) = item
    done = 0
    while done < size:
        place = done % len(memory)
        arrived = sock.recv_into(memory[place : place + min(SOCKET_CALL, size - done)])
        if not arrived:
            raise ConnectionResetError("closed too early")
        done += arrived
