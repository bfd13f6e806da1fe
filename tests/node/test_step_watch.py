"""When a step counts as stuck: long after its usual time, not for want of a CPU or of kernels."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from cluster import wait_until

from pd.core.step_cost import StepShape, chunk_pairs
from pd.node.step_watch import MIN_SECONDS, MULTIPLE, StepWatch
from pd.util.compiling import Compiling, are_compilers_running

if TYPE_CHECKING:
    from pathlib import Path


class Delay:
    grown = 0.0

    def measure_growth(self, since: float) -> float:
        return self.grown


@pytest.fixture
def delay() -> Delay:
    return Delay()


def prompt(tokens: int, start: int = 0) -> StepShape:
    return StepShape(tokens, chunk_pairs(start, tokens))


def answers(streams: int, length: int = 100) -> StepShape:
    return StepShape(streams=streams, context=streams * length)


def observe(watch: StepWatch, seconds: float, shape: StepShape) -> None:
    now = time.monotonic()
    watch.observe_step(now - seconds, now, shape)


@pytest.fixture
def watch(delay: Delay) -> StepWatch:
    """The watch of a node whose steps take 8 ms with one answer and 1 s with 512 prompt tokens."""
    watch = StepWatch(delay, Compiling(lambda: False))
    observe(watch, 0.008, answers(1))
    observe(watch, 1.0, prompt(512))
    return watch


def stuck_after(watch: StepWatch, shape: StepShape, seconds: float) -> bool:
    began = time.monotonic()
    watch.begin_step(began, shape)
    return watch.is_stuck(began + seconds)


def test_no_step_is_stuck_before_the_shortest_limit(watch: StepWatch) -> None:
    assert not stuck_after(watch, answers(1), MIN_SECONDS - 0.1)
    assert stuck_after(watch, answers(1), MIN_SECONDS + 0.1)


def test_a_large_step_may_take_longer(watch: StepWatch) -> None:
    limit = MULTIPLE * 1.0
    assert not stuck_after(watch, prompt(600), limit - 1)
    assert stuck_after(watch, prompt(600), limit + 1)


def test_a_size_that_was_never_seen_takes_longer_in_proportion(watch: StepWatch) -> None:
    assert not stuck_after(watch, prompt(1024), MULTIPLE * 2 - 1)
    assert stuck_after(watch, prompt(1024), MULTIPLE * 5)


def test_a_size_between_two_that_were_seen_may_take_as_long_as_the_larger(
    watch: StepWatch,
) -> None:
    assert not stuck_after(watch, prompt(200), MULTIPLE - 1)
    assert stuck_after(watch, prompt(200), MULTIPLE * 2)


def test_a_slow_answer_says_nothing_of_prompts(delay: Delay) -> None:
    """One answer takes longer for each token than prompts do, by a factor of eighty here."""
    watch = StepWatch(delay, Compiling(lambda: False))
    for _ in range(100):
        observe(watch, 0.008, answers(1, 2000))
        observe(watch, 0.2, prompt(2048))
    assert not stuck_after(watch, prompt(2048), MIN_SECONDS - 1)
    assert stuck_after(watch, prompt(2048), MIN_SECONDS + 1)


def test_many_short_steps_do_not_make_a_long_one_forgotten(watch: StepWatch) -> None:
    for _ in range(1000):
        observe(watch, 0.008, answers(1))
    assert not stuck_after(watch, prompt(512), MULTIPLE - 1)


def test_a_chunk_behind_a_long_context_may_take_longer(watch: StepWatch) -> None:
    """As on a CPU, where attention takes most of the time of such a chunk."""
    assert not stuck_after(watch, prompt(512, start=100_000), 200)
    observe(watch, 15.0, prompt(512, start=100_000))
    for _ in range(1000):
        observe(watch, 1.0, prompt(512))
    assert not stuck_after(watch, prompt(512, start=100_000), 200)


def test_the_first_step_is_never_stuck() -> None:
    watch = StepWatch(Delay(), Compiling(lambda: False))
    assert not stuck_after(watch, answers(1), 1000)


def test_a_step_that_was_starved_or_compiled_is_no_measure(watch: StepWatch, delay: Delay) -> None:
    compiling = Compiling(lambda: False)
    watch = StepWatch(delay, compiling)
    observe(watch, 0.2, prompt(512))
    with compiling:
        observe(watch, 100.0, prompt(512))
    delay.grown = 99.9
    now = time.monotonic() + 101
    watch.observe_step(now - 100, now, prompt(512))
    delay.grown = 0.0
    watch.begin_step(now, prompt(512))
    assert watch.is_stuck(now + MIN_SECONDS + 1)


def test_time_without_a_cpu_does_not_count(watch: StepWatch, delay: Delay) -> None:
    delay.grown = 500.0
    assert not stuck_after(watch, answers(1), 505)
    assert stuck_after(watch, answers(1), 515)


def test_a_step_is_not_stuck_while_a_program_compiles_kernels(delay: Delay, tmp_path: Path) -> None:
    """As FlashInfer has it; whoever started the program."""
    shutil.copy("/bin/sleep", tmp_path / "ninja")
    watch = StepWatch(delay)
    observe(watch, 0.01, answers(1))
    began = time.monotonic()
    watch.begin_step(began, answers(1))
    assert watch.is_stuck(began + 100)
    with subprocess.Popen([tmp_path / "ninja", "60"]) as program:
        wait_until(are_compilers_running, 20)
        assert not watch.is_stuck(began + 100)
        program.kill()
    watch.begin_step(time.monotonic() + 1, answers(1))
    assert watch.is_stuck(time.monotonic() + 100)


def test_a_step_that_compiles_kernels_is_not_stuck(delay: Delay) -> None:
    compiling = Compiling(lambda: False)
    watch = StepWatch(delay, compiling)
    observe(watch, 0.01, answers(1))
    began = time.monotonic()
    watch.begin_step(began, answers(1))
    with compiling:
        assert not watch.is_stuck(began + 100)
    assert not watch.is_stuck(began + 100)
    watch.begin_step(time.monotonic() + 1, answers(1))
    assert watch.is_stuck(time.monotonic() + 100)


def test_nothing_is_stuck_between_steps(watch: StepWatch) -> None:
    watch.begin_step(time.monotonic(), answers(1))
    watch.end_step()
    assert not watch.is_stuck(time.monotonic() + 1000)
