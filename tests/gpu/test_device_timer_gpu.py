"""What a step takes a GPU, whenever the host looks."""

from __future__ import annotations

import time

import pytest
import torch

from pd.engine.device_copy import DeviceTimer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CYCLES = 50_000_000


def test_a_timer_counts_from_when_the_work_before_is_done() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    timers = []
    for count in (1, 4, 1):
        timer = DeviceTimer(device)
        for _ in range(count):
            torch.cuda._sleep(CYCLES)
        timer.stop()
        timers.append(timer)
    torch.cuda.synchronize()
    time.sleep(0.3)  # the host looks late
    first, second, third = (timer.read_seconds() for timer in timers)
    assert 0.001 < first < 0.2
    assert second == pytest.approx(4 * first, rel=0.3)
    assert third == pytest.approx(first, rel=0.3)


def test_parts_add_up_to_all_of_it() -> None:
    timer = DeviceTimer(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda._sleep(CYCLES)
    timer.start_part()
    torch.cuda._sleep(3 * CYCLES)
    timer.stop()
    first, second = timer.read_parts()
    assert second == pytest.approx(3 * first, rel=0.3)
    assert first + second == pytest.approx(timer.read_seconds(), rel=0.01)
