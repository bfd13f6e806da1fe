"""Masks that take long: which of a batch do is known, and the others are not filled again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pd.core.sampling_params import SamplingParams
from pd.engine import sampler as sampling
from pd.engine.sampler import Sampler
from pd.engine.sampling_state import Draw, SamplingState

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB, THREADS, LIMIT = 64, 4, 0.25


class SlowRules:
    """Rules whose mask takes some seconds.

    Attributes:
        filled: how often the mask was filled.
        alone: how often of these by itself.
    """

    ended = jumps_forward = False

    def __init__(self, seconds: float) -> None:
        self.seconds, self.filled, self.alone = seconds, 0, 0

    def fill_mask(self, mask: np.ndarray) -> None:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        mask[:] = 1
        self.filled += 1
        self.alone += 1

    @staticmethod
    def fill_together(rules: Sequence[SlowRules], masks: np.ndarray, rows: Sequence[int]) -> None:
        """In the time that threads need which share the rows."""
        seconds = [each.seconds for each in rules]
        time.sleep(max(*seconds, sum(seconds) / THREADS))
        for each, row in zip(rules, rows, strict=True):
            masks[row] = 1
            each.filled += 1


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "mask_threads", lambda: THREADS)
    monkeypatch.setattr(sampling, "MASK_SECONDS", LIMIT)


def states_of(rules: Sequence[Any]) -> list[SamplingState]:
    prompt = np.array([0], np.int32)
    return [
        SamplingState(
            SamplingParams(max_tokens=9), prompt, (1,), VOCAB, make_rules=lambda _, each=each: each
        )
        for each in rules
    ]


def fill(sampler: Sampler, states: Sequence[SamplingState]) -> None:
    prepared = sampler.prepare([Draw(state) for state in states])
    masks = sampler.fill_masks(prepared, np.empty(0, np.int32))
    assert masks is not None
    assert (masks.masks.numpy()[:, 0] == 1).all()


def test_many_masks_that_take_long_in_sum_are_not_filled_one_by_one() -> None:
    """Nor twice, once it is known that they do. A busy machine may hold up a group or two."""
    rules = [SlowRules(0.02 + 0.03 * (i % 4) / 3) for i in range(48)]
    states = states_of(rules)
    sampler = Sampler(VOCAB, "cpu")
    for step in range(3):
        fill(sampler, states)
        assert sum(each.alone for each in rules) <= 2 * THREADS
        assert sum(each.filled for each in rules) <= (2 + step) * len(rules) + 2 * THREADS
        assert max(state.mask_seconds for state in states) < LIMIT


@pytest.mark.parametrize("count", [1, 2, 30])
def test_a_slow_mask_is_found_among_others(count: int) -> None:
    rules = [SlowRules(0.03) for _ in range(count - 1)]
    slow = SlowRules(LIMIT + 0.1)
    states = states_of([*rules, slow])
    fill(Sampler(VOCAB, "cpu"), states)
    assert states[-1].mask_seconds > LIMIT
    assert all(state.mask_seconds < LIMIT for state in states[:-1])
    assert sum(each.alone for each in rules) <= 3 * THREADS


def test_a_mask_that_becomes_slow_is_found() -> None:
    rules = [SlowRules(0.0) for _ in range(9)]
    states = states_of(rules)
    sampler = Sampler(VOCAB, "cpu")
    fill(sampler, states)
    assert [each.filled for each in rules] == [1] * 9
    rules[4].seconds = LIMIT + 0.1
    fill(sampler, states)
    assert [state.mask_seconds > LIMIT for state in states] == [i == 4 for i in range(9)]
