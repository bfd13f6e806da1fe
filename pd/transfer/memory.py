"""The pool's bytes as the sockets see them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.transfer.ranges import slot_runs

if TYPE_CHECKING:
    from pd.transfer.base import IntArray, KVBuffer
    from pd.transfer.ranges import Block

# Linux takes at most this many stretches in one sendmsg or recvmsg.
IOV_MAX = 1024


class Stretches:
    """Stretches of memory that are read or written in order, with the position reached."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._ends = list(accumulate(map(len, views)))
        self._index = 0
        self.done = 0
        self.total = self._ends[-1] if self._ends else 0

    def window(self, num_bytes: int) -> list[memoryview]:
        """What comes next: stretches of about ``num_bytes``, as many as one system call takes."""
        stop = bisect_right(self._ends, self.done + num_bytes, lo=self._index) + 1
        return self._views[self._index : min(stop, self._index + IOV_MAX)]

    def advance(self, num_bytes: int) -> None:
        """``num_bytes`` of the window were moved."""
        self.done += num_bytes
        self._index = bisect_right(self._ends, self.done, lo=self._index)
        if self._index < len(self._views):
            view = self._views[self._index]
            self._views[self._index] = view[len(view) - (self._ends[self._index] - self.done) :]


class PoolMemory:
    """Reads and writes blocks of a pool, in the order in which they travel: for each layer the
    tokens' K, then their V.

    A pool in host memory is used in place. Any other (``staged``) goes through a host buffer per
    frame, pinned when CUDA is there.
    """

    def __init__(self, pool: KVBuffer, *, staged: bool | None = None) -> None:
        buffer = pool.buffer
        if not buffer.is_contiguous() or buffer.dim() != 5:
            raise ValueError(f"a pool is one contiguous 5-D tensor, not {tuple(buffer.shape)}")
        self.num_layers = buffer.shape[0]
        self.num_slots = buffer.shape[2]
        self.page_size = pool.layout.page_size
        # Bytes of K or V of one token in one layer.
        self.width = buffer.shape[3] * buffer.shape[4] * buffer.element_size()
        self.cell_bytes = 2 * self.width
        self.staged = buffer.device.type != "cpu" if staged is None else staged
        flat = buffer.view(-1).view(torch.uint8)
        self._rows = flat.view(self.num_layers, 2, self.num_slots, self.width)
        self._bytes = None if self.staged else flat.numpy().data

    def source(self, pages: IntArray, block: Block) -> list[memoryview]:
        """The block's bytes, to be read."""
        if self._bytes is not None:
            return self._views(pages, block)
        rows = self._rows[block.layer_start : block.layer_stop].index_select(
            2, self._slots(pages, block).to(self._rows.device)
        )
        host = self._host(block)
        host.copy_(rows.view(-1))
        return [host.numpy().data]

    def landing(self, pages: IntArray, block: Block) -> Landing:
        """Where the block's bytes go."""
        if self._bytes is not None:
            return Landing(self._views(pages, block))
        return StagedLanding(self, pages, block, self._host(block))

    def scatter(self, pages: IntArray, block: Block, host: torch.Tensor) -> None:
        """Write a staged block into the pool; returns when it is there."""
        shape = (block.layer_stop - block.layer_start, 2, -1, self.width)
        slots = self._slots(pages, block)
        self._write_rows(slots, block.layer_start, block.layer_stop, host.view(shape))

    def write(self, slots: IntArray, layer_start: int, layer_stop: int, data: bytes) -> None:
        """Write a block's bytes to slots given one by one; the caller checked that they exist."""
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = rows.view(layer_stop - layer_start, 2, -1, self.width)
        index = torch.from_numpy(slots.astype(np.int64))
        self._write_rows(index, layer_start, layer_stop, rows)

    def _write_rows(
        self, slots: torch.Tensor, layer_start: int, layer_stop: int, rows: torch.Tensor
    ) -> None:
        device = self._rows.device
        self._rows[layer_start:layer_stop].index_copy_(2, slots.to(device), rows.to(device))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _views(self, pages: IntArray, block: Block) -> list[memoryview]:
        assert self._bytes is not None
        pool, width = self._bytes, self.width
        runs = [
            (start * width, stop * width)
            for start, stop in slot_runs(pages, self.page_size, block.token_start, block.token_stop)
        ]
        plane_bytes = self.num_slots * width
        views: list[memoryview] = []
        for plane in range(2 * block.layer_start, 2 * block.layer_stop):
            base = plane * plane_bytes
            views += [pool[base + start : base + stop] for start, stop in runs]
        return views

    def _slots(self, pages: IntArray, block: Block) -> torch.Tensor:
        runs = slot_runs(pages, self.page_size, block.token_start, block.token_stop)
        return torch.cat([torch.arange(start, stop) for start, stop in runs])

    def _host(self, block: Block) -> torch.Tensor:
        pinned = self._rows.device.type == "cuda"
        return torch.empty(block.cells * self.cell_bytes, dtype=torch.uint8, pin_memory=pinned)


class Landing(Stretches):
    """Where one frame's payload goes."""

    def complete(self) -> None:
        """All bytes are here: put them where they belong, if they are not there already."""


class StagedLanding(Landing):
    def __init__(
        self, memory: PoolMemory, pages: IntArray, block: Block, host: torch.Tensor
    ) -> None:
        super().__init__([host.numpy().data])
        self._memory, self._pages, self._block, self._host = memory, pages, block, host

    def complete(self) -> None:
        self._memory.scatter(self._pages, self._block, self._host)
