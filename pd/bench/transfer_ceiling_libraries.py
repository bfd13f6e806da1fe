"""Ceilings of ``nixl`` and ``mooncake``: the library itself with large, contiguous blocks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.core.errors import SetupError

if TYPE_CHECKING:
    from pd.bench.transfer_control import Control
    from pd.bench.transfer_spec import TransferSpec
    from pd.engine.kv_pool import KVPool

# The libraries get no faster beyond a few MiB.
LARGE_BLOCK = 4 << 20
_MOONCAKE_BATCH = 256
_NIXL_ARRIVED = b"arrived"
_NIXL_NAP, _NIXL_SECONDS = 50e-6, 60.0


def large_blocks(spec: TransferSpec) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return offsets and lengths of the blocks."""
    offsets = np.arange(0, spec.num_bytes, LARGE_BLOCK)
    return offsets, np.minimum(LARGE_BLOCK, spec.num_bytes - offsets)


class NixlMemory:
    """The pool, registered with an agent of its own over the backend's transports.

    As D's half it only waits, because connecting and writes over sockets need D's calls.
    """

    def __init__(self, spec: TransferSpec, pool: KVPool, name: str, host: str) -> None:
        from pd.transfer.staged.nixl_agents import new_agent
        from pd.transfer.staged.nixl_transports import choose_transports

        self.spec, self.address = spec, pool.memory.data_ptr()
        self.kind = "VRAM" if pool.memory.is_cuda else "DRAM"
        self.device_index = (pool.device.index or 0) if pool.memory.is_cuda else 0
        # NIXL's own thread spins, so on two cores it costs most of the rate.
        self.agent = new_agent(name, choose_transports(host, local_only=False))
        region = [(self.address, spec.num_bytes, self.device_index, "")]
        self._registered = self.agent.register_memory(region, self.kind)

    def describe_blocks(self, address: int, device_index: int, kind: str) -> Any:
        offsets, lengths = large_blocks(self.spec)
        places = [
            (address + int(offset), int(length), device_index)
            for offset, length in zip(offsets, lengths, strict=True)
        ]
        return self.agent.get_xfer_descs(places, kind)

    def describe(self) -> dict[str, Any]:
        return {
            "metadata": self.agent.get_agent_metadata(),
            "address": self.address,
            "kind": self.kind,
            "device_index": self.device_index,
        }

    def run_step(self) -> None:
        deadline = time.monotonic() + _NIXL_SECONDS
        while not self.agent.get_new_notifs():
            if time.monotonic() > deadline:
                raise SetupError(f"a plain nixl write did not arrive within {_NIXL_SECONDS:g} s")
            time.sleep(_NIXL_NAP)

    def close(self) -> None:
        self.agent.deregister_memory(self._registered)


class NixlWrites:
    """One NIXL write of large blocks."""

    name = f"nixl, blocks of {LARGE_BLOCK >> 20} MiB"

    def __init__(
        self, spec: TransferSpec, pool: KVPool, control: Control, described: dict[str, Any]
    ) -> None:
        self._spec, self._control = spec, control
        self._nixl = NixlMemory(spec, pool, "ceiling-P", control.host)
        self._peer = self._nixl.agent.add_remote_agent(described["metadata"])
        if isinstance(self._peer, bytes):
            self._peer = self._peer.decode()
        theirs = (described["address"], described["device_index"], described["kind"])
        self._handle = self._nixl.agent.initialize_xfer(
            "WRITE",
            self._nixl.describe_blocks(
                self._nixl.address, self._nixl.device_index, self._nixl.kind
            ),
            self._nixl.describe_blocks(*theirs),
            self._peer,
            _NIXL_ARRIVED,
        )

    def measure(self) -> float:
        self._control.send_message({"op": "step"})
        begun = time.perf_counter()
        state = self._nixl.agent.transfer(self._handle)
        while state == "PROC":
            time.sleep(_NIXL_NAP)
            state = self._nixl.agent.check_xfer_state(self._handle)
        seconds = time.perf_counter() - begun
        if state != "DONE":
            raise SetupError(f"a plain nixl write ended as {state}")
        self._control.receive_answer()
        return self._spec.num_bytes / seconds / 1e9

    def close(self) -> None:
        self._nixl.agent.release_xfer_handle(self._handle)
        self._nixl.agent.remove_remote_agent(self._peer)
        self._nixl.close()


class MooncakeMemory:
    """The pool, registered with an engine of its own.

    As D's half it does nothing, because the engine's own threads do.
    """

    def __init__(self, spec: TransferSpec, pool: KVPool, host: str) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise SetupError(
                f"mooncake cannot be loaded ({error}); pip install "
                f"mooncake-transfer-engine-non-cuda, and libibverbs1 and librdmacm1 of the system"
            ) from error
        self.engine, self.address = TransferEngine(), pool.memory.data_ptr()
        if self.engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise SetupError(f"mooncake cannot listen on {host}")
        if self.engine.register_memory(self.address, spec.num_bytes):
            raise SetupError("mooncake cannot register the pool's memory")
        self.session = f"{host}:{self.engine.get_rpc_port()}"

    def describe(self) -> dict[str, Any]:
        return {"session": self.session, "address": self.address}

    def run_step(self) -> None:
        """Writes are one-sided."""

    def close(self) -> None:
        self.engine.unregister_memory(self.address)


class MooncakeWrites:
    """Synchronous batches of large blocks."""

    name = f"mooncake, blocks of {LARGE_BLOCK >> 20} MiB"

    def __init__(
        self, spec: TransferSpec, pool: KVPool, host: str, described: dict[str, Any]
    ) -> None:
        self._spec = spec
        self._mooncake = MooncakeMemory(spec, pool, host)
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
