"""Copies of runs, by a driver of our own that copies in this process's memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from transfer.transfer_helpers import SEED

from pd.kernels import copy_engine, cuda_driver
from pd.kernels.copy_engine import CopyEngine, SlotRun, SlotRuns
from pd.kernels.cuda_driver import CudaError
from pd.kernels.kv_copy import copy_to_peer

STREAM = 0x1234


class Driver:
    """``fails``: what the next copy returns."""

    def __init__(self) -> None:
        self.copies = 0
        self.fails = 0

    def cuMemcpy2DAsync_v2(self, copy: Any, stream: ctypes.c_void_p) -> int:
        (copy,) = (copy._obj,)
        assert stream.value == STREAM
        assert copy.srcMemoryType == copy.dstMemoryType == 2
        assert copy.WidthInBytes <= min(copy.srcPitch, copy.dstPitch)
        for line in range(copy.Height):
            ctypes.memmove(
                copy.dstDevice + line * copy.dstPitch,
                copy.srcDevice + line * copy.srcPitch,
                copy.WidthInBytes,
            )
        self.copies += 1
        return self.fails

    def cuGetErrorString(self, status: Any, text: Any) -> int:
        text._obj.value = b"out of copies"
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: driver)
    return driver


def pools(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand((3, 2, 200, 2, 4), generator=generator), torch.zeros((3, 2, 300, 2, 4))


def random_slots(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Runs of random lengths on both sides."""
    sides = []
    for num_slots in (200, 300):
        parts = np.split(np.arange(num_slots), np.sort(rng.choice(num_slots, 5)))
        rng.shuffle(parts)
        sides.append(np.concatenate(parts)[:tokens])
    return np.array(sides, dtype=np.int32)


def test_runs_arrive_as_the_kernel_would_have_copied_them(driver: Driver) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    buffer, peer = pools(torch.Generator().manual_seed(SEED))
    engine = CopyEngine(buffer)
    for _ in range(50):
        slots = random_slots(rng, 150)
        start, stop = np.sort(rng.choice(151, 2, replace=False)).tolist()
        layers = np.sort(rng.choice(4, 2, replace=False)).tolist()
        runs = SlotRuns(slots).find_runs(start, stop)
        assert len(runs) == SlotRuns(slots).count_runs(start, stop)
        peer.zero_()
        driver.copies = 0
        engine.copy_runs(runs, peer.data_ptr(), 300, *layers, STREAM)
        assert driver.copies == len(runs)
        expected = torch.zeros_like(peer)
        own, theirs = torch.from_numpy(slots[:, start:stop].copy())
        copy_to_peer(buffer, own, expected.data_ptr(), 300, theirs, *layers)
        assert torch.equal(peer, expected)


def test_a_run_ends_where_either_side_does() -> None:
    slots = np.array([[4, 5, 6, 7, 9, 10], [8, 9, 20, 21, 22, 23]], dtype=np.int32)
    runs = SlotRuns(slots)
    assert runs.find_runs(0, 6) == [SlotRun(4, 8, 2), SlotRun(6, 20, 2), SlotRun(9, 22, 2)]
    assert runs.find_runs(1, 5) == [SlotRun(5, 9, 1), SlotRun(6, 20, 2), SlotRun(9, 22, 1)]
    assert runs.find_runs(2, 4) == [SlotRun(6, 20, 2)]
    assert [runs.count_runs(0, 6), runs.count_runs(2, 4), runs.count_runs(3, 4)] == [3, 1, 1]


def test_only_long_runs_in_pools_that_the_driver_can_address_are_taken(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, _ = pools(torch.Generator())
    monkeypatch.setattr(copy_engine, "MIN_RUN_BYTES", 32 * 10)
    engine = CopyEngine(buffer)
    assert engine.can_copy(20, 2, 300)
    assert not engine.can_copy(19, 2, 300)
    assert engine.can_copy(20, 2, (1 << 26) - 1)
    assert not engine.can_copy(20, 2, 1 << 26), "2 GiB from plane to plane"


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    buffer, peer = pools(torch.Generator())
    driver.fails = 2
    with pytest.raises(CudaError, match="cuMemcpy2DAsync_v2: out of copies"):
        CopyEngine(buffer).copy_runs([SlotRun(0, 0, 1)], peer.data_ptr(), 300, 0, 1, STREAM)
