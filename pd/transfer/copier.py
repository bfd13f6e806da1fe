"""Copies between pool pages and staging buffers, by numpy or by kernels on a side stream.

A buffer holds one block as ``[layers, K then V, tokens, row]``, without gaps.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from pd.kernels.kv_copy import gather_parts, row_bytes, scatter_parts
from pd.kernels.paging import page_count, token_slots

if TYPE_CHECKING:
    import numpy.typing as npt

    from pd.transfer.base import IntArray, KVBuffer
    from pd.transfer.ranges import Block


class CopyTicket(Protocol):
    """A copy that was begun."""

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self) -> None:
        """Block until the copy is over; afterwards nothing reads its source or writes its target.
        Raises whatever went wrong."""


class _Over:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_OVER = _Over()


class Copier(ABC):
    """Copies blocks of one pool. Gathers come from one thread and scatters from one thread; the
    other methods may be called from any.

    Attributes:
        cell_bytes: K and V of one token in one layer.
        depth: copies worth having under way at once.
    """

    depth = 1

    def __init__(self, pool: KVBuffer) -> None:
        buffer = pool.buffer
        if not buffer.is_contiguous() or buffer.dim() != 5:
            raise ValueError(f"a pool is one contiguous 5-D tensor, not {tuple(buffer.shape)}")
        self.num_layers, self.num_slots = buffer.shape[0], buffer.shape[2]
        self.page_size = pool.layout.page_size
        self.row_bytes = row_bytes(buffer) * len(pool.parts)
        self.cell_bytes = 2 * self.row_bytes

    @abstractmethod
    def table(self, pages: IntArray, num_tokens: int) -> Any:
        """A sequence's page table in the form that the other methods want; does not wait. Must
        outlive the copies that use it."""

    def view(self, buffer: torch.Tensor) -> Any:
        """A buffer, uint8 ``[bytes]``, in the form that the other methods want."""
        return buffer

    @abstractmethod
    def gather(self, table: Any, block: Block, buffer: Any) -> CopyTicket:
        """Begin to pack a block, which is in the pool, into a buffer."""

    @abstractmethod
    def scatter(self, table: Any, block: Block, buffer: Any) -> CopyTicket:
        """Begin to unpack a buffer into the pool."""

    @abstractmethod
    def make_buffers(self, count: int, size: int, *, on_device: bool) -> torch.Tensor:
        """uint8 ``[count, size]``; in host memory unless ``on_device``."""


def copier_for(pool: KVBuffer) -> Copier:
    if pool.buffer.device.type == "cpu":
        return HostCopier(pool) if len(pool.parts) == 1 else HostPartsCopier(pool)
    from pd.transfer.copier_cuda import CudaCopier

    return CudaCopier(pool)


class HostCopier(Copier):
    """A pool in host memory: each call copies before it returns.

    With numpy: on the calling thread, without Python's lock, one copy of memory for each page
    or, where a block does not consist of whole pages, for as many tokens as divide both.
    """

    def __init__(self, pool: KVBuffer) -> None:
        super().__init__(pool)
        self._bytes = pool.buffer.view(-1).view(torch.uint8).numpy()
        self._in_units: dict[int, npt.NDArray[np.void]] = {}

    def table(self, pages: IntArray, num_tokens: int) -> npt.NDArray[np.int64]:
        return pages[: page_count(num_tokens, self.page_size)].astype(np.int64)

    def view(self, buffer: torch.Tensor) -> npt.NDArray[np.uint8]:
        return buffer.numpy()

    def gather(
        self, table: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> CopyTicket:
        pool, index = self._units(table, block)
        # NOTE: the pages were checked; without "clip" numpy would copy by way of a buffer.
        np.take(pool, index, out=self._packed(block, buffer, pool), mode="clip")
        return _OVER

    def scatter(
        self, table: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> CopyTicket:
        pool, index = self._units(table, block)
        pool[index] = self._packed(block, buffer, pool)
        return _OVER

    def make_buffers(self, count: int, size: int, *, on_device: bool) -> torch.Tensor:
        assert not on_device
        # Large pages: the kernel, which moves buffers between processes, pins them page by page.
        memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(count, size)

    def _units(
        self, pages: npt.NDArray[np.int64], block: Block
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """The pool in units of as many tokens as divide the block and the pages, each one memory
        copy, and which of them make up the block."""
        size = self.page_size
        unit = math.gcd(block.token_start, block.token_stop, size, self.num_slots)
        if unit == size:
            units = pages[block.token_start // size : block.token_stop // size]
        else:
            tokens = np.arange(block.token_start, block.token_stop, unit)
            units = token_slots(pages, tokens, size) // unit
        planes = np.arange(2 * block.layer_start, 2 * block.layer_stop) * (self.num_slots // unit)
        pool = self._in_units.get(unit)
        if pool is None:
            pool = self._in_units[unit] = self._bytes.view(f"V{unit * self.row_bytes}")
        return pool, (planes[:, None] + units).ravel()

    def _packed(
        self, block: Block, buffer: npt.NDArray[np.uint8], pool: npt.NDArray[np.void]
    ) -> npt.NDArray[np.void]:
        return buffer[: block.cells * self.cell_bytes].view(pool.dtype)


class HostPartsCopier(HostCopier):
    """Pools in host memory that divide the heads, token by token."""

    def __init__(self, pool: KVBuffer) -> None:
        super().__init__(pool)
        self._pool = pool

    def gather(
        self, table: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> CopyTicket:
        gather_parts(self._pool.buffer, self._pool.parts, *self._arguments(table, block, buffer))
        return _OVER

    def scatter(
        self, table: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> CopyTicket:
        scatter_parts(self._pool.buffer, self._pool.parts, *self._arguments(table, block, buffer))
        return _OVER

    def _arguments(
        self, pages: npt.NDArray[np.int64], block: Block, buffer: npt.NDArray[np.uint8]
    ) -> tuple[torch.Tensor, int, int, torch.Tensor]:
        tokens = np.arange(block.token_start, block.token_stop)
        slots = token_slots(pages, tokens, self.page_size)
        packed = torch.from_numpy(buffer[: block.cells * self.cell_bytes])
        return torch.from_numpy(slots), block.layer_start, block.layer_stop, packed
