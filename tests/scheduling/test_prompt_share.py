"""Which part of a node's time prompts take, as it tells proxies."""

from __future__ import annotations

import pytest

from pd.core.step_cost import StepCost, StepShape
from pd.scheduling.prompt_share import PromptShare

COST = StepCost(base=5e-3, mixed=1e-3, first=1e-5, middle=1e-5, rest=1e-5, stream=5e-5)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_the_part_of_the_time_that_steps_take_longer_for_prompts() -> None:
    clock = Clock()
    share = PromptShare(clock)
    assert share.estimate_share() == 0.0
    for _ in range(10_000):  # 100 s
        clock.now += 0.01
        share.observe_step(COST, StepShape(tokens=100, streams=8))
    assert share.estimate_share() == pytest.approx((1e-3 + 100 * 1e-5) / 0.01, rel=0.05)
    for _ in range(10_000):
        clock.now += 0.01
        share.observe_step(COST, StepShape(streams=8))
    assert share.estimate_share() < 1e-3
    assert share.estimate_share(queued=2.0) == pytest.approx(0.2, abs=1e-3)
    assert share.estimate_share(queued=20.0) == 1.0
