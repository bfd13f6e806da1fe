"""The paged KV pool: one tensor for all layers. :mod:`pd.engine.page_allocator` decides which page
is used for what."""

from __future__ import annotations

import math
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.digest import digest_bytes, token_digests
from pd.kernels.kv_copy import gather_parts
from pd.kernels.paging import token_slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pd.core.node_info import KVLayout

    IntArray = npt.NDArray[np.int32]

# Tokens whose KV is gathered from all ranks at a time to be hashed.
_DIGEST_TOKENS = 1024
# Bytes of pages that are copied to or from host memory at a time.
_COPY_BYTES = 64 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVPool:
    """Keys and values of every cached token.

    Attributes:
        buffer: contiguous ``[num_layers, 2, slots, num_kv_heads, head_dim]``, K then V, zeros at
            first. :mod:`pd.kernels.paging` defines in which slot a token lies.
        parts: address of the buffer of each tensor-parallel rank as mapped in this process, in the
            order of their heads. All have the shape of ``buffer``, which is the first.
        num_pages: pages for callers. Page ``num_pages``, one more at the end, receives the writes
            of padding and is never read.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device | str,
        shared_memory: int | None = None,
    ) -> None:
        """``shared_memory``: descriptor of an empty file that becomes the buffer's memory, on a
        CPU."""
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = layout.page_size
        slots = (num_pages + 1) * layout.page_size
        shape = (layout.num_layers, 2, slots, layout.num_kv_heads, layout.head_dim)
        dtype = DTYPES[layout.dtype]
        if shared_memory is None:
            self.buffer = _zeros(shape, dtype, torch.device(device))
        else:
            self.buffer = _zeros_in(shared_memory, shape, dtype)
        self.parts: Sequence[int] = (self.buffer.data_ptr(),)
        self._keys: list[torch.Tensor] = [layer[0] for layer in self.buffer]
        self._values: list[torch.Tensor] = [layer[1] for layer in self.buffer]

    @staticmethod
    def page_bytes(layout: KVLayout) -> int:
        """Return the bytes of one page in all layers."""
        return layout.token_bytes * layout.page_size

    def key(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, a view ``[slots, num_kv_heads, head_dim]``."""
        return self._keys[layer]

    def value(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, a view ``[slots, num_kv_heads, head_dim]``."""
        return self._values[layer]

    def gather_pages(self, pages: IntArray) -> torch.Tensor:
        """Copy pages to host memory.

        Args:
            pages: int32 ``[n]``.

        Returns:
            ``[num_layers, 2, n, page_size, num_kv_heads, head_dim]`` on the CPU.
        """
        layers, two, _, *rest = self._paged.shape
        host = torch.empty((layers, two, len(pages), *rest), dtype=self.buffer.dtype)
        for some in self._pieces(len(pages)):
            host[:, :, some] = self._paged.index_select(2, self._index(pages[some])).cpu()
        return host

    def scatter_pages(self, pages: IntArray, host: torch.Tensor) -> None:
        """Copy the result of :meth:`gather_pages` into ``n`` pages, in the same order."""
        for some in self._pieces(len(pages)):
            device = self.buffer.device
            self._paged.index_copy_(2, self._index(pages[some]), host[:, :, some].to(device))

    def _pieces(self, count: int) -> Iterator[slice]:
        """Divide a list of pages into parts so small that a GPU full of KV has memory for a copy of
        one."""
        some = max(1, _COPY_BYTES // (self.buffer.nbytes // self.buffer.shape[2] * self.page_size))
        return (slice(first, first + some) for first in range(0, count, some))

    @property
    def _paged(self) -> torch.Tensor:
        layers, two, slots, *rest = self.buffer.shape
        return self.buffer.view(layers, two, slots // self.page_size, self.page_size, *rest)

    def digest(self, pages: IntArray, start: int, stop: int) -> bytes:
        """Compute 8 bytes that depend only on the K and V of tokens ``[start, stop)`` of the
        sequence with this page table (see :mod:`pd.kernels.digest`)."""
        slots = token_slots(pages, np.arange(start, stop), self.page_size)
        if len(self.parts) == 1:
            return digest_bytes(token_digests(self.buffer, slots, start))
        digests = []
        layers, _, _, heads, head_dim = self.buffer.shape
        for first in range(0, len(slots), _DIGEST_TOKENS):
            some = torch.from_numpy(slots[first : first + _DIGEST_TOKENS]).to(self.buffer.device)
            shape = (layers, 2, len(some), heads * len(self.parts), head_dim)
            whole = self.buffer.new_empty(shape)
            gather_parts(self.buffer, self.parts, some, 0, layers, whole)
            digests.append(token_digests(whole, np.arange(len(some)), start + first))
        return digest_bytes(np.concatenate([*digests, np.empty(0, np.int64)]))

    def _index(self, pages: IntArray) -> torch.Tensor:
        return torch.from_numpy(pages.astype("int64")).to(self.buffer.device)


def _zeros_in(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    os.ftruncate(file, size)
    return torch.frombuffer(mmap.mmap(file, size), dtype=dtype).view(shape)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NOTE: torch.zeros writes every byte, seconds for gigabytes that may never be used; the kernel
    # maps these pages, zeroed, when they are first touched.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
