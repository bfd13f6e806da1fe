"""Clocks of load hosts, compared over ways that are slow, and not equally so in both directions."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pd.bench.load import processes
from pd.bench.load.client import LoadClient
from pd.bench.load.processes import LoadProcesses, Run

if TYPE_CHECKING:
    import pytest

AHEAD = 7.25


class FarProcess:
    """A load process whose clock is ahead, and a time that passes only on the way to it."""

    name, place = "far/0", SimpleNamespace(shares_clock=False)

    def __init__(self, seed: int, fast_share: float) -> None:
        self.now, self.questions = 1000.0, 0
        self._random, self._fast_share = random.Random(seed), fast_share

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def send_message(self, **_: Any) -> None:
        self.questions += 1

    def next_message(self, _: object) -> dict[str, float]:
        self.now += self._draw_way()
        there = self.now + AHEAD
        self.now += self._draw_way()
        return {"now": there}

    def _draw_way(self) -> float:
        is_fast = self._random.random() < self._fast_share
        return (
            self._random.uniform(0.0003, 0.0009) if is_fast else self._random.uniform(0.006, 0.05)
        )


def measure(monkeypatch: pytest.MonkeyPatch, far: FarProcess) -> tuple[float, float]:
    """Return the offset and the error that the harness states for it."""
    monkeypatch.setattr(processes, "time", far)
    with LoadProcesses(LoadClient(())) as all_processes:
        monkeypatch.setattr(all_processes, "_read_message_of", far.next_message)
        run = Run()
        offset = all_processes._measure_clock(far, run)  # type: ignore[arg-type]
    return offset, run.clock_errors[far.name]


def test_fast_ways_of_different_questions_bound_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any question is fast both ways, as over a relay that is busy."""
    for seed in range(20):
        offset, error = measure(monkeypatch, FarProcess(seed, 0.1))
        assert error < 0.001, f"seed {seed}"
        assert abs(offset - AHEAD) <= error, f"seed {seed}"


def test_an_error_that_stays_large_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    far = FarProcess(0, 0.0)
    offset, error = measure(monkeypatch, far)
    assert 0.005 < error < 0.02 and abs(offset - AHEAD) <= error
    assert far.questions == processes._MAX_CLOCK_QUESTIONS


def test_a_fast_way_needs_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    far = FarProcess(0, 1.0)
    assert measure(monkeypatch, far)[1] < 0.001
    assert far.questions == processes._MIN_CLOCK_QUESTIONS
