"""GPU memory of another process of this host, through the CUDA driver's IPC calls.

An address that comes from here is valid in kernels of torch's streams (:mod:`.cuda_driver`).

A mapping keeps the memory alive even when the process that owns it is gone: its successor finds it
free only after :meth:`CudaIpc.close`.
"""

from __future__ import annotations

import ctypes

from pd.core.errors import SetupError, TransferError
from pd.kernels.cuda_driver import CudaDriver, CudaError

HANDLE_BYTES = 64
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the memory may belong to another GPU.
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaIpc:
    """Exports and maps memory for one GPU. Made as :class:`pd.kernels.cuda_driver.CudaDriver` is,
    with the same errors."""

    def __init__(self, ordinal: int) -> None:
        self._driver = CudaDriver(ordinal)

    def export(self, address: int) -> tuple[bytes, int]:
        """Return a handle of the allocation that contains ``address``, and the offset in it.

        Raises:
            SetupError: memory of this kind cannot be mapped by others (that of expandable
                segments, say).
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        handle = _Handle()
        try:
            with self._driver.current():
                self._driver.call(
                    "cuMemGetAddressRange_v2",
                    ctypes.byref(base),
                    ctypes.byref(size),
                    ctypes.c_uint64(address),
                )
                self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except CudaError as error:
            raise SetupError(
                f"this memory cannot be exported to other processes ({error}); "
                "expandable segments must be off"
            ) from error
        return bytes(handle.data), address - base.value

    def open(self, handle: bytes) -> int:
        """Map the allocation; returns the address of its first byte.

        Raises:
            TransferError: the driver refuses, for example because the process is gone or its GPU
                is not visible here.
        """
        if len(handle) != HANDLE_BYTES:
            raise TransferError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_uint64()
        try:
            with self._driver.current():
                self._driver.call(
                    "cuIpcOpenMemHandle_v2",
                    ctypes.byref(address),
                    _Handle.from_buffer_copy(handle),
                    ctypes.c_uint(_ENABLE_PEER_ACCESS),
                )
        except CudaError as error:
            raise TransferError(f"the peer's memory cannot be mapped: {error}") from error
        return address.value

    def close(self, address: int) -> None:
        """Unmap the address that :meth:`open` returned. No kernel may be using it. Raises
        TransferError."""
        try:
            with self._driver.current():
                self._driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        except CudaError as error:
            raise TransferError(f"the peer's memory cannot be unmapped: {error}") from error
