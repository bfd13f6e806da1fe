"""GPU memory of another process of this host, through the CUDA driver's IPC calls.

The driver is the library that torch has loaded already. Its calls work on the GPU's primary
context, which is the one torch uses, so an address that comes from here is valid in kernels of
torch's streams.

A mapping keeps the memory alive even when the process that owns it is gone: its successor finds it
free only after :meth:`CudaIpc.close`.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from pd.core.errors import SetupError, TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE_BYTES = 64
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the memory may belong to another GPU.
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaError(Exception):
    """A call of the driver failed; the message has its name and the driver's words."""


class CudaIpc:
    """Exports and maps memory for one GPU.

    Args:
        ordinal: the GPU's number among those that this process sees.

    Raises:
        SetupError: there is no driver, or the GPU cannot be used.
    """

    def __init__(self, ordinal: int) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SetupError(f"the CUDA driver cannot be loaded: {error}") from error
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        try:
            self._call("cuInit", ctypes.c_uint(0))
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        except CudaError as error:
            raise SetupError(f"GPU {ordinal} cannot be used: {error}") from error

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that contains ``address``, and the offset in it.

        Raises:
            SetupError: memory of this kind cannot be mapped by others (that of expandable
                segments, say).
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        handle = _Handle()
        try:
            with self._current():
                self._call(
                    "cuMemGetAddressRange_v2",
                    ctypes.byref(base),
                    ctypes.byref(size),
                    ctypes.c_uint64(address),
                )
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
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
            with self._current():
                self._call(
                    "cuIpcOpenMemHandle_v2",
                    ctypes.byref(address),
                    _Handle.from_buffer_copy(handle),
                    ctypes.c_uint(_ENABLE_PEER_ACCESS),
                )
        except CudaError as error:
            raise TransferError(f"the peer's memory cannot be mapped: {error}") from error
        return address.value

    def close(self, address: int) -> None:
        """Give up what :meth:`open` returned. No kernel may be using it. Raises TransferError."""
        try:
            with self._current():
                self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        except CudaError as error:
            raise TransferError(f"the peer's memory cannot be unmapped: {error}") from error

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Threads start without a context."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: Any) -> None:
        status: int = getattr(self._driver, name)(*args)
        if status:
            text = ctypes.c_char_p()
            known = not self._driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            words = text.value.decode() if known and text.value else "an unknown error"
            raise CudaError(f"{name}: {words} (CUDA error {status})")
