"""The pool's bytes as the sockets see them."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pd.transfer.ranges import slot_runs

if TYPE_CHECKING:
    import socket

    from pd.transfer.base import IntArray, KVBuffer
    from pd.transfer.ranges import Block

# Linux takes at most this many stretches in one system call.
_IOV_MAX = 1024
_IOVEC_BYTES = 16
# More at once is slower: what the peer's kernel wrote is then no longer in the cache when it is
# copied on (2.9 GB/s with this, 2.4 with all that is ready; page size 1, loopback).
_CALL_BYTES = 512 << 10

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.readv, _libc.writev):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


class Stretches:
    """Stretches of memory that are sent or filled in order, with the position reached.

    They go to the kernel as a table of addresses that numpy computed: ``socket.sendmsg`` and
    ``recvmsg_into`` would need a Python object for each stretch on each call.

    Args:
        addresses, lengths: int64, one for each stretch; no length is 0.
        owner: kept alive as long as this is, since it owns the memory.
    """

    def __init__(
        self, addresses: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], owner: object
    ) -> None:
        self._table = np.stack((addresses, lengths), axis=1)
        self._ends = np.cumsum(lengths)
        self._owner = owner
        self._index = 0
        self.done = 0
        self.total = int(self._ends[-1])

    def send(self, sock: socket.socket) -> int:
        """Hand the kernel what it takes of the rest; returns how many bytes. Raises OSError."""
        return self._move(_libc.writev, sock)

    def receive(self, sock: socket.socket) -> int:
        """Fill what has arrived; returns how many bytes, 0 at the end of the stream. Raises
        OSError."""
        return self._move(_libc.readv, sock)

    def _move(self, call: ctypes._NamedFuncPointer, sock: socket.socket) -> int:
        table, first = self._table, self._index
        last = int(np.searchsorted(self._ends, self.done + _CALL_BYTES))
        last = min(last, first + _IOV_MAX - 1, len(table) - 1)
        # What the call must leave of its last stretch.
        spare = max(0, int(self._ends[last]) - self.done - _CALL_BYTES)
        table[last, 1] -= spare
        address = table.ctypes.data + first * _IOVEC_BYTES
        moved: int = call(sock.fileno(), address, last - first + 1)
        while moved < 0 and ctypes.get_errno() == errno.EINTR:
            moved = call(sock.fileno(), address, last - first + 1)
        table[last, 1] += spare
        if moved < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._advance(moved)
        return moved

    def _advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        self._index = int(np.searchsorted(self._ends, self.done, side="right"))
        if self._index < len(self._table):
            left = self._ends[self._index] - self.done
            self._table[self._index, 0] += self._table[self._index, 1] - left
            self._table[self._index, 1] = left


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

    def outgoing(self, header: bytes, pages: IntArray, block: Block) -> Stretches:
        """A header and the block's bytes, to be sent."""
        if self.staged:
            host = self._host(block)
            host.copy_(self._gather(pages, block).view(-1))
            addresses, lengths, owner = *_whole(host), host
        else:
            addresses, lengths = self._in_place(pages, block)
            owner = self._rows
        head = np.frombuffer(header, dtype=np.uint8)
        return Stretches(
            np.concatenate(([head.ctypes.data], addresses)),
            np.concatenate(([len(head)], lengths)),
            (head, owner),
        )

    def landing(self, pages: IntArray, block: Block) -> Landing:
        """Where the block's bytes go."""
        if self.staged:
            return StagedLanding(self, pages, block, self._host(block))
        return Landing(*self._in_place(pages, block), self._rows)

    def read(self, pages: IntArray, block: Block) -> bytearray:
        """A copy of the block's bytes."""
        return bytearray(self._gather(pages, block).cpu().numpy().tobytes())

    def write(self, slots: IntArray, layer_start: int, layer_stop: int, data: bytes) -> None:
        """Write a block's bytes to slots given one by one; the caller checked that they exist."""
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._scatter(torch.from_numpy(slots.astype(np.int64)), layer_start, layer_stop, rows)

    def store(self, pages: IntArray, block: Block, host: torch.Tensor) -> None:
        """Write a staged block into the pool; returns when it is there."""
        self._scatter(self._slots(pages, block), block.layer_start, block.layer_stop, host)

    def _in_place(
        self, pages: IntArray, block: Block
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Addresses and lengths of the block's stretches."""
        starts, stops = slot_runs(pages, self.page_size, block.token_start, block.token_stop)
        planes = np.arange(2 * block.layer_start, 2 * block.layer_stop) * self.num_slots
        slots = planes[:, None] + starts[None, :]
        lengths = np.tile((stops - starts) * self.width, len(planes))
        return self._rows.data_ptr() + slots.ravel() * self.width, lengths

    def _slots(self, pages: IntArray, block: Block) -> torch.Tensor:
        tokens = np.arange(block.token_start, block.token_stop)
        slots = pages[tokens // self.page_size].astype(np.int64) * self.page_size
        return torch.from_numpy(slots + tokens % self.page_size)

    def _gather(self, pages: IntArray, block: Block) -> torch.Tensor:
        layers = self._rows[block.layer_start : block.layer_stop]
        return layers.index_select(2, self._slots(pages, block).to(self._rows.device))

    def _scatter(
        self, slots: torch.Tensor, layer_start: int, layer_stop: int, data: torch.Tensor
    ) -> None:
        device = self._rows.device
        rows = data.view(layer_stop - layer_start, 2, -1, self.width)
        self._rows[layer_start:layer_stop].index_copy_(2, slots.to(device), rows.to(device))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _host(self, block: Block) -> torch.Tensor:
        pinned = self._rows.device.type == "cuda"
        return torch.empty(block.cells * self.cell_bytes, dtype=torch.uint8, pin_memory=pinned)


class Landing(Stretches):
    """Where one frame's payload goes."""

    def complete(self) -> None:
        """All bytes are here: put them where they belong, if they are not there already."""


class StagedLanding(Landing):
    """A host buffer for one frame on its way to the pool."""

    def __init__(
        self, memory: PoolMemory, pages: IntArray, block: Block, host: torch.Tensor
    ) -> None:
        super().__init__(*_whole(host), host)
        self._memory, self._pages, self._block, self._host = memory, pages, block, host

    def complete(self) -> None:
        self._memory.store(self._pages, self._block, self._host)


def _whole(host: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return np.array([host.data_ptr()]), np.array([host.numel()])
