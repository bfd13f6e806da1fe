"""The interface of the nvlink backend to a GPU, and its implementation with CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from pd.core.errors import SetupError
from pd.kernels.copy_engine import CopyEngine, SlotRuns
from pd.kernels.cuda_ipc import CudaIpc
from pd.kernels.kv_copy import compile_copies, copy_to_peer
from pd.transfer.allocator import expandable_segments
from pd.transfer.computed import Computed
from pd.transfer.host_id import host_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.transfer.kv_buffer import IntArray, KVBuffer, KVPlane
    from pd.transfer.ranges import Block


class PoolMapping(Protocol):
    """A peer's pool in this process's address space."""

    address: int

    def close(self) -> None:
        """Unmap it. Nothing may be using it. Raises TransferError."""


class StoreTicket(Protocol):
    """A launched store."""

    def is_done(self) -> bool:
        """Whether it is complete. Does not wait."""

    def wait(self) -> None:
        """Sleep until it is complete."""

    def measure_seconds(self) -> float:
        """Return how many seconds it ran. Call this only once it is complete."""


class StoreLane(Protocol):
    """A queue of stores that run one after the other, concurrently with the forward pass. For one
    thread."""

    def make_table(self, slots: IntArray) -> object:
        """Prepare the slots of a sequence's tokens, without waiting.

        Args:
            slots: int32 ``[2, tokens]``, in the own pool and in the peer's.
        """

    def store_block(
        self, table: Any, columns: slice, peer: int, peer_num_slots: int, block: Block
    ) -> StoreTicket:
        """Launch the copy of ``block`` from the own pool into the plane at ``peer``.

        Args:
            peer: address of the block's plane in the peer's pool, as mapped here.
            table: from :meth:`make_table`.
            columns: the block's tokens in the table.

        Raises the driver's errors. Part of the store may have been launched then.
        """

    def wait_until_idle(self) -> None:
        """Wait until nothing is under way, including parts of a failed store."""


class StoreDevice(Protocol):
    """The GPU that holds the pool. Tests put shared memory in its place."""

    def describe_pool(self) -> dict[str, str]:
        """Return the values by which a peer maps the pool and decides whether it can: see
        :func:`pd.core.transfer_choice.nvlink_obstacle`, and ``handle`` and ``offset``."""

    def map_pool(self, handle: bytes, offset: int) -> PoolMapping:
        """Map a peer's pool. Raises TransferError."""

    def when_computed(self, call: Callable[[str], None]) -> None:
        """See :meth:`pd.transfer.computed.Computed.call_when_done`."""

    def make_lane(self) -> StoreLane: ...

    def close(self) -> None:
        """Wait until all calls were made. Nothing is sent any more."""


class CudaMapping(PoolMapping):
    """See :class:`PoolMapping`."""

    def __init__(self, ipc: CudaIpc, handle: bytes, offset: int) -> None:
        self._ipc = ipc
        self._base = ipc.map_memory(handle)
        self.address = self._base + offset

    def close(self) -> None:
        self._ipc.unmap_memory(self._base)


class CudaTicket(StoreTicket):
    """Events before and after the launch.

    Args:
        begin: recorded on the stream before the launch. We record the other one now.
    """

    def __init__(self, stream: torch.cuda.Stream, begin: torch.cuda.Event) -> None:
        self._begin, self._end = begin, record_event(stream)

    def is_done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        self._end.synchronize()

    def measure_seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3


def record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event now. A thread that waits for it sleeps."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


class CudaTable(NamedTuple):
    """See :meth:`StoreLane.make_table`. ``on_device`` is for the kernel, ``runs`` for a copy
    engine."""

    on_device: torch.Tensor
    runs: SlotRuns


class _LanePlane:
    """A plane of the own pool, with a copy engine for its rows."""

    def __init__(self, plane: KVPlane) -> None:
        self.buffer, self.engine = plane.buffer, CopyEngine(plane.buffer)
        self.layers = range(plane.first_layer, plane.first_layer + plane.buffer.shape[0])


class CudaLane(StoreLane):
    """A CUDA stream of the same priority as the forward pass. A copy engine moves long runs of
    slots, and the kernel moves the others."""

    def __init__(self, pool: KVBuffer) -> None:
        self._device = pool.memory.device
        planes = [_LanePlane(plane) for plane in pool.planes]
        self._of_layer = [plane for plane in planes for _ in plane.layers]
        self.stream = torch.cuda.Stream(self._device)

    def make_table(self, slots: IntArray) -> CudaTable:
        host = torch.from_numpy(slots).pin_memory()
        # NOTE: we allocate and use it on this stream only, so it may be freed at any time.
        with torch.cuda.stream(self.stream):
            on_device = host.to(self._device, non_blocking=True)
        return CudaTable(on_device, SlotRuns(slots))

    def store_block(
        self, table: CudaTable, columns: slice, peer: int, peer_num_slots: int, block: Block
    ) -> StoreTicket:
        start, stop = columns.start, columns.stop
        plane = self._of_layer[block.layer_start]
        first = plane.layers.start
        layers = block.layer_start - first, block.layer_stop - first
        begin = record_event(self.stream)
        if plane.engine.can_copy(stop - start, table.runs.count_runs(start, stop), peer_num_slots):
            runs = table.runs.find_runs(start, stop)
            plane.engine.copy_runs(runs, peer, peer_num_slots, *layers, self.stream.cuda_stream)
        else:
            slots, peer_slots = table.on_device[:, start:stop]
            with torch.cuda.stream(self.stream):
                copy_to_peer(plane.buffer, slots, peer, peer_num_slots, peer_slots, *layers)
        return CudaTicket(self.stream, begin)

    def wait_until_idle(self) -> None:
        self.stream.synchronize()


class CudaDevice(StoreDevice):
    """The GPU that holds the pool.

    Raises:
        SetupError: the pool is not on a GPU, or others cannot map its memory.
    """

    def __init__(self, pool: KVBuffer) -> None:
        self._pool = pool
        device = pool.memory.device
        if device.type != "cuda":
            raise SetupError(
                f"nvlink moves KV between GPUs, but the KV cache is on {device.type}; use tcp"
            )
        if variable := expandable_segments():
            raise SetupError(f"peers cannot map memory of expandable segments; unset {variable}")
        self._ordinal = device.index or 0
        self._ipc = CudaIpc(self._ordinal)
        self._handle, self._offset = self._ipc.export_memory(pool.memory.data_ptr())
        for plane in pool.planes:
            compile_copies(plane.buffer)
        self._computed = Computed(device, "nvlink")

    def describe_pool(self) -> dict[str, str]:
        own = self._ordinal
        reachable = [
            _device_uuid(other)
            for other in range(torch.cuda.device_count())
            if other == own or torch.cuda.can_device_access_peer(own, other)
        ]
        return {
            "host_id": host_id(),
            "device": _device_uuid(own),
            "reachable": ",".join(reachable),
            "handle": self._handle.hex(),
            "offset": str(self._offset),
        }

    def map_pool(self, handle: bytes, offset: int) -> PoolMapping:
        return CudaMapping(self._ipc, handle, offset)

    def when_computed(self, call: Callable[[str], None]) -> None:
        self._computed.call_when_done(call)

    def make_lane(self) -> StoreLane:
        return CudaLane(self._pool)

    def close(self) -> None:
        self._computed.close()


def _device_uuid(ordinal: int) -> str:
    return str(torch.cuda.get_device_properties(ordinal).uuid)
