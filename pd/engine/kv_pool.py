"""The paged KV pool: one allocation for all planes. :mod:`pd.engine.page_allocator` decides how
each page is used."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.engine.page_allocator import NO_PAGE
from pd.kernels.digest import hash_tokens, sum_digests
from pd.kernels.fp8 import FP8
from pd.kernels.kv_copy import gather_parts
from pd.kernels.kv_store import KVScales
from pd.kernels.paging import find_token_slots, select_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pd.core.node_info import KVLayout, Plane

    IntArray = npt.NDArray[np.int32]

# Number of tokens to gather from all ranks and hash at a time.
_DIGEST_TOKENS = 1024
# Bytes of pages to copy to or from host memory at a time.
_COPY_BYTES = 64 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(eq=False)
class PoolPlane:
    """One plane of a pool.

    Attributes:
        spec: shape of this rank's part.
        first_layer: number of its first layer among the layers of all planes.
        table: number of the page table that says where its tokens are.
        buffer: contiguous ``[num_layers, vectors, slots, num_heads, head_dim]``, K then V, zero at
            first. :mod:`pd.kernels.paging` defines the slot of each token. Vectors in fp8 are
            bytes here, because torch has few operations for fp8.
        parts: address of each tensor-parallel rank's buffer as mapped in this process, in the order
            of their heads. All have the shape of ``buffer``, which comes first. A plane whose heads
            are not divided has one part.
        copies: further ranks' parts with the same content. Each has the form of ``parts``.
    """

    spec: Plane
    first_layer: int
    buffer: torch.Tensor
    parts: Sequence[int]
    copies: Sequence[Sequence[int]] = ()
    table: int = 0


class PlaneView:
    """One plane of a pool in the form that attention backends expect
    (:class:`pd.kernels.attention.base.PagedKV`): its layers start at 0."""

    def __init__(self, pool: KVPool, plane: PoolPlane) -> None:
        self.page_size, self.num_pages = pool.page_size, pool.num_pages
        self.dtype = DTYPES[plane.spec.dtype]
        self._pool, self._first = pool, plane.first_layer

    def get_keys(self, layer: int) -> torch.Tensor:
        """See :meth:`KVPool.get_keys`."""
        return self._pool.get_keys(self._first + layer)

    def get_values(self, layer: int) -> torch.Tensor:
        """See :meth:`KVPool.get_values`."""
        return self._pool.get_values(self._first + layer)

    def get_scales(self, layer: int) -> KVScales:
        """See :meth:`KVPool.get_scales`."""
        return self._pool.get_scales(self._first + layer)


class LayerOrder:
    """The layers of a model in its own order, in a pool that orders them by planes
    (:class:`pd.kernels.attention.base.PagedKV`)."""

    def __init__(self, pool: KVPool, pool_layers: Sequence[int]) -> None:
        """``pool_layers``: number in the pool of each layer."""
        self.page_size, self.num_pages = pool.page_size, pool.num_pages
        self.dtype = pool.dtype
        self._pool, self._layers = pool, pool_layers

    def get_keys(self, layer: int) -> torch.Tensor:
        """See :meth:`KVPool.get_keys`."""
        return self._pool.get_keys(self._layers[layer])

    def get_values(self, layer: int) -> torch.Tensor:
        """See :meth:`KVPool.get_values`."""
        return self._pool.get_values(self._layers[layer])

    def get_scales(self, layer: int) -> KVScales:
        """See :meth:`KVPool.get_scales`."""
        return self._pool.get_scales(self._layers[layer])


class KVPool:
    """The vectors of all cached tokens, in planes. Layer numbers run through all planes.

    Attributes:
        layout: shape of this pool. On a tensor-parallel rank it is the shape of the rank's part
            (:meth:`pd.core.node_info.KVLayout.of_rank`).
        memory: uint8 ``[bytes]``, the single allocation that holds all planes
            (:meth:`pd.core.node_info.KVLayout.extents`).
        planes: in the order of the layout.
        num_pages: pages that callers may use. One more page at the end, number ``num_pages``,
            receives the writes of padding and is never read.
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
        extents = layout.plane_extents(slots)
        size = max(extent.stop for extent in extents)
        if shared_memory is None:
            self.memory = _allocate_zeros(size, torch.device(device))
        else:
            os.ftruncate(shared_memory, size)
            self.memory = torch.frombuffer(mmap.mmap(shared_memory, size), dtype=torch.uint8)
        self.planes: list[PoolPlane] = []
        first = 0
        for spec, extent in zip(layout.planes, extents, strict=True):
            shape = (spec.num_layers, spec.vectors, slots, spec.num_heads, spec.head_dim)
            dtype = DTYPES[spec.dtype] if spec.scales is None else torch.uint8
            buffer = self.memory[extent.start : extent.stop].view(dtype).view(shape)
            table = layout.find_table(spec)
            self.planes.append(PoolPlane(spec, first, buffer, (buffer.data_ptr(),), table=table))
            first += spec.num_layers
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._scales: list[KVScales] = []
        for plane in self.planes:
            for layer, vectors in enumerate(plane.buffer):
                stored = vectors if plane.spec.scales is None else vectors.view(FP8)
                self._keys.append(stored[0])
                self._values.append(stored[-1])
                scales = plane.spec.get_scales(layer)
                self._scales.append(KVScales(scales[0], scales[-1]))

    @staticmethod
    def count_page_bytes(layout: KVLayout) -> int:
        """Return the bytes of one page of the pool."""
        return layout.slot_bytes * layout.page_size

    @staticmethod
    def count_held_bytes(layout: KVLayout, pages: IntArray) -> int:
        """Return the bytes of a sequence's pages in all layers, see :meth:`gather_pages`."""
        held = np.count_nonzero(np.atleast_2d(pages) != NO_PAGE, axis=1)
        tables = ((plane, held[layout.find_table(plane)]) for plane in layout.planes)
        return sum(int(count) * plane.token_bytes for plane, count in tables) * layout.page_size

    def repeat_table(self, pages: IntArray) -> IntArray:
        """Use one page table, int32 ``[n]``, for all tables of a sequence whose KV nobody needs."""
        tables = self.layout.num_tables
        return pages if tables == 1 else np.stack([pages] * tables)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's K and V before the pool stores them."""
        return DTYPES[self.layout.model.dtype]

    @property
    def common_memory(self) -> torch.Tensor:
        """The leading part of ``memory``, which every tensor-parallel rank has."""
        slots = (self.num_pages + 1) * self.page_size
        extents = zip(self.layout.planes, self.layout.plane_extents(slots), strict=True)
        return self.memory[: max(x.stop for plane, x in extents if plane.ranks != "first")]

    def set_parts(self, addresses: Sequence[int], layout: KVLayout) -> None:
        """Set the address of each rank's memory as mapped in this process, rank 0 first.

        Args:
            layout: that of all ranks together.
        """
        whole = {plane.name: plane.num_heads for plane in layout.planes}
        for plane in self.planes:
            spec, offset = plane.spec, plane.buffer.data_ptr() - self.memory.data_ptr()
            mine = [address + offset for address in addresses]
            if spec.ranks == "divided":
                replicas = spec.num_heads * len(addresses) // whole[spec.name]
                plane.parts, *plane.copies = (mine[first::replicas] for first in range(replicas))
            elif spec.ranks == "copied":
                plane.copies = [[address] for address in mine[1:]]

    def get_keys(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, a view ``[slots, num_heads, head_dim]``. If the plane has one
        vector per token, keys and values are the same."""
        return self._keys[layer]

    def get_values(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, a view ``[slots, num_heads, head_dim]``."""
        return self._values[layer]

    def get_scales(self, layer: int) -> KVScales:
        """Return the scales of a layer's keys and values; 1 if they are not in fp8."""
        return self._scales[layer]

    def view_plane(self, name: str) -> PlaneView:
        """Return one plane for an attention backend. Raises KeyError if this rank has no plane of
        this name."""
        for plane in self.planes:
            if plane.spec.name == name:
                return PlaneView(self, plane)
        raise KeyError(name)

    def move_tokens(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copy all vectors of some tokens to other slots. On a GPU this is only queued.

        Args:
            source, to: int64 ``[tables, n]`` on the pool's device, with one row for each page
                table. Everything is read before anything is written. If a slot occurs twice in
                ``to``, one of the writes wins.
        """
        for plane in self.planes:
            moved = plane.buffer.index_select(2, source[plane.table])
            plane.buffer.index_copy_(2, to[plane.table], moved)

    def gather_pages(self, pages: IntArray) -> list[torch.Tensor]:
        """Copy pages to host memory.

        Args:
            pages: int32 ``[n]``, or ``[tables, n]``. In a table with a window, freed pages come
                before the others.

        Returns:
            for each plane ``[num_layers, vectors, m, page_size, num_heads, head_dim]`` on the CPU,
            with the last ``m`` pages of its table, those not freed.
        """
        copies = []
        for plane, paged in zip(self.planes, self._view_pages(), strict=True):
            table = select_table(pages, plane.table)
            table = table[table != NO_PAGE]
            layers, vectors, _, *rest = paged.shape
            host = torch.empty((layers, vectors, len(table), *rest), dtype=paged.dtype)
            for some in _split_pages(paged, len(table)):
                host[:, :, some] = paged.index_select(2, self._to_index(table[some])).cpu()
            copies.append(host)
        return copies

    def scatter_pages(self, pages: IntArray, copies: Sequence[torch.Tensor]) -> None:
        """Copy the last pages of a result of :meth:`gather_pages` into pages.

        Args:
            pages: int32 ``[n]``, or ``[tables, n]``, for the last ``n`` pages. A page that the
                result lacks is not written.
        """
        for plane, paged, host in zip(self.planes, self._view_pages(), copies, strict=True):
            table = select_table(pages, plane.table)
            count = min(len(table), host.shape[2])
            table, host = table[len(table) - count :], host[:, :, host.shape[2] - count :]
            for some in _split_pages(paged, count):
                paged.index_copy_(2, self._to_index(table[some]), host[:, :, some].to(self.device))

    def _view_pages(self) -> Iterator[torch.Tensor]:
        """Views of all planes, ``[num_layers, vectors, pages, page_size, num_heads, head_dim]``."""
        for plane in self.planes:
            layers, vectors, slots, *rest = plane.buffer.shape
            pages = slots // self.page_size
            yield plane.buffer.view(layers, vectors, pages, self.page_size, *rest)

    def compute_digest(self, pages: IntArray, cached: Sequence[int], stop: int) -> bytes:
        """Compute 8 bytes that depend only on the vectors of some tokens of a sequence (see
        :mod:`pd.kernels.digest`).

        Args:
            pages: int32 ``[n]``, page table of the sequence, or ``[tables, n]``.
            cached: for each group of planes, the position of the first token to hash.
            stop: the position after the last token to hash.
        """
        digests = [np.empty(0, np.int64)]
        for plane in self.planes:
            start = cached[plane.spec.group]
            table = select_table(pages, plane.table)
            slots = find_token_slots(table, np.arange(start, stop), self.page_size)
            if len(plane.parts) == 1:
                own = hash_tokens(plane.buffer, slots, start, first_layer=plane.first_layer)
            else:
                parts = self._hash_parts(plane, plane.parts, slots, start)
                own = np.concatenate([digests[0], *parts])
            digests += [own, *self._hash_damaged_copies(plane, slots, start, own)]
        return sum_digests(np.concatenate(digests))

    def _hash_damaged_copies(
        self,
        plane: PoolPlane,
        slots: npt.NDArray[np.int64],
        start: int,
        own: npt.NDArray[np.int64],
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Hash the tokens in other ranks' copies of a plane, unless they are like ``own``."""
        for parts in plane.copies:
            hashes = np.concatenate([own[:0], *self._hash_parts(plane, parts, slots, start)])
            if not np.array_equal(hashes, own):
                yield hashes

    def _hash_parts(
        self,
        plane: PoolPlane,
        parts: Sequence[int],
        slots: npt.NDArray[np.int64],
        start: int,
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Hash the tokens from ``start`` on in a plane whose heads are divided into ``parts``."""
        layers, vectors, _, heads, head_dim = plane.buffer.shape
        for first in range(0, len(slots), _DIGEST_TOKENS):
            some = torch.from_numpy(slots[first : first + _DIGEST_TOKENS]).to(self.device)
            shape = (layers, vectors, len(some), heads * len(parts), head_dim)
            whole = plane.buffer.new_empty(shape)
            gather_parts(plane.buffer, parts, some, 0, layers, whole)
            yield hash_tokens(
                whole, np.arange(len(some)), start + first, first_layer=plane.first_layer
            )

    def _to_index(self, pages: IntArray) -> torch.Tensor:
        return torch.from_numpy(pages.astype("int64")).to(self.device)


def _split_pages(paged: torch.Tensor, count: int) -> Iterator[slice]:
    """Divide a list of pages into parts. A GPU full of KV still has memory for a copy of one
    part."""
    some = max(1, _COPY_BYTES // (paged.nbytes // paged.shape[2]))
    return (slice(first, first + some) for first in range(0, count, some))


def _allocate_zeros(size: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    # NOTE: torch.zeros writes every byte, which takes seconds for gigabytes that we may never use.
    # The kernel maps these pages, zeroed, when they are first touched.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, size, flags=private), dtype=torch.uint8)
