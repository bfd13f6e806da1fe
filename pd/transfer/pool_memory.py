"""The pool's bytes as the sockets see them."""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd.kernels.paging import token_slots
from pd.transfer.ranges import slot_runs

if TYPE_CHECKING:
    import socket

    from pd.transfer.base import IntArray, KVBuffer
    from pd.transfer.ranges import Block

# Linux takes at most this many stretches in one system call.
_IOV_MAX = 1024
_IOVEC_BYTES = 16
# More at once is slower: what the peer's kernel wrote is then no longer in the cache when it is
# copied on.
CALL_BYTES = 512 << 10
# Stretches that a room remembers the places of, a few megabytes at most.
_PLANNED_STRETCHES = 1 << 16

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
        ends: sums of the lengths, if they are known.
    """

    def __init__(
        self,
        addresses: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        owner: object,
        ends: list[int] | None = None,
    ) -> None:
        self._table = np.empty((len(addresses), 2), dtype=np.int64)
        self._table[:, 0], self._table[:, 1] = addresses, lengths
        # The same memory: plain integers are quicker to read and write than numpy's.
        self._cells = memoryview(self._table.data).cast("B").cast("q")
        self._address = self._table.ctypes.data
        self._ends: list[int] = np.cumsum(lengths).tolist() if ends is None else ends
        self._owner = owner
        self._index = 0
        self.done = 0
        self.total = self._ends[-1]

    def send(self, sock: socket.socket) -> int:
        """Hand the kernel what it takes of the rest; returns how many bytes. Raises OSError."""
        return self._move(_libc.writev, sock)

    def receive(self, sock: socket.socket) -> int:
        """Fill what has arrived; returns how many bytes, 0 at the end of the stream. Raises
        OSError."""
        return self._move(_libc.readv, sock)

    def _move(self, call: ctypes._NamedFuncPointer, sock: socket.socket) -> int:
        ends, cells, first = self._ends, self._cells, self._index
        limit = self.done + CALL_BYTES
        last = min(bisect_left(ends, limit, first), first + _IOV_MAX - 1, len(ends) - 1)
        # What the call must leave of its last stretch.
        spare = max(0, ends[last] - limit)
        cells[2 * last + 1] -= spare
        address, count = self._address + first * _IOVEC_BYTES, last - first + 1
        moved: int = call(sock.fileno(), address, count)
        while moved < 0 and ctypes.get_errno() == errno.EINTR:
            moved = call(sock.fileno(), address, count)
        cells[2 * last + 1] += spare
        if moved < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._advance(moved)
        return moved

    def _advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        index = self._index = bisect_right(self._ends, self.done, self._index)
        if index < len(self._ends):
            left = self._ends[index] - self.done
            self._cells[2 * index] += self._cells[2 * index + 1] - left
            self._cells[2 * index + 1] = left


class PoolMemory:
    """Blocks of a pool, in the order in which they travel: for each layer the tokens' K, then their
    V.

    Sockets use a pool in host memory in place (:class:`InPlace`). Any other, and one whose heads
    are divided (``staged``), they reach by way of :mod:`pd.transfer.tcp.host_buffers`.
    """

    def __init__(self, pool: KVBuffer, *, staged: bool | None = None) -> None:
        buffer = pool.buffer
        if not buffer.is_contiguous() or buffer.dim() != 5:
            raise ValueError(f"a pool is one contiguous 5-D tensor, not {tuple(buffer.shape)}")
        self.pool = pool
        self.num_layers = buffer.shape[0]
        self.num_slots = buffer.shape[2]
        self.page_size = pool.layout.page_size
        # Bytes of K or V of one token in one layer.
        width = buffer.shape[3] * buffer.shape[4] * buffer.element_size()
        self.width = width * len(pool.parts)
        self.cell_bytes = 2 * self.width
        in_place = buffer.device.type == "cpu" and len(pool.parts) == 1
        self.staged = not in_place if staged is None else staged
        flat = buffer.view(-1).view(torch.uint8)
        self._rows = flat.view(self.num_layers, 2, self.num_slots, width)
        self._address = buffer.data_ptr()
        self._layer_bytes = self.num_slots * self.cell_bytes

    def layer_address(self, layer: int) -> int:
        """Address at which a layer's K begins."""
        return self._address + layer * self._layer_bytes

    def read(self, pages: IntArray, block: Block) -> bytearray:
        """A copy of the block's bytes."""
        layers = self._rows[block.layer_start : block.layer_stop]
        tokens = np.arange(block.token_start, block.token_stop)
        slots = token_slots(pages, tokens, self.page_size)
        index = torch.from_numpy(slots).to(self._rows.device)
        return bytearray(layers.index_select(2, index).cpu().numpy().tobytes())

    def write(self, slots: IntArray, layer_start: int, layer_stop: int, data: bytes) -> None:
        """Write a block's bytes to slots given one by one; the caller checked that they exist.
        Returns when they are there."""
        device = self._rows.device
        index = torch.from_numpy(slots.astype(np.int64)).to(device)
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = rows.view(layer_stop - layer_start, 2, -1, self.width)
        self._rows[layer_start:layer_stop].index_copy_(2, index, rows.to(device))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class _Plan(NamedTuple):
    """Some tokens of any layers: offsets from the first layer's K, lengths and their sums."""

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    ends: list[int]


class InPlace:
    """A room's blocks where they lie in the pool, each after a header if it has a length."""

    def __init__(self, memory: PoolMemory, pages: IntArray, header_bytes: int = 0) -> None:
        self._memory, self._pages, self._header_bytes = memory, pages, header_bytes
        # All layers' blocks of the same tokens look alike.
        self._plans: dict[tuple[int, int, int], _Plan] = {}
        self._planned = 0

    def stretches(self, block: Block, header: bytes = b"") -> Stretches:
        memory = self._memory
        offsets, lengths, ends = self._plan(block)
        addresses = offsets + memory.layer_address(block.layer_start)
        if not header:
            return Stretches(addresses, lengths, memory, ends)
        head = np.frombuffer(header, dtype=np.uint8)
        addresses[0] = head.ctypes.data
        return Stretches(addresses, lengths, (memory, head), ends)

    def _plan(self, block: Block) -> _Plan:
        num_layers = block.layer_stop - block.layer_start
        key = (block.token_start, block.token_stop, num_layers)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(block.token_start, block.token_stop, num_layers)
            if self._planned < _PLANNED_STRETCHES:
                self._plans[key] = plan
                self._planned += len(plan.ends)
        return plan

    def _make(self, token_start: int, token_stop: int, num_layers: int) -> _Plan:
        memory = self._memory
        starts, stops = slot_runs(self._pages, memory.page_size, token_start, token_stop)
        planes = np.arange(2 * num_layers) * memory.num_slots
        offsets = (planes[:, None] + starts[None, :]).ravel() * memory.width
        lengths = np.tile((stops - starts) * memory.width, len(planes))
        if self._header_bytes:
            offsets = np.concatenate(([0], offsets))
            lengths = np.concatenate(([self._header_bytes], lengths))
        return _Plan(offsets, lengths, np.cumsum(lengths).tolist())


def in_buffer(host: torch.Tensor, header: bytes = b"") -> Stretches:
    """Stretches of a whole host buffer (uint8, contiguous), after a header if there is one."""
    addresses, lengths = np.array([host.data_ptr()]), np.array([host.numel()])
    if not header:
        return Stretches(addresses, lengths, host)
    head = np.frombuffer(header, dtype=np.uint8)
    return Stretches(
        np.concatenate(([head.ctypes.data], addresses)),
        np.concatenate(([len(head)], lengths)),
        (head, host),
    )
