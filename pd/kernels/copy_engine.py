"""Copies long runs of slots directly into another GPU's pool with a copy engine.

The kernel of :mod:`pd.kernels.kv_copy` copies rows wherever they lie, but it occupies
multiprocessors that a forward pass then lacks. A copy engine occupies none and slows the pass less
(``benchmarks/sending.py``). Each run of adjacent slots takes one call, because a two-dimensional
copy moves it in all layers at once.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pd.kernels.cuda_driver import CudaDriver
from pd.kernels.kv_copy import count_row_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

# From this size of a run in one slab on, a copy engine is about as fast as the kernel
# (``benchmarks/kv_copy.py``).
MIN_RUN_BYTES = 512 << 10
# CU_DEVICE_ATTRIBUTE_MAX_PITCH: CUDA's limit for the bytes of a slab, the same on all GPUs.
_MAX_PITCH = (1 << 31) - 1
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


class SlotRun(NamedTuple):
    """Tokens whose slots are adjacent in both pools: ``tokens`` of them, starting at ``slot`` and
    ``peer_slot``."""

    slot: int
    peer_slot: int
    tokens: int


class SlotRuns:
    """The runs of a sequence of tokens.

    Args:
        slots: int32 ``[2, tokens]``: each token's slot in our pool and in the peer's.
    """

    def __init__(self, slots: npt.NDArray[np.int32]) -> None:
        self._slots = slots
        self._breaks = np.flatnonzero((np.diff(slots, axis=1) != 1).any(axis=0)) + 1

    def count_runs(self, start: int, stop: int) -> int:
        """Count the runs of tokens ``[start, stop)``, at least one."""
        return len(self._find_breaks(start, stop)) + 1

    def find_runs(self, start: int, stop: int) -> list[SlotRun]:
        """Return the runs of tokens ``[start, stop)`` in order."""
        ends = np.concatenate(([start], self._find_breaks(start, stop), [stop]))
        slots, peer_slots = self._slots[:, ends[:-1]].tolist()
        return [
            SlotRun(*run) for run in zip(slots, peer_slots, np.diff(ends).tolist(), strict=True)
        ]

    def _find_breaks(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        first, last = np.searchsorted(self._breaks, (start + 1, stop))
        return self._breaks[first:last]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


class CopyEngine:
    """Queues copies from one pool.

    Args:
        buffer: our pool, a plane, contiguous, on a GPU.

    Raises:
        SetupError: there is no driver, or the GPU cannot be used.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._row = buffer, count_row_bytes(buffer)
        self._driver = CudaDriver(buffer.device.index or 0)

    def can_copy(self, tokens: int, runs: int, peer_num_slots: int) -> bool:
        """Whether a copy engine should copy this many tokens in this many runs, instead of the
        kernel."""
        slots = max(self._buffer.shape[2], peer_num_slots)
        return tokens * self._row >= runs * MIN_RUN_BYTES and slots * self._row <= _MAX_PITCH

    def copy_runs(
        self,
        runs: Sequence[SlotRun],
        peer: int,
        peer_num_slots: int,
        layer_start: int,
        layer_stop: int,
        stream: int,
    ) -> None:
        """Queue the copy of all runs on a stream. Slots and addresses are not checked.

        Args:
            peer: address of the other pool, valid for the buffer's device. It has the same layers,
                vectors and rows.
            peer_num_slots: slots of the other pool.
            stream: the handle of a stream of the buffer's device.

        Raises:
            CudaError: the driver refuses.
        """
        row, slab = self._row, self._buffer.shape[1] * layer_start
        pitch, peer_pitch = self._buffer.shape[2] * row, peer_num_slots * row
        source, target = self._buffer.data_ptr() + slab * pitch, peer + slab * peer_pitch
        with self._driver.make_current():
            for run in runs:
                copy = _Copy2D(
                    srcMemoryType=_DEVICE_MEMORY,
                    srcDevice=source + run.slot * row,
                    srcPitch=pitch,
                    dstMemoryType=_DEVICE_MEMORY,
                    dstDevice=target + run.peer_slot * row,
                    dstPitch=peer_pitch,
                    WidthInBytes=run.tokens * row,
                    Height=self._buffer.shape[1] * (layer_stop - layer_start),
                )
                self._driver.call_function(
                    "cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream)
                )
