"""Copies several host arrays to a device at once, without waiting."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.generic]

# Alignment for vector loads of kernels: a multiple of the size of every dtype.
ALIGNMENT = 16


class PinnedStaging:
    """Packs arrays into pinned memory and queues one copy on the current stream.

    Two buffers take turns, each with an event after its copy. So you can pack an upload while the
    last one is still queued after a running step. It waits only if two copies are outstanding. On a
    CPU there is neither pinning nor events.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [_Buffer(device), _Buffer(device)]
        self._turn = 0

    def upload_arrays(
        self, arrays: Sequence[Array], out: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Copy ``arrays`` to the device.

        Args:
            arrays: any shapes and dtypes that torch has.
            out: uint8 memory on the device, at least :func:`count_packed_bytes` of it, starting at
                a multiple of 16; by default new memory. Arrays lie in it one after another, so
                equal sizes mean equal addresses.

        Returns:
            A view for each array, of its shape and dtype.
        """
        places = self.reserve_arrays([(array.shape, array.dtype) for array in arrays])
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        return self.send_arrays(places, out)

    def reserve_arrays(
        self, wanted: Sequence[tuple[tuple[int, ...], npt.DTypeLike]]
    ) -> list[Array]:
        """Return pinned memory for arrays of these shapes and dtypes. The caller writes to it and
        then sends it, with no other upload in between. It still holds old content."""
        dtypes = [np.dtype(dtype) for _, dtype in wanted]
        sizes = [
            math.prod(shape) * d.itemsize for (shape, _), d in zip(wanted, dtypes, strict=True)
        ]
        host, offset, places = (
            self._buffers[self._turn].take_memory(sum(map(_align_size, sizes))),
            0,
            [],
        )
        for (shape, _), dtype, size in zip(wanted, dtypes, sizes, strict=True):
            places.append(host[offset : offset + size].view(dtype).reshape(shape))
            offset += _align_size(size)
        return places

    def send_arrays(
        self, places: Sequence[Array], out: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Copy the result of :meth:`reserve_arrays` to the device; see :meth:`upload_arrays`."""
        size = count_packed_bytes(places)
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._buffers[self._turn].copy_out(out, size)
        self._turn = 1 - self._turn
        views, offset = [], 0
        for place in places:
            stop = offset + place.nbytes
            views.append(out[offset:stop].view(_torch_dtype(place.dtype)).view(place.shape))
            offset = _align_size(stop)
        return views


class GraphMemory:
    """Memory on the device that CUDA graphs share. Uploads of one graph overwrite those of another,
    in the order of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def __call__(self, size: int) -> torch.Tensor:
        """Return uint8 memory of at least ``size`` bytes, zero at first. Graphs with a smaller
        memory keep it."""
        if len(self._memory) < size:
            self._memory = torch.zeros(size, dtype=torch.uint8, device=self._memory.device)
        return self._memory


class _Buffer:
    """Host memory, and the event recorded after its last copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def take_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Wait until the last copy is done, and return at least ``size`` bytes to write."""
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._memory) < size:
            size = 1 << max(12, math.ceil(math.log2(size)))
            pinned = self._copied is not None
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._memory.numpy()

    def copy_out(self, out: torch.Tensor, size: int) -> None:
        out[:size].copy_(self._memory[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


def count_packed_bytes(arrays: Sequence[Array]) -> int:
    """Return the number of bytes that :meth:`PinnedStaging.upload_arrays` needs for these
    arrays."""
    return sum(_align_size(array.nbytes) for array in arrays)


def _align_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
