"""What the path itself can do: the same bytes between the same kinds of memory, without a pool.

Each ceiling has two halves. P's measures; D's says where to write and does its part of each step.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from pd.bench.transfer_control import accept_socket, connect_socket, listen
from pd.core.errors import SetupError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pd.bench.transfer_control import Control
    from pd.bench.transfer_spec import TransferSpec
    from pd.core.node_info import NodeInfo
    from pd.engine.kv_pool import KVPool

# The libraries' rates stop rising at a few MiB; sockets are fastest while a call's bytes stay in
# the cache.
LARGE_BLOCK = 4 << 20
SOCKET_CALL = 512 << 10
# Beside a pool in GPU memory sockets use a host buffer, as small as what backends stage through.
HOST_BUFFER = 16 << 20
_MOONCAKE_BATCH = 256
_NIXL_ARRIVED = b"arrived"
_NIXL_NAP, _NIXL_SECONDS = 50e-6, 60.0


class PathCeiling(Protocol):
    """P's half."""

    name: str

    def measure(self) -> float:
        """Move the bytes once; GB/s."""

    def close(self) -> None:
        """Give everything back; before D's half does."""


class CeilingTarget(Protocol):
    """D's half."""

    def describe(self) -> dict[str, Any]:
        """What P needs to know."""

    def step(self) -> None:
        """D's part of one measurement; over when the bytes are here."""

    def close(self) -> None:
        """Give everything back."""


def ceiling_of(
    spec: TransferSpec,
    pool: KVPool,
    control: Control,
    key: bytes | None,
    connections: int,
    peer: NodeInfo,
) -> PathCeiling:
    """P's half of a backend's ceiling; asks D, which is ``peer``, for the other one.

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


def ceiling_target(
    spec: TransferSpec, pool: KVPool, control: Control, key: bytes | None, connections: int
) -> CeilingTarget:
    """D's half."""
    if spec.backend == "nixl":
        return NixlCeilingTarget(spec, pool, control.host)
    if spec.backend == "mooncake":
        return MooncakeCeilingTarget(spec, pool, control.host)
    return SocketsCeilingTarget(spec, pool, control.host, key, connections)


def large_blocks(spec: TransferSpec) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Offsets and lengths that cover the bytes."""
    offsets = np.arange(0, spec.num_bytes, LARGE_BLOCK)
    return offsets, np.minimum(LARGE_BLOCK, spec.num_bytes - offsets)


# ---- plain sockets


def host_memory(spec: TransferSpec, pool: KVPool) -> memoryview:
    """The pool's own bytes if they can be had, else a small buffer that is used over and over."""
    if pool.buffer.is_cuda:
        return memoryview(bytearray(HOST_BUFFER))
    view: memoryview = pool.buffer.view(-1).view(torch.uint8).numpy().data[: spec.num_bytes]
    return view


