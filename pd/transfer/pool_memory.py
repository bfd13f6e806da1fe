"""The pool's bytes as sockets see them."""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd.kernels.kv_copy import count_row_bytes
from pd.kernels.paging import find_token_slots, select_table
from pd.transfer.pool_shape import PoolShape
from pd.transfer.ranges import find_slot_runs

if TYPE_CHECKING:
    import socket

    from pd.transfer.kv_buffer import IntArray, KVBuffer, KVPlane
    from pd.transfer.ranges import Block

# Linux takes at most this many stretches in one system call.
_IOV_MAX = 1024
_IOVEC_BYTES = 16
# More at once is slower, because the peer's bytes have left the cache when we copy them on.
CALL_BYTES = 512 << 10
# A room remembers the places of so many stretches, which takes a few megabytes at most.
_PLANNED_STRETCHES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.readv, _libc.writev):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


class Stretches:
    """Stretches of memory to send or fill in order, and the position reached.

    They go to the kernel as a table of addresses that numpy computed. ``socket.sendmsg`` and
    ``recvmsg_into`` would need a Python object for each stretch in each call.

    Args:
        addresses, lengths: int64, one for each stretch. No length is 0.
        owner: owner of the memory, kept alive as long as this object.
        ends: cumulative sums of the lengths, if known.
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
        # The memory of _table as plain integers, because they are faster to read and write than
        # numpy's.
        self._cells = memoryview(self._table.data).cast("B").cast("q")
        self._address = self._table.ctypes.data
        self._ends: list[int] = np.cumsum(lengths).tolist() if ends is None else ends
        self._owner = owner
        self._index = 0
        self.done = 0
        self.total = self._ends[-1]

    def send_to(self, sock: socket.socket) -> int:
        """Let the kernel send as much of the rest as it takes, and return that number of bytes.
        Raises OSError."""
        return self._move_bytes(_libc.writev, sock)

    def receive_from(self, sock: socket.socket) -> int:
        """Fill the stretches with arrived bytes, and return their number, or 0 at the end of the
        stream. Raises OSError."""
        return self._move_bytes(_libc.readv, sock)

    def _move_bytes(self, call: ctypes._NamedFuncPointer, sock: socket.socket) -> int:
        ends, cells, first = self._ends, self._cells, self._index
        limit = self.done + CALL_BYTES
        last = min(bisect_left(ends, limit, first), first + _IOV_MAX - 1, len(ends) - 1)
        # Bytes of the last stretch that this call must leave.
        spare = max(0, ends[last] - limit)
        cells[2 * last + 1] -= spare
        address, count = self._address + first * _IOVEC_BYTES, last - first + 1
        moved: int = call(sock.fileno(), address, count)
        while moved < 0 and ctypes.get_errno() == errno.EINTR:
            moved = call(sock.fileno(), address, count)
        cells[2 * last + 1] += spare
        if moved < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.done += moved
        index = self._index = bisect_right(ends, self.done, first)
        if index < len(ends):
            left = ends[index] - self.done
            cells[2 * index] += cells[2 * index + 1] - left
            cells[2 * index + 1] = left
        return moved


class PlaneMemory:
    """The bytes of one plane.

    Attributes:
        vectors: vectors of one token in one layer.
        width: bytes of one vector, with all heads.
        table: number of the page table of its tokens.
        num_slots: slots of a layer.
    """

    def __init__(self, plane: KVPlane) -> None:
        buffer = plane.buffer
        num_layers, self.vectors, self.num_slots = buffer.shape[:3]
        width = count_row_bytes(buffer)
        self.width, self.table = width * len(plane.parts), plane.table
        flat = buffer.view(-1).view(torch.uint8)
        self._rows = flat.view(num_layers, self.vectors, self.num_slots, width)
        self._layer_bytes = self.vectors * self.num_slots * self.width
        self._first = plane.first_layer
        self._address = buffer.data_ptr() - self._first * self._layer_bytes

    def layer_address(self, layer: int) -> int:
        """Return the address of a layer's first vectors."""
        return self._address + layer * self._layer_bytes

    def view_layers(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of some layers, uint8 ``[layers, vectors, slots, width]``."""
        return self._rows[start - self._first : stop - self._first]


class PoolMemory:
    """Blocks of a pool in the order in which they travel: for each layer the tokens' K, then their
    V (or one vector of each token).

    Sockets use a pool in host memory in place (:class:`InPlace`). A pool on a GPU, or one with
    divided or copied planes, is ``staged``: sockets reach it through
    :mod:`pd.transfer.tcp.host_buffers`.
    """

    def __init__(self, pool: KVBuffer, *, staged: bool | None = None) -> None:
        self.pool = pool
        self.shape = PoolShape.from_pool(pool)
        whole = all(len(plane.parts) == 1 and not plane.copies for plane in pool.planes)
        in_place = pool.memory.device.type == "cpu" and whole
        self.staged = not in_place if staged is None else staged
        self._planes = [PlaneMemory(plane) for plane in pool.planes]

    def plane_of(self, block: Block) -> PlaneMemory:
        """Return the plane of a block."""
        return self._planes[self.shape.plane_of(block).index]

    def read_block(self, pages: IntArray, block: Block) -> bytearray:
        """Return a copy of the block's bytes."""
        layers = self.plane_of(block).view_layers(block.layer_start, block.layer_stop)
        tokens = np.arange(block.token_start, block.token_stop)
        table = select_table(pages, self.shape.plane_of(block).table)
        slots = find_token_slots(table, tokens, self.shape.page_size)
        index = torch.from_numpy(slots).to(layers.device)
        return bytearray(layers.index_select(2, index).cpu().numpy().tobytes())

    def write_block(self, slots: IntArray, block: Block, data: bytes) -> None:
        """Write a block's bytes to the slots of its tokens, and wait until they are there. The
        caller must have checked the slots."""
        layers = self.plane_of(block).view_layers(block.layer_start, block.layer_stop)
        device = layers.device
        index = torch.from_numpy(slots.astype(np.int64)).to(device)
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = rows.view(*layers.shape[:2], -1, layers.shape[3])
        layers.index_copy_(2, index, rows.to(device))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class _Plan(NamedTuple):
    """Some tokens in any layers of a plane: offsets from the first layer's first vectors, lengths,
    and cumulative sums of the lengths."""

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    ends: list[int]


class InPlace:
    """A room's blocks as they lie in the pool, each after a header of ``header_bytes`` bytes."""

    def __init__(self, memory: PoolMemory, pages: IntArray, header_bytes: int = 0) -> None:
        self._memory, self._pages, self._header_bytes = memory, pages, header_bytes
        # Blocks of the same tokens look alike in all layers of a plane, so they share a plan.
        self._plans: dict[tuple[PlaneMemory, int, int, int], _Plan] = {}
        self._planned = 0

    def locate_block(self, block: Block, header: bytes = b"") -> Stretches:
        """Return the stretches of a block, after a header if there is one."""
        memory = self._memory
        plane = memory.plane_of(block)
        num_layers = block.layer_stop - block.layer_start
        key = (plane, block.token_start, block.token_stop, num_layers)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(plane, block.token_start, block.token_stop, num_layers)
            if self._planned < _PLANNED_STRETCHES:
                self._plans[key] = plan
                self._planned += len(plan.ends)
        offsets, lengths, ends = plan
        addresses = offsets + plane.layer_address(block.layer_start)
        if not header:
            return Stretches(addresses, lengths, memory, ends)
        head = np.frombuffer(header, dtype=np.uint8)
        addresses[0] = head.ctypes.data
        return Stretches(addresses, lengths, (memory, head), ends)

    def _make_plan(
        self, plane: PlaneMemory, token_start: int, token_stop: int, num_layers: int
    ) -> _Plan:
        page_size = self._memory.shape.page_size
        table = select_table(self._pages, plane.table)
        starts, stops = find_slot_runs(table, page_size, token_start, token_stop)
        slabs = np.arange(plane.vectors * num_layers) * plane.num_slots
        offsets = (slabs[:, None] + starts[None, :]).ravel() * plane.width
        lengths = np.tile((stops - starts) * plane.width, len(slabs))
        if self._header_bytes:
            offsets = np.concatenate(([0], offsets))
            lengths = np.concatenate(([self._header_bytes], lengths))
        return _Plan(offsets, lengths, np.cumsum(lengths).tolist())


def wrap_buffer(host: torch.Tensor, header: bytes = b"") -> Stretches:
    """Return the stretches of a whole host buffer (uint8, contiguous), after a header if there is
    one."""
    addresses, lengths = np.array([host.data_ptr()]), np.array([host.numel()])
    if not header:
        return Stretches(addresses, lengths, host)
    head = np.frombuffer(header, dtype=np.uint8)
    return Stretches(
        np.concatenate(([head.ctypes.data], addresses)),
        np.concatenate(([len(head)], lengths)),
        (head, host),
    )
