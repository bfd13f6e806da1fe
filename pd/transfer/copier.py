"""Copies between pool pages and staging buffers, by numpy or by kernels on a side stream.

A buffer holds one block as ``[layers, K then V, tokens, row]`` (or one vector instead of K and V),
without gaps.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from pd.kernels.kv_copy import count_row_bytes, gather_parts, scatter_parts
from pd.kernels.paging import count_needed_pages, find_token_slots, select_table
from pd.transfer.pool_shape import PoolShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.transfer.kv_buffer import IntArray, KVBuffer, KVPlane
    from pd.transfer.ranges import Block


class CopyTicket(Protocol):
    """A copy under way."""

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self) -> None:
        """Wait until the copy no longer reads its source or writes its target. Raises the copy's
        error."""


class _Over:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_OVER = _Over()


class PlaneCopier(ABC):
    """Copies blocks of one plane of a pool; see :class:`Copier`."""

    @abstractmethod
    def gather_block(self, table: Any, block: Block, buffer: Any) -> CopyTicket:
        """Begin to pack a block of the plane."""

    @abstractmethod
    def scatter_block(self, table: Any, block: Block, buffer: Any) -> CopyTicket:
        """Begin to unpack a block of the plane."""


class Copier(ABC):
    """Copies blocks of one pool. One thread gathers and one thread scatters; you may call the other
    methods from any thread.

    Args:
        shape: sizes of the pool.
        planes: a copier for each plane.

    Attributes:
        depth: number of copies worth having under way at once.
    """

    depth = 1

    def __init__(self, shape: PoolShape, planes: Sequence[PlaneCopier]) -> None:
        self.shape, self._planes = shape, planes

    @abstractmethod
    def make_table(self, pages: IntArray, num_tokens: int) -> Any:
        """Convert a sequence's page tables (:meth:`pd.transfer.base.TransferManager.sender`) for
        the other methods, without waiting. Keep the result for as long as copies use it."""

    def make_view(self, buffer: torch.Tensor) -> Any:
        """Convert a buffer, uint8 ``[bytes]``, for the other methods."""
        return buffer

    def gather_block(self, table: Any, block: Block, buffer: Any) -> CopyTicket:
        """Begin to pack a block of the pool into a buffer."""
        return self._planes[self.shape.plane_of(block).index].gather_block(table, block, buffer)

    def scatter_block(self, table: Any, block: Block, buffer: Any) -> CopyTicket:
        """Begin to unpack a buffer into the pool."""
        return self._planes[self.shape.plane_of(block).index].scatter_block(table, block, buffer)

    @abstractmethod
    def make_buffers(self, count: int, size: int, *, on_device: bool) -> torch.Tensor:
        """Make uint8 ``[count, size]``, in host memory unless ``on_device``."""


class HostCopier(Copier):
    """A pool in host memory. Each call copies before it returns."""

    def __init__(self, pool: KVBuffer) -> None:
        planes = [
            HostPlane(plane, pool.layout.page_size)
            if len(plane.parts) == 1 and not plane.copies
            else HostPartsPlane(plane, pool.layout.page_size)
            for plane in pool.planes
        ]
        super().__init__(PoolShape.from_pool(pool), planes)

    def make_table(self, pages: IntArray, num_tokens: int) -> npt.NDArray[np.int64]:
        return pages[..., : count_needed_pages(num_tokens, self.shape.page_size)].astype(np.int64)

    def make_view(self, buffer: torch.Tensor) -> npt.NDArray[np.uint8]:
        return buffer.numpy()

    def make_buffers(self, count: int, size: int, *, on_device: bool) -> torch.Tensor:
        assert not on_device
        # We ask for large pages, because the kernel pins the buffers page by page when it moves
        # them between processes.
        memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(count, size)


class HostPlane(PlaneCopier):
    """A plane in host memory, copied by numpy on the calling thread and without Python's lock.

    It copies whole pages if the block consists of them. Otherwise it copies as many tokens at once
    as divide both block and page.
    """

    def __init__(self, plane: KVPlane, page_size: int) -> None:
        self._page_size, self._first, self._table = page_size, plane.first_layer, plane.table
        self._vectors, self._num_slots = plane.buffer.shape[1:3]
        self._row_bytes = count_row_bytes(plane.buffer)
        self._bytes = plane.buffer.view(-1).view(torch.uint8).numpy()
        self._in_units: dict[int, npt.NDArray[np.void]] = {}

    def gather_block(
        self, table: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> CopyTicket:
        pool, index = self._index_units(table, block)
        # NOTE: we checked the pages, so "clip" changes nothing. Without it numpy would copy through
        # a buffer.
        np.take(pool, index, out=self._view_packed(block, buffer, pool), mode="clip")
        return _OVER

    def scatter_block(
        self, table: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> CopyTicket:
        pool, index = self._index_units(table, block)
        pool[index] = self._view_packed(block, buffer, pool)
        return _OVER

    def _index_units(
        self, pages: npt.NDArray[np.int64], block: Block
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """Return the plane in units of one memory copy each, and the indices of the block's units.
        A unit has as many tokens as divide the block and the pages."""
        size, pages = self._page_size, select_table(pages, self._table)
        unit = math.gcd(block.token_start, block.token_stop, size, self._num_slots)
        if unit == size:
            units = pages[block.token_start // size : block.token_stop // size]
        else:
            tokens = np.arange(block.token_start, block.token_stop, unit)
            units = find_token_slots(pages, tokens, size) // unit
        first, stop = block.layer_start - self._first, block.layer_stop - self._first
        slabs = np.arange(self._vectors * first, self._vectors * stop) * (self._num_slots // unit)
        pool = self._in_units.get(unit)
        if pool is None:
            pool = self._in_units[unit] = self._bytes.view(f"V{unit * self._row_bytes}")
        return pool, (slabs[:, None] + units).ravel()

    def _view_packed(
        self, block: Block, buffer: npt.NDArray[np.uint8], pool: npt.NDArray[np.void]
    ) -> npt.NDArray[np.void]:
        return buffer[: block.cells * self._vectors * self._row_bytes].view(pool.dtype)


class HostPartsPlane(PlaneCopier):
    """A plane in host memory whose heads are divided, or that every rank has. It is copied token by
    token."""

    def __init__(self, plane: KVPlane, page_size: int) -> None:
        self._plane, self._page_size = plane, page_size
        buffer = plane.buffer
        self._cell_bytes = buffer.shape[1] * count_row_bytes(buffer) * len(plane.parts)

    def gather_block(
        self, table: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> CopyTicket:
        gather_parts(
            self._plane.buffer, self._plane.parts, *self._copy_arguments(table, block, buffer)
        )
        return _OVER

    def scatter_block(
        self, table: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> CopyTicket:
        arguments = self._copy_arguments(table, block, buffer)
        for parts in list_targets(self._plane):
            scatter_parts(self._plane.buffer, parts, *arguments)
        return _OVER

    def _copy_arguments(
        self, pages: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> tuple[torch.Tensor, int, int, torch.Tensor]:
        tokens = np.arange(block.token_start, block.token_stop)
        table = select_table(pages, self._plane.table)
        slots = find_token_slots(table, tokens, self._page_size)
        packed = torch.from_numpy(buffer[: block.cells * self._cell_bytes])
        first = self._plane.first_layer
        return torch.from_numpy(slots), block.layer_start - first, block.layer_stop - first, packed


def list_targets(plane: KVPlane) -> list[Sequence[int]]:
    """List the parts to scatter rows into: those of the plane, and of each further copy."""
    return [plane.parts, *plane.copies]
