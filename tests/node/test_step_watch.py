"""When a step counts as stuck: long after its usual time, not for want of a CPU or of kernels."""

from __future__ import annotations

import time

import pytest

from pd.core.compiling import Compiling
from pd.node.step_watch import MIN_SECONDS, MULTIPLE, StepWatch


class Delay:
    grown = 0.0

    def growth(self, since: float) -> float:
        return self.grown


@pytest.fixture
def delay() -> Delay:
    return Delay()


@pytest.fixture
def watch(delay: Delay) -> StepWatch:
    """The watch of a node whose steps take 10 ms for each token."""
    watch = StepWatch(delay, Compiling())
    watch.observe(0.01, 1)
    watch.observe(0.1, 1000)
    return watch


def stuck_after(watch: StepWatch, tokens: int, seconds: float) -> bool:
    began = time.monotonic()
    watch.begin(began, tokens)
    return watch.is_stuck(began + seconds)


def test_no_step_is_stuck_before_the_shortest_limit(watch: StepWatch) -> None:
    assert not stuck_after(watch, 1, MIN_SECONDS)
    assert stuck_after(watch, 1, MIN_SECONDS + 0.1)


def test_a_large_step_may_take_longer(watch: StepWatch) -> None:
    limit = MULTIPLE * 0.01 * 2000
    assert not stuck_after(watch, 2000, limit - 5)
    assert stuck_after(watch, 2000, limit + 5)


def test_the_first_step_is_never_stuck() -> None:
    assert not stuck_after(StepWatch(Delay(), Compiling()), 1, 1000)


def test_time_without_a_cpu_does_not_count(watch: StepWatch, delay: Delay) -> None:
    delay.grown = 500.0
    assert not stuck_after(watch, 1, 505)
    assert stuck_after(watch, 1, 515)


def test_a_step_that_compiles_kernels_is_not_stuck(delay: Delay) -> None:
    compiling = Compiling()
    watch = StepWatch(delay, compiling)
    watch.observe(0.01, 1)
    began = time.monotonic()
    watch.begin(began, 1)
    with compiling:
        assert not watch.is_stuck(began + 100)
    assert not watch.is_stuck(began + 100)
    watch.begin(time.monotonic() + 1, 1)
    assert watch.is_stuck(time.monotonic() + 100)


def test_nothing_is_stuck_between_steps(watch: StepWatch) -> None:
    watch.begin(time.monotonic(), 1)
    watch.end()
    assert not watch.is_stuck(time.monotonic() + 1000)
