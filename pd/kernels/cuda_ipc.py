"""Maps GPU memory of other processes of this host, through the CUDA driver's IPC calls.

Addresses from here are valid in kernels on torch's streams (:mod:`.cuda_driver`).

A mapping keeps the memory alive even after its owner has ended. So the owner's successor finds the
memory free only after :meth:`CudaIpc.unmap_memory`.
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
    """Exports and maps memory for one GPU. See :class:`pd.kernels.cuda_driver.CudaDriver` for
    arguments and errors."""

    def __init__(self, ordinal: int) -> None:
        self._driver = CudaDriver(ordinal)

    def export_memory(self, address: int) -> tuple[bytes, int]:
        """Return a handle of the allocation that contains ``address``, and the offset in it.

        Raises:
            SetupError: other processes cannot map this kind of memory (for example expandable
                segments).
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        handle = _Handle()
        try:
            with self._driver.make_current():
                self._driver.call_function(
                    "cuMemGetAddressRange_v2",
                    ctypes.byref(base),
                    ctypes.byref(size),
                    ctypes.c_uint64(address),
                )
                self._driver.call_function("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except CudaError as error:
            raise SetupError(
                f"this memory cannot be exported to other processes ({error}); "
                "expandable segments must be off"
            ) from error
        return bytes(handle.data), address - base.value

    def map_memory(self, handle: bytes) -> int:
        """Map the allocation. Returns the address of its first byte.

        Raises:
            TransferError: the driver refuses, for example because the process has ended or its GPU
                is not visible here.
        """
        if len(handle) != HANDLE_BYTES:
            raise TransferError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_uint64()
        try:
            with self._driver.make_current():
                self._driver.call_function(
                    "cuIpcOpenMemHandle_v2",
                    ctypes.byref(address),
                    _Handle.from_buffer_copy(handle),
                    ctypes.c_uint(_ENABLE_PEER_ACCESS),
                )
        except CudaError as error:
            raise TransferError(f"the peer's memory cannot be mapped: {error}") from error
        return address.value

    def unmap_memory(self, address: int) -> None:
        """Unmap an address from :meth:`map_memory`. No kernel may be using it. Raises
        TransferError."""
        try:
            with self._driver.make_current():
                self._driver.call_function("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        except CudaError as error:
            raise TransferError(f"the peer's memory cannot be unmapped: {error}") from error
