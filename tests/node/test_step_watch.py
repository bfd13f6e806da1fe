"""When a step counts as stuck: long after its usual time, not for want of a CPU or of kernels."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from cluster import wait_until

from pd.core.compiling import Compiling, compilers_run
from pd.node.step_watch import MIN_SECONDS, MULTIPLE, StepWatch

if TYPE_CHECKING:
    from pathlib import Path


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
    watch = StepWatch(delay, Compiling(lambda: False))
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
    assert not stuck_after(StepWatch(Delay(), Compiling(lambda: False)), 1, 1000)


def test_time_without_a_cpu_does_not_count(watch: StepWatch, delay: Delay) -> None:
    delay.grown = 500.0
    assert not stuck_after(watch, 1, 505)
    assert stuck_after(watch, 1, 515)


def test_a_step_is_not_stuck_while_a_program_compiles_kernels(delay: Delay, tmp_path: Path) -> None:
    """As FlashInfer has it; whoever started the program."""
    shutil.copy("/bin/sleep", tmp_path / "ninja")
    watch = StepWatch(delay)
    watch.observe(0.01, 1)
    began = time.monotonic()
    watch.begin(began, 1)
    assert watch.is_stuck(began + 100)
    with subprocess.Popen([tmp_path / "ninja", "60"]) as program:
        wait_until(compilers_run, 20)
        assert not watch.is_stuck(began + 100)
        program.kill()
    watch.begin(time.monotonic() + 1, 1)
    assert watch.is_stuck(time.monotonic() + 100)


def test_a_step_that_compiles_kernels_is_not_stuck(delay: Delay) -> None:
    compiling = Compiling(lambda: False)
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
