"""Calls of the CUDA driver that torch does not offer.

We use the driver library that torch has already loaded. Its calls work on the GPU's primary
context, like torch, so addresses and streams are valid in both.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator


class CudaError(Exception):
    """A call of the driver failed. The message has the call's name and the driver's text."""


class CudaDriver:
    """The driver, for one GPU.

    Args:
        ordinal: number of the GPU among those visible to this process.

    Raises:
        SetupError: there is no driver, or the GPU cannot be used.
    """

    def __init__(self, ordinal: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SetupError(f"the CUDA driver cannot be loaded: {error}") from error
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        try:
            self.call_function("cuInit", ctypes.c_uint(0))
            self.call_function("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self.call_function("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        except CudaError as error:
            raise SetupError(f"GPU {ordinal} cannot be used: {error}") from error

    @contextlib.contextmanager
    def make_current(self) -> Iterator[None]:
        """Make the GPU current for the calling thread inside the context, because threads start
        without one."""
        self.call_function("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call_function("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def call_function(self, name: str, *args: object) -> None:
        """Call a function of the driver with ctypes arguments. Raises CudaError if it fails."""
        status: int = getattr(self._library, name)(*args)
        if status:
            text = ctypes.c_char_p()
            known = not self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            words = text.value.decode() if known and text.value else "an unknown error"
            raise CudaError(f"{name}: {words} (CUDA error {status})")
