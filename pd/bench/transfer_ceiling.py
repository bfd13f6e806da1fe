"""The ceiling of a path: the same bytes between the same kinds of memory, without a pool.

Each ceiling has two halves. P's half measures. D's half describes where to write and takes part in
each step.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from pd.bench.transfer_ceiling_libraries import (
    MooncakeMemory,
    MooncakeWrites,
    NixlMemory,
    NixlWrites,
)
from pd.bench.transfer_control import accept_socket, connect_socket, open_listener
from pd.core.errors import SetupError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pd.bench.transfer_control import Control
    from pd.bench.transfer_spec import TransferSpec
    from pd.core.node_info import NodeInfo
    from pd.engine.kv_pool import KVPool


T = TypeVar("T")

# Sockets are fastest while the bytes of a call stay in the processor's cache.
SOCKET_CALL = 512 << 10
# For a pool in GPU memory, sockets use a host buffer as small as the backends' staging buffers.
HOST_BUFFER = 16 << 20


class PathCeiling(Protocol):
    """P's half."""

    name: str

    def measure(self) -> float:
        """Move the bytes once; return GB/s."""

    def close(self) -> None:
        """Free everything, before D's half does."""


class CeilingTarget(Protocol):
    """D's half."""

    def describe(self) -> dict[str, Any]:
        """Return the facts for P's half."""

    def run_step(self) -> None:
        """Do D's part of one measurement; return when the bytes have arrived."""

    def close(self) -> None:
        """Free everything."""


def make_ceiling(
    spec: TransferSpec,
    pool: KVPool,
    control: Control,
    key: bytes | None,
    connections: int,
    peer: NodeInfo,
) -> PathCeiling:
    """Make P's half of a backend's ceiling; ask D, which is ``peer``, for the other half.

    Raises:
        SetupError: a library or a device is missing at either end.
    """
    if spec.backend == "nvlink":
        return PeerCopy(spec, pool, peer.transfers["nvlink"]["device"])
    described = control.call("ceiling", connections=connections)
    if spec.backend == "nixl":
        return NixlWrites(spec, pool, control, described)
    if spec.backend == "mooncake":
        return MooncakeWrites(spec, pool, control.host, described)
    return PlainSockets(spec, pool, control, key, connections, described)


def make_ceiling_target(
    spec: TransferSpec, pool: KVPool, control: Control, key: bytes | None, connections: int
) -> CeilingTarget:
    """Make D's half."""
    if spec.backend == "nixl":
        return NixlMemory(spec, pool, "ceiling-D", control.host)
    if spec.backend == "mooncake":
        return MooncakeMemory(spec, pool, control.host)
    return SocketsCeilingTarget(spec, pool, control.host, key, connections)


class PeerCopy:
    """Copies from one GPU's memory to the other's in this process.

    Args:
        uuid: id of D's GPU, because its number may differ here.
    """

    name = "peer copy"

    def __init__(self, spec: TransferSpec, pool: KVPool, uuid: str) -> None:
        uuids = [
            str(torch.cuda.get_device_properties(number).uuid)
            for number in range(torch.cuda.device_count())
        ]
        device = torch.device("cuda", uuids.index(uuid))
        self._source = pool.memory[: spec.num_bytes]
        self._target = torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)

    def measure(self) -> float:
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._source.device):
            begun.record()
            self._target.copy_(self._source, non_blocking=True)
            ended.record()
            ended.synchronize()
        milliseconds: float = begun.elapsed_time(ended)
        return self._source.numel() / milliseconds / 1e6

    def close(self) -> None:
        """Memory is freed with the process."""


# ---- ``tcp`` and ``fake``: as many plain sockets, which only send and receive


def host_memory(spec: TransferSpec, pool: KVPool) -> memoryview:
    """Return the pool's own bytes if the host can read them, else a small buffer to reuse."""
    if pool.memory.is_cuda:
        return memoryview(bytearray(HOST_BUFFER))
    view: memoryview = pool.memory.numpy().data[: spec.num_bytes]
    return view


def share_out(
    spec: TransferSpec, memory: memoryview, connections: int
) -> list[tuple[memoryview, int]]:
    """Return the memory of each connection, and the number of its bytes."""
    cuts = [spec.num_bytes * n // connections for n in range(connections + 1)]
    sizes = [stop - start for start, stop in pairwise(cuts)]
    if len(memory) < spec.num_bytes:
        part = len(memory) // connections
        return [(memory[n * part : (n + 1) * part], size) for n, size in enumerate(sizes)]
    return [(memory[cuts[n] : cuts[n + 1]], size) for n, size in enumerate(sizes)]


def run_in_threads(work: Callable[[T], None], items: list[T]) -> None:
    """Run one thread per item; raise the first error."""
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
    """P's half: as many connections as the backend has."""

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
        self._control.send_message({"op": "step"})
        socks = [connect_socket(*self._address, self._key) for _ in self._parts]
        begun = time.perf_counter()
        run_in_threads(send_all, list(zip(socks, self._parts, strict=True)))
        self._control.receive_answer()
        seconds = time.perf_counter() - begun
        for sock in socks:
            sock.close()
        return self._spec.num_bytes / seconds / 1e9

    def close(self) -> None:
        """Connections live for one measurement."""


def send_all(item: tuple[socket.socket, tuple[memoryview, int]]) -> None:
    sock, (memory, size) = item
    done = 0
    while done < size:
        place = done % len(memory)
        done += sock.send(memory[place : place + min(SOCKET_CALL, size - done)])


class SocketsCeilingTarget:
    """D's half: reads into host memory."""

    def __init__(
        self, spec: TransferSpec, pool: KVPool, host: str, key: bytes | None, connections: int
    ) -> None:
        self._key, self._host = key, host
        self._listener = open_listener(host, 0, key)
        self._parts = share_out(spec, host_memory(spec, pool), connections)

    def describe(self) -> dict[str, Any]:
        return {"host": self._host, "port": self._listener.getsockname()[1]}

    def run_step(self) -> None:
        socks = [accept_socket(self._listener, self._key) for _ in self._parts]
        run_in_threads(receive_all, list(zip(socks, self._parts, strict=True)))
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
