"""The paged KV pool: one allocation for all planes. :mod:`pd.engine.page_allocator` decides which
page is used for what."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.kernels.digest import digest_bytes, token_digests
from pd.kernels.kv_copy import gather_parts
from pd.kernels.paging import token_slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pd.core.node_info import KVLayout, Plane

    IntArray = npt.NDArray[np.int32]

# Tokens whose KV is gathered from all ranks at a time to be hashed.
_DIGEST_TOKENS = 1024
# Bytes of pages that are copied to or from host memory at a time.
_COPY_BYTES = 64 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(eq=False)
class PoolPlane:
    """One plane of a pool.

    Attributes:
        spec: shape of this rank's part.
        first_layer: number of its first layer through all planes of the pool.
        buffer: contiguous ``[num_layers, vectors, slots, num_heads, head_dim]``, K then V, zeros at
            first. :mod:`pd.kernels.paging` defines in which slot a token lies.
        parts: address of the buffer of each tensor-parallel rank as mapped in this process, in the
            order of their heads. All have the shape of ``buffer``, which is the first. Only rank 0
            has a plane that is not sharded, so that there is one part.
    """

    spec: Plane
    first_layer: int
    buffer: torch.Tensor
    parts: Sequence[int]


class PlaneView:
    """One plane of a pool as attention backends see it
    (:class:`pd.kernels.attention.base.PagedKV`): its layers are numbered from 0."""

    def __init__(self, pool: KVPool, plane: PoolPlane) -> None:
        self.page_size, self.num_pages = pool.page_size, pool.num_pages
        self._pool, self._first = pool, plane.first_layer

    def key(self, layer: int) -> torch.Tensor:
        """See :meth:`KVPool.key`."""
        return self._pool.key(self._first + layer)

    def value(self, layer: int) -> torch.Tensor:
        """See :meth:`KVPool.value`."""
        return self._pool.value(self._first + layer)


class KVPool:
    """The vectors of every cached token, in planes. Layers are numbered through all planes.

    Attributes:
        layout: shape of this pool. On a tensor-parallel rank it is that of the rank's part
            (:meth:`pd.core.node_info.KVLayout.of_rank`).
        memory: uint8 ``[bytes]``, the one allocation in which all planes lie
            (:meth:`pd.core.node_info.KVLayout.extents`).
        planes: in the order of the layout.
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
        """``shared_memory``: descriptor of an empty file that becomes the pool's memory, on a
        CPU."""
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = layout.page_size
        slots = (num_pages + 1) * layout.page_size
        extents = layout.extents(slots)
        size = max(extent.stop for extent in extents)
        if shared_memory is None:
            self.memory = _zeros(size, torch.device(device))
        else:
            self.memory = _zeros_in(shared_memory, size)
        self.planes: list[PoolPlane] = []
        first = 0
        for spec, extent in zip(layout.planes, extents, strict=True):
            shape = (spec.num_layers, spec.vectors, slots, spec.num_heads, spec.head_dim)
            buffer = self.memory[extent.start : extent.stop].view(DTYPES[spec.dtype]).view(shape)
            self.planes.append(PoolPlane(spec, first, buffer, (buffer.data_ptr(),)))
            first += spec.num_layers
        layers = [layer for plane in self.planes for layer in plane.buffer]
        self._keys: list[torch.Tensor] = [layer[0] for layer in layers]
        self._values: list[torch.Tensor] = [layer[-1] for layer in layers]

    @staticmethod
    def page_bytes(layout: KVLayout) -> int:
        """Return the bytes of one page in all layers."""
        return layout.token_bytes * layout.page_size

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's K and V."""
        return self.planes[0].buffer.dtype

    @property
    def sharded_memory(self) -> torch.Tensor:
        """The leading part of ``memory`` that every tensor-parallel rank has."""
        slots = (self.num_pages + 1) * self.page_size
        extents = zip(self.layout.planes, self.layout.extents(slots), strict=True)
        return self.memory[: max(extent.stop for plane, extent in extents if plane.sharded)]

    def set_parts(self, addresses: Sequence[int]) -> None:
        """Take the address of each rank's memory, as mapped in this process; rank 0's is first."""
        for plane in self.planes:
            if plane.spec.sharded:
                offset = plane.buffer.data_ptr() - self.memory.data_ptr()
                plane.parts = [address + offset for address in addresses]

    def key(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, a view ``[slots, num_heads, head_dim]``. In a plane with one
        vector for each token, this is it."""
        return self._keys[layer]

    def value(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, a view ``[slots, num_heads, head_dim]``. In a plane with
        one vector for each token, keys and values are the same."""
        return self._values[layer]

    def view(self, name: str) -> PlaneView:
        """Return a plane by itself, for an attention backend. Raises KeyError if this rank has
        none of this name."""
        for plane in self.planes:
            if plane.spec.name == name:
                return PlaneView(self, plane)
        raise KeyError(name)

    def move_tokens(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copy all vectors of tokens from slots to others; on a GPU this is only queued.

        Args:
            source, to: int64 ``[n]`` on the pool's device; what is read is read before anything is
                written, and of equal ``to`` any is kept.
        """
        for plane in self.planes:
            plane.buffer.index_copy_(2, to, plane.buffer.index_select(2, source))

    def gather_pages(self, pages: IntArray) -> list[torch.Tensor]:
        """Copy pages to host memory.

        Args:
            pages: int32 ``[n]``.

        Returns:
            for each plane ``[num_layers, vectors, n, page_size, num_heads, head_dim]`` on the CPU.
        """
        copies = []
        for paged in self._paged():
            layers, vectors, _, *rest = paged.shape
            host = torch.empty((layers, vectors, len(pages), *rest), dtype=paged.dtype)
            for some in _pieces(paged, len(pages)):
                host[:, :, some] = paged.index_select(2, self._index(pages[some])).cpu()
            copies.append(host)
        return copies

    def scatter_pages(self, pages: IntArray, copies: Sequence[torch.Tensor]) -> None:
        """Copy the result of :meth:`gather_pages` into ``n`` pages, in the same order."""
        for paged, host in zip(self._paged(), copies, strict=True):
            for some in _pieces(paged, len(pages)):
                paged.index_copy_(2, self._index(pages[some]), host[:, :, some].to(self.device))

    def _paged(self) -> Iterator[torch.Tensor]:
        """Views of all planes, ``[num_layers, vectors, pages, page_size, num_heads, head_dim]``."""
        for plane in self.planes:
            layers, vectors, slots, *rest = plane.buffer.shape
            pages = slots // self.page_size
            yield plane.buffer.view(layers, vectors, pages, self.page_size, *rest)

    def digest(self, pages: IntArray, cached: Sequence[int], stop: int) -> bytes:
        """Compute 8 bytes that depend only on the vectors of some tokens of the sequence with this
        page table (see :mod:`pd.kernels.digest`): in planes of group ``g`` of tokens
        ``[cached[g], stop)``."""
        digests = [np.empty(0, np.int64)]
        for plane in self.planes:
            start = cached[plane.spec.group]
            slots = token_slots(pages, np.arange(start, stop), self.page_size)
            if len(plane.parts) == 1:
                digests.append(
                    token_digests(plane.buffer, slots, start, first_layer=plane.first_layer)
                )
            else:
                digests += self._digests_of_parts(plane, slots, start)
        return digest_bytes(np.concatenate(digests))

    def _digests_of_parts(
        self, plane: PoolPlane, slots: npt.NDArray[np.int64], start: int
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Digests of tokens from ``start`` on in a plane whose heads are divided."""
        layers, vectors, _, heads, head_dim = plane.buffer.shape
        for first in range(0, len(slots), _DIGEST_TOKENS):
            some = torch.from_numpy(slots[first : first + _DIGEST_TOKENS]).to(self.device)
            shape = (layers, vectors, len(some), heads * len(plane.parts), head_dim)
            whole = plane.buffer.new_empty(shape)
            gather_parts(plane.buffer, plane.parts, some, 0, layers, whole)
            yield token_digests(
                whole, np.arange(len(some)), start + first, first_layer=plane.first_layer
            )

    def _index(self, pages: IntArray) -> torch.Tensor:
        return torch.from_numpy(pages.astype("int64")).to(self.device)


def _pieces(paged: torch.Tensor, count: int) -> Iterator[slice]:
    """Divide a list of pages into parts so small that a GPU full of KV has memory for a copy of
    one."""
    some = max(1, _COPY_BYTES // (paged.nbytes // paged.shape[2]))
    return (slice(first, first + some) for first in range(0, count, some))


def _zeros_in(file: int, size: int) -> torch.Tensor:
    os.ftruncate(file, size)
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    # NOTE: torch.zeros writes every byte, seconds for gigabytes that may never be used; the kernel
    # maps these pages, zeroed, when they are first touched.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, size, flags=private), dtype=torch.uint8)