def share_out(
    spec: TransferSpec, memory: memoryview, connections: int
) -> list[tuple[memoryview, int]]:
    """For each connection its memory and how many bytes it moves."""
    cuts = [spec.num_bytes * n // connections for n in range(connections + 1)]
    sizes = [stop - start for start, stop in pairwise(cuts)]
    if len(memory) < spec.num_bytes:
        part = len(memory) // connections
        return [(memory[n * part : (n + 1) * part], size) for n, size in enumerate(sizes)]
    return [(memory[cuts[n] : cuts[n + 1]], size) for n, size in enumerate(sizes)]


def in_threads(work: Callable[[Any], None], items: list[Any]) -> None:
    """One thread each; raises what the first of them raised."""
    errors: list[OSError] = []

    def run(item: Any) -> None:
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
    """As many connections as the backend has, nothing but send and receive."""

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


# ---- the libraries with large blocks


class _NixlAgent:
    """An agent beside the backend's, over the same transports, with the pool registered."""

    def __init__(self, spec: TransferSpec, pool: KVPool, name: str, host: str) -> None:
        from pd.transfer.staged.nixl import new_agent
        from pd.transfer.staged.nixl_transports import choose_transports

        self.spec, self.address = spec, pool.buffer.data_ptr()
        self.kind = "VRAM" if pool.buffer.is_cuda else "DRAM"
        self.device_index = (pool.buffer.device.index or 0) if pool.buffer.is_cuda else 0
        # NIXL's own thread spins: on two cores it costs most of the rate.
        self.agent = new_agent(name, choose_transports(host, local_only=False))
        region = [(self.address, spec.num_bytes, self.device_index, "")]
        self._registered = self.agent.register_memory(region, self.kind)

    def descriptors(self, address: int, device_index: int, kind: str) -> Any:
        offsets, lengths = large_blocks(self.spec)
        places = [
            (address + int(offset), int(length), device_index)
            for offset, length in zip(offsets, lengths, strict=True)
        ]
        return self.agent.get_xfer_descs(places, kind)

    def close(self) -> None:
        self.agent.deregister_memory(self._registered)


class NixlWrites:
    """One NIXL write of large blocks, as they lie."""

    name = f"nixl, blocks of {LARGE_BLOCK >> 20} MiB"

    def __init__(
        self, spec: TransferSpec, pool: KVPool, control: Control, described: dict[str, Any]
    ) -> None:
        self._spec, self._control = spec, control
        self._nixl = _NixlAgent(spec, pool, "ceiling-P", control.host)
        self._peer = self._nixl.agent.add_remote_agent(described["metadata"])
        if isinstance(self._peer, bytes):
            self._peer = self._peer.decode()
        theirs = (described["address"], described["device_index"], described["kind"])
        self._handle = self._nixl.agent.initialize_xfer(
            "WRITE",
            self._nixl.descriptors(self._nixl.address, self._nixl.device_index, self._nixl.kind),
            self._nixl.descriptors(*theirs),
            self._peer,
            _NIXL_ARRIVED,
        )

    def measure(self) -> float:
        self._control.send({"op": "step"})
        begun = time.perf_counter()
        state = self._nixl.agent.transfer(self._handle)
        while state == "PROC":
            time.sleep(_NIXL_NAP)
            state = self._nixl.agent.check_xfer_state(self._handle)
        seconds = time.perf_counter() - begun
        if state != "DONE":
            raise SetupError(f"a plain nixl write ended as {state}")
        self._control.answer()
        return self._spec.num_bytes / seconds / 1e9

    def close(self) -> None:
        self._nixl.agent.release_xfer_handle(self._handle)
        self._nixl.agent.remove_remote_agent(self._peer)
        self._nixl.close()


class NixlCeilingTarget:
    """Memory to write to. Connecting, and writes over sockets, need D's calls."""

    def __init__(self, spec: TransferSpec, pool: KVPool, host: str) -> None:
        self._nixl = _NixlAgent(spec, pool, "ceiling-D", host)

    def describe(self) -> dict[str, Any]:
        nixl = self._nixl
        return {
            "metadata": nixl.agent.get_agent_metadata(),
            "address": nixl.address,
            "kind": nixl.kind,
            "device_index": nixl.device_index,
        }

    def step(self) -> None:
        deadline = time.monotonic() + _NIXL_SECONDS
        while not self._nixl.agent.get_new_notifs():
            if time.monotonic() > deadline:
                raise SetupError(f"a plain nixl write did not arrive within {_NIXL_SECONDS:g} s")
            time.sleep(_NIXL_NAP)

    def close(self) -> None:
        self._nixl.close()


class _MooncakeEngine:
    """An engine of its own, beside the backend's, with the pool's memory registered."""

    def __init__(self, spec: TransferSpec, pool: KVPool, host: str) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise SetupError(
                f"mooncake cannot be loaded ({error}); pip install "
                f"mooncake-transfer-engine-non-cuda, and libibverbs1 and librdmacm1 of the system"
            ) from error
        self.engine, self.address = TransferEngine(), pool.buffer.data_ptr()
        if self.engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise SetupError(f"mooncake cannot listen on {host}")
        if self.engine.register_memory(self.address, spec.num_bytes):
            raise SetupError("mooncake cannot register the pool's memory")
        self.session = f"{host}:{self.engine.get_rpc_port()}"

    def close(self) -> None:
        self.engine.unregister_memory(self.address)


class MooncakeWrites:
    """Synchronous batches of large blocks, as they lie."""

    name = f"mooncake, blocks of {LARGE_BLOCK >> 20} MiB"

    def __init__(
        self, spec: TransferSpec, pool: KVPool, host: str, described: dict[str, Any]
    ) -> None:
        self._spec = spec
        self._mooncake = _MooncakeEngine(spec, pool, host)
        self._session: str = described["session"]
        offsets, lengths = large_blocks(spec)
        self._sources = (offsets + self._mooncake.address).tolist()
        self._targets = (offsets + described["address"]).tolist()
        self._lengths = lengths.tolist()

    def measure(self) -> float:
        begun = time.perf_counter()
        for first in range(0, len(self._lengths), _MOONCAKE_BATCH):
            batch = slice(first, first + _MOONCAKE_BATCH)
            failed = self._mooncake.engine.batch_transfer_sync_write(
                self._session, self._sources[batch], self._targets[batch], self._lengths[batch]
            )
            if failed:
                raise SetupError(f"a plain mooncake write ended with {failed}")
        return self._spec.num_bytes / (time.perf_counter() - begun) / 1e9

    def close(self) -> None:
        self._mooncake.close()


class MooncakeCeilingTarget:
    """Memory to write to; the engine's own threads do the rest."""

    def __init__(self, spec: TransferSpec, pool: KVPool, host: str) -> None:
        self._mooncake = _MooncakeEngine(spec, pool, host)

    def describe(self) -> dict[str, Any]:
        return {"session": self._mooncake.session, "address": self._mooncake.address}

    def step(self) -> None:
        """Writes are one-sided."""

    def close(self) -> None:
        self._mooncake.close()


# ---- a copy between two GPUs


class PeerCopy:
    """``copy_`` from one GPU's memory to the other's, by this process alone.

    Args:
        uuid: of D's GPU, which may have another number here.
    """

    name = "peer copy"

    def __init__(self, spec: TransferSpec, pool: KVPool, uuid: str) -> None:
        uuids = [
            str(torch.cuda.get_device_properties(number).uuid)
            for number in range(torch.cuda.device_count())
        ]
        device = torch.device("cuda", uuids.index(uuid))
        self._source = pool.buffer.view(-1).view(torch.uint8)[: spec.num_bytes]
        self._target = torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)

    def measure(self) -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._source.device):
            begun.record()
            self._target.copy_(self._source, non_blocking=True)
            ended.record()
            ended.synchronize()
        milliseconds: float = begun.elapsed_time(ended)
        return self._source.numel() / milliseconds / 1e6

    def close(self) -> None:
        """Memory goes with the process."""
