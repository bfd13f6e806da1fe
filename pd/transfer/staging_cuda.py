"""Between a pool in CUDA memory and staging slots: kernels and copies on side streams."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd.kernels.kv_copy import gather, scatter
from pd.transfer.staging_copy import Copier, Ticket

if TYPE_CHECKING:
    import numpy.typing as npt

    from pd.transfer.base import IntArray, KVBuffer
    from pd.transfer.ranges import Block


class _Event(Ticket):
    """Blocks in the driver, not in a loop."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class _Table:
    """The slot of each token, int32; on the device from its first use, by one stream only."""

    def __init__(self, slots: npt.NDArray[np.int32]) -> None:
        self._host = torch.from_numpy(slots)
        self._device: torch.Tensor | None = None

    def slots(self, block: Block, device: torch.device) -> torch.Tensor:
        if self._device is None:
            self._device = self._host.pin_memory().to(device, non_blocking=True)
        return self._device[block.token_start : block.token_stop]


@dataclass
class _Lane:
    """A side stream and the device memory through which pinned slots go, used in turns: the stream
    keeps a buffer's next use behind its last."""

    stream: torch.cuda.Stream
    buffers: deque[torch.Tensor]

    def buffer(self, size: int) -> torch.Tensor:
        if not self.buffers or len(self.buffers[0]) < size:
            self.buffers.clear()
            with torch.cuda.stream(self.stream):
                device = self.stream.device
                self.buffers.append(torch.empty(size, dtype=torch.uint8, device=device))
        self.buffers.rotate(1)
        return self.buffers[0][:size]


class CudaCopier(Copier):
    """Gathers and scatters run on a stream each. The stream on which the forward pass runs is
    waited for and never waits. Slots on the device are copied to and from directly, pinned ones by
    way of a device buffer."""

    depth = 4

    def __init__(self, pool: KVBuffer) -> None:
        super().__init__(pool)
        self._buffer = pool.buffer
        self._device = pool.buffer.device
        # Behind the forward pass where they compete: it is what a request waits for.
        self._out = _Lane(self._stream(), deque())
        self._in = _Lane(self._stream(), deque())

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def table(self, pages: IntArray, num_tokens: int) -> _Table:
        tokens = np.arange(num_tokens)
        slots = pages[tokens // self.page_size].astype(np.int64) * self.page_size
        return _Table((slots + tokens % self.page_size).astype(np.int32))

    def gather(self, table: Any, block: Block, slot: torch.Tensor, after: Any) -> Ticket:
        lane = self._out
        with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
            lane.stream.wait_event(after)
            slots = table.slots(block, self._device)
            size = block.cells * self.cell_bytes
            target = slot[:size] if slot.is_cuda else lane.buffer(size)
            gather(self._buffer, slots, block.layer_start, block.layer_stop, target)
            if not slot.is_cuda:
                slot[:size].copy_(target, non_blocking=True)
            return _Event(lane.stream)

    def scatter(self, table: Any, block: Block, slot: torch.Tensor) -> Ticket:
        lane = self._in
        with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
            slots = table.slots(block, self._device)
            size = block.cells * self.cell_bytes
            source = slot[:size]
            if not slot.is_cuda:
                source = lane.buffer(size)
                source.copy_(slot[:size], non_blocking=True)
            scatter(self._buffer, slots, block.layer_start, block.layer_stop, source)
            return _Event(lane.stream)

    def make_slots(self, count: int, size: int, *, on_device: bool) -> torch.Tensor:
        if on_device:
            with torch.cuda.device(self._device):
                slots = torch.zeros((count, size), dtype=torch.uint8, device=self._device)
                torch.cuda.current_stream(self._device).synchronize()
                return slots
        return torch.zeros((count, size), dtype=torch.uint8, pin_memory=True)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
