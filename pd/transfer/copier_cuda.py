"""Copies between a pool in CUDA memory and staging buffers, on side streams."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.kv_copy import (
    count_row_bytes,
    gather_parts,
    gather_rows,
    scatter_parts,
    scatter_rows,
)
from pd.kernels.paging import find_token_slots
from pd.transfer.copier import Copier, CopyTicket, PlaneCopier, list_targets
from pd.transfer.pool_shape import PoolShape
from pd.transfer.ranges import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.transfer.kv_buffer import IntArray, KVBuffer, KVPlane


class _CopyEvent(CopyTicket):
    """An event recorded after a copy.

    A copy takes tens of microseconds, less than a sleeping thread needs to wake up. So :meth:`wait`
    spins in the driver, without Python's lock.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:
            # An error of CUDA, which ``wait`` raises too.
            return True

    def wait(self) -> None:
        # We query first, because releasing Python's lock costs more than the query.
        if not self._event.query():
            self._event.synchronize()


class _Table:
    """The slot of each token in each page table, int32, on the device."""

    def __init__(self, slots: npt.NDArray[np.int32], stream: torch.cuda.Stream) -> None:
        host = torch.from_numpy(slots).pin_memory()
        self._ready = torch.cuda.Event()
        with torch.cuda.stream(stream):
            self._slots = host.to(stream.device, non_blocking=True)
            self._ready.record(stream)

    def find_slots(self, block: Block, table: int, stream: torch.cuda.Stream) -> torch.Tensor:
        """Return the slots of a block's tokens in a page table for later work on ``stream``."""
        stream.wait_event(self._ready)
        return self._slots[table, block.token_start : block.token_stop]


class _CopyStream:
    """A side stream, and the device memory that pinned buffers pass through.

    One stream orders the uses of this memory. Its copies have priority over other work on the GPU,
    because they are short and requests wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._memory: torch.Tensor | None = None

    def get_memory(self, size: int) -> torch.Tensor:
        """Return device memory of ``size`` bytes. The stream must be current, because the memory
        belongs to it."""
        if self._memory is None or len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self.stream.device)
        return self._memory[:size]


class CudaCopier(Copier):
    """Gathers and scatters on two streams of its own, next to the forward pass. It copies buffers
    on the device directly, and pinned ones through a device buffer."""

    depth = 4

    def __init__(self, pool: KVBuffer) -> None:
        self._device = pool.memory.device
        lanes = _CopyStream(self._device), _CopyStream(self._device)
        self._tables = torch.cuda.Stream(self._device, priority=-1)
        planes = [CudaPlane(plane, *lanes) for plane in pool.planes]
        super().__init__(PoolShape.from_pool(pool), planes)
        self._warm_up(planes)

    def make_table(self, pages: IntArray, num_tokens: int) -> _Table:
        tokens = np.arange(num_tokens)
        slots = [
            find_token_slots(table, tokens, self.shape.page_size) for table in np.atleast_2d(pages)
        ]
        return _Table(np.stack(slots).astype(np.int32), self._tables)

    def make_buffers(self, count: int, size: int, *, on_device: bool) -> torch.Tensor:
        if on_device:
            with torch.cuda.device(self._device):
                buffers = torch.zeros((count, size), dtype=torch.uint8, device=self._device)
                torch.cuda.current_stream(self._device).synchronize()
                return buffers
        return torch.zeros((count, size), dtype=torch.uint8, pin_memory=True)

    def _warm_up(self, planes: Sequence[CudaPlane]) -> None:
        """Compile the kernels now, because the first room cannot wait for the compiler. We use
        small planes, because the node may be computing already."""
        tokens = 16
        slots = np.arange(tokens, dtype=np.int32)
        table = _Table(np.stack([slots] * self.shape.num_tables), self._tables)
        size = tokens * self.shape.max_cell_bytes
        buffer = self.make_buffers(1, size, on_device=True)[0]
        for plane in planes:
            small = plane.make_small(2 * tokens)
            for start in {0, tokens // 3}:
                block = Block(start, tokens, small.first_layer, small.first_layer + 1)
                small.gather_block(table, block, buffer).wait()
                small.scatter_block(table, block, buffer).wait()


class CudaPlane(PlaneCopier):
    """A plane in CUDA memory.

    Args:
        outward, inward: streams for the gathers and the scatters of all planes.
    """

    def __init__(self, plane: KVPlane, outward: _CopyStream, inward: _CopyStream) -> None:
        self.first_layer, self._table = plane.first_layer, plane.table
        self._buffer, self._parts = plane.buffer, plane.parts
        self._targets = list_targets(plane)
        self._device = plane.buffer.device
        self._out, self._in = outward, inward
        self._cell_bytes = plane.buffer.shape[1] * count_row_bytes(plane.buffer) * len(plane.parts)

    def make_small(self, num_slots: int) -> CudaPlane:
        """Return a copier of a new plane with one layer and rows of the same shape."""
        shape = (1, self._buffer.shape[1], num_slots, *self._buffer.shape[3:])
        with torch.cuda.device(self._device):
            buffer = torch.zeros(shape, dtype=self._buffer.dtype, device=self._device)
            torch.cuda.current_stream(self._device).synchronize()
        small = copy(self)
        small._buffer, small._parts = buffer, [buffer.data_ptr()] * len(self._parts)
        small._targets = [small._parts]
        return small

    def gather_block(self, table: _Table, block: Block, buffer: torch.Tensor) -> CopyTicket:
        lane = self._out
        with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
            slots = table.find_slots(block, self._table, lane.stream)
            size = block.cells * self._cell_bytes
            target = buffer[:size] if buffer.is_cuda else lane.get_memory(size)
            layers = self._local_layers(block)
            if len(self._parts) == 1:
                gather_rows(self._buffer, slots, *layers, target)
            else:
                gather_parts(self._buffer, self._parts, slots, *layers, target)
            if not buffer.is_cuda:
                buffer[:size].copy_(target, non_blocking=True)
            return _CopyEvent(lane.stream)

    def scatter_block(self, table: _Table, block: Block, buffer: torch.Tensor) -> CopyTicket:
        lane = self._in
        with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
            slots = table.find_slots(block, self._table, lane.stream)
            size = block.cells * self._cell_bytes
            source = buffer[:size]
            if not buffer.is_cuda:
                source = lane.get_memory(size)
                source.copy_(buffer[:size], non_blocking=True)
            layers = self._local_layers(block)
            if len(self._parts) == 1 and len(self._targets) == 1:
                scatter_rows(self._buffer, slots, *layers, source)
            else:
                for parts in self._targets:
                    scatter_parts(self._buffer, parts, slots, *layers, source)
            return _CopyEvent(lane.stream)

    def _local_layers(self, block: Block) -> tuple[int, int]:
        """Return the block's layers, numbered within this plane."""
        return block.layer_start - self.first_layer, block.layer_stop - self.first_layer
