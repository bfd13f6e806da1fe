"""Calls of the CUDA driver, against a driver of our own with the same binary interface."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from pd.core.errors import SetupError, TransferError
from pd.kernels import cuda_ipc
from pd.kernels.cuda_ipc import HANDLE_BYTES, CudaIpc

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXT, BASE, MAPPED = 0x1234_5678_9ABC, 0x7F00_0000_0000, 0x7E00_0000_0000
HANDLE = bytes(range(HANDLE_BYTES - 2)) + b"\0\xff"
_P = ctypes.POINTER


class Driver:
    """C functions that check their arguments; ``fails`` names one that returns error 1."""

    def __init__(self) -> None:
        self.fails = ""
        self.contexts: list[int] = []
        self.open = 0
        device, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
        self._add("cuInit", lambda flags: 0, ctypes.c_uint)
        self._add("cuDeviceGet", self._device, _P(device), ctypes.c_int)
        self._add("cuDevicePrimaryCtxRetain", self._retain, _P(ctypes.c_void_p), device)
        self._add("cuCtxPushCurrent_v2", self._push, ctypes.c_void_p)
        self._add("cuCtxPopCurrent_v2", self._pop, _P(ctypes.c_void_p))
        self._add("cuMemGetAddressRange_v2", self._range, _P(address), _P(size), address)
        self._add("cuIpcGetMemHandle", self._export, _P(cuda_ipc._Handle), address)
        self._add("cuIpcCloseMemHandle", self._close, address)
        self._add("cuGetErrorString", self._words, ctypes.c_int, _P(ctypes.c_char_p))
        self._text = ctypes.c_char_p(b"invalid argument")

    def _add(self, name: str, function: Callable[..., int], *types: type) -> None:
        def called(*args: object) -> int:
            return 1 if self.fails == name else function(*args)

        setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(called))

    def cuIpcOpenMemHandle_v2(self, address, handle, flags) -> int:
        # ctypes cannot call back with a structure by value.
        assert isinstance(handle, cuda_ipc._Handle)
        assert bytes(handle.data) == HANDLE
        assert flags.value == 1, "peer access must be opened"
        assert self.contexts == [CONTEXT]
        if self.fails == "cuIpcOpenMemHandle_v2":
            return 1
        address._obj.value = MAPPED
        self.open += 1
        return 0

    def _device(self, device, ordinal: int) -> int:
        device[0] = 10 + ordinal
        return 0

    def _retain(self, context, device: int) -> int:
        assert device == 12
        context[0] = CONTEXT
        return 0

    def _push(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _pop(self, context) -> int:
        self.contexts.pop()
        return 0

    def _range(self, base, size, address: int) -> int:
        assert self.contexts == [CONTEXT]
        base[0], size[0] = BASE, 1 << 40
        return 0

    def _export(self, handle, base: int) -> int:
        assert base == BASE and self.contexts == [CONTEXT]
        ctypes.memmove(handle, HANDLE, HANDLE_BYTES)
        return 0

    def _close(self, address: int) -> int:
        assert address == MAPPED and self.contexts == [CONTEXT]
        self.open -= 1
        return 0

    def _words(self, status: int, text) -> int:
        text[0] = self._text
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return driver


def test_export_gives_the_handle_of_the_allocation_and_the_offset(driver: Driver) -> None:
    assert CudaIpc(2).export_memory(BASE + 4096) == (HANDLE, 4096)
    assert driver.contexts == []


def test_a_handle_is_mapped_and_given_up(driver: Driver) -> None:
    ipc = CudaIpc(2)
    address = ipc.map_memory(HANDLE)
    assert (address, driver.open) == (MAPPED, 1)
    ipc.unmap_memory(address)
    assert (driver.open, driver.contexts) == (0, [])


def test_memory_that_cannot_be_exported_is_explained_in_one_line(driver: Driver) -> None:
    driver.fails = "cuIpcGetMemHandle"
    with pytest.raises(SetupError, match=r"invalid argument.*expandable segments") as caught:
        CudaIpc(2).export_memory(BASE)
    assert "\n" not in str(caught.value)
    assert driver.contexts == []


def test_a_peer_that_cannot_be_mapped_is_a_transfer_error(driver: Driver) -> None:
    driver.fails = "cuIpcOpenMemHandle_v2"
    with pytest.raises(TransferError, match="cuIpcOpenMemHandle_v2: invalid argument"):
        CudaIpc(2).map_memory(HANDLE)
    with pytest.raises(TransferError, match="64 bytes, not 3"):
        CudaIpc(2).map_memory(b"abc")
    driver.fails = "cuIpcCloseMemHandle"
    with pytest.raises(TransferError, match="cannot be unmapped"):
        CudaIpc(2).unmap_memory(MAPPED)
    assert driver.contexts == []


def test_a_gpu_that_cannot_be_used_is_named(driver: Driver) -> None:
    driver.fails = "cuDevicePrimaryCtxRetain"
    with pytest.raises(SetupError, match="GPU 2 cannot be used"):
        CudaIpc(2)


def test_a_machine_without_a_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(SetupError, match="driver cannot be loaded"):
        CudaIpc(0)
