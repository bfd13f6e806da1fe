"""Masks that take long: their rows sit out, the others go on, and the mask is there in the end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster import wait_until

from pd.core.errors import CostlyGrammarError
from pd.core.sampling_params import SamplingParams
from pd.engine import quick_masks, rule_lanes
from pd.engine.rule_budget import RuleBudget
from pd.engine.ruled_choice import PROOFS, SLOW_SECONDS
from pd.engine.sampler import Sampler
from pd.engine.sampling_state import Draw, SamplingState

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 64


class SlowRules:
    """Rules of which a test says how long they take.

    Attributes:
        seconds: processor time of each mask.
        advance_seconds: processor time of each token.
        gate: what a mask waits for.
        threads: which have filled masks.
    """

    jumps_forward = has_ended = False
    first_mask = None

    def __init__(self, owner: str = "", seconds: float = 0.0, *, is_quick: bool = False) -> None:
        self.budget, self.seconds, self.is_quick = RuleBudget(owner), seconds, is_quick
        self.advance_seconds = 0.0
        self.threads: list[threading.Thread] = []
        self.gate = threading.Event()
        self.gate.set()
        self.tokens: list[int] = []

    def ends_with(self, token: int) -> bool:
        return False

    def fork_rules(self) -> SlowRules:
        return self

    def accept_token(self, token: int) -> bool:
        spend(self.advance_seconds)
        self.tokens.append(token)
        return True

    def fill_mask(self, mask: np.ndarray) -> None:
        assert self.gate.wait(60)
        spend(self.seconds)
        self.threads.append(threading.current_thread())
        mask[:] = len(self.tokens)

    @staticmethod
    def fill_together(rules: Sequence[SlowRules], masks: np.ndarray, rows: Sequence[int]) -> None:
        for each, row in zip(rules, rows, strict=True):
            each.fill_mask(masks[row])


def spend(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def state_of(rules: Any) -> SamplingState:
    """With a token of output, behind which masks are not known at first."""
    params, prompt = SamplingParams(max_tokens=99), np.array([0], np.int32)
    state = SamplingState(params, prompt, (1,), VOCAB, make_rules=lambda _: rules)
    state.observe_token(5)
    return state


def fill(sampler: Sampler, states: Sequence[SamplingState]) -> list[int]:
    """Values of the masks; 0 for those that are late."""
    prepared = sampler.prepare_draws([Draw(state) for state in states])
    masks = sampler.fill_masks(prepared, np.empty(0, np.int32))
    assert masks is not None
    rows = masks.masks.numpy()[:, 0].tolist()
    late = [state.rules is None or state.rules.is_late for state in states]
    return [0 if is_late else row for row, is_late in zip(rows, late, strict=True)]


@pytest.fixture
def sampler() -> Any:
    made = Sampler(VOCAB, "cpu")
    yield made
    made.rule_lanes.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is late but what waits for a test."""
    monkeypatch.setattr(rule_lanes, "WAIT_SECONDS", 30.0)


@pytest.mark.usefixtures("patient")
def test_masks_that_take_no_time_are_there(sampler: Sampler) -> None:
    states = [state_of(SlowRules(f"owner {i % 3}")) for i in range(9)]
    assert fill(sampler, states) == [1] * 9
    for state in states:
        state.observe_token(6)
    assert fill(sampler, states) == [2] * 9


def test_rows_sit_out_until_their_mask_is_there(sampler: Sampler) -> None:
    """Nobody fills it twice, and the rows of other owners need not wait for it."""
    slow, others = SlowRules("slow"), [state_of(SlowRules(f"{i}")) for i in range(3)]
    state = state_of(slow)
    slow.gate.clear()
    ready = threading.Event()
    sampler.rule_lanes.set_ready_callback(ready.set)
    for count in range(1, 4):
        for _ in range(100):  # a busy machine may have let others be late, too
            states = [state, *others] if count == 1 else others
            masks = fill(sampler, states)
            if masks[-3:] == [count] * 3:
                break
            wait_until(lambda: not any(each.rules and each.rules.is_busy for each in others), 30.0)
        assert masks == ([0] if count == 1 else []) + [count] * 3
        for other in others:
            other.observe_token(6)
    rules = state.rules
    assert rules is not None and rules.is_busy
    slow.gate.set()
    assert ready.wait(30)
    wait_until(lambda: not rules.is_busy, 30.0)
    assert slow.tokens == [5]
    assert fill(sampler, [state]) == [1]
    assert slow.tokens == [5]


@pytest.mark.usefixtures("patient")
def test_a_slow_choice_is_looked_after_by_itself_until_it_is_quick(sampler: Sampler) -> None:
    slow = SlowRules("slow", 2 * SLOW_SECONDS)
    state = state_of(slow)
    assert fill(sampler, [state]) == [1]
    rules = state.rules
    assert rules is not None and rules.is_slow
    # So are new ones of the same owner, at first.
    other = state_of(SlowRules("slow"))
    assert fill(sampler, [other]) == [0]
    assert other.rules is not None and other.rules.is_slow
    slow.seconds = 0.0
    state.observe_token(6)
    for each in (rules, other.rules):
        sampler.rule_lanes.submit_slow(each)
        wait_until(lambda each=each: not each.is_busy, 30.0)
        assert not each.is_slow and each.mask is not None
    assert fill(sampler, [state, other]) == [2, 1]


@pytest.mark.usefixtures("patient")
def test_what_comes_after_a_slow_mask_of_a_thread_is_not_filled_in_vain(sampler: Sampler) -> None:
    """Each of the rest is then timed by itself."""
    states = [state_of(SlowRules("", 0.2 if i == 4 else 0.0)) for i in range(9)]
    assert fill(sampler, states) == [1] * 5 + [0] * 4
    found = [state.rules for state in states if state.rules is not None]
    assert all(rules.is_slow for rules in found[4:])
    for rules in found:
        rules.add_token(6)
        sampler.rule_lanes.submit_slow(rules)
    wait_until(lambda: not any(rules.is_busy for rules in found), 30.0)
    assert found[4].is_slow
    # A processor that is interrupted makes others slow, too.
    assert sum(rules.is_slow for rules in found) < 9


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_masks, "count_mask_threads", lambda: 1)
    monkeypatch.setattr(quick_masks, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(quick_masks, "SUSPICIOUS_SECONDS", 0.1)


@pytest.mark.usefixtures("patient", "one_thread")
def test_trusted_choices_have_no_thread_until_one_is_slow(sampler: Sampler) -> None:
    """Its own step is the only one that others wait for it: those after it are filled by threads,
    those with it are slow until they are known."""
    made = [SlowRules(is_quick=True) for _ in range(9)]
    states = [state_of(rules) for rules in made]
    for count in (1, 2):
        assert fill(sampler, states) == [count] * 9
        for state in states:
            state.observe_token(6)
    assert {thread for rules in made for thread in rules.threads} == {threading.current_thread()}
    made[4].seconds = 0.2
    assert fill(sampler, states) == [3] * 9
    found = [state.rules for state in states if state.rules is not None]
    assert [rules.is_slow for rules in found] == [False] * 3 + [True] * 3 + [False] * 3
    assert all(rules.threads[-1] is threading.current_thread() for rules in made[:6])
    assert all(rules.threads[-1] is not threading.current_thread() for rules in made[6:])
    for each in found:
        each.add_token(6)
    for each in found[3:6]:
        sampler.rule_lanes.submit_slow(each)
    wait_until(lambda: not any(each.is_busy for each in found), 30.0)
    assert found[4].is_slow and not found[4].is_trusted
    assert all(each.is_trusted for each in found[:3] + found[6:])


@pytest.mark.usefixtures("patient", "one_thread")
def test_a_trusted_choice_whose_token_is_slow_is_known_at_once(sampler: Sampler) -> None:
    """The masks of the others are there all the same, and it has none that they would wait for."""
    made = [SlowRules("slow" if i == 1 else "", is_quick=True) for i in range(6)]
    made[1].advance_seconds, made[1].seconds = 0.05, 5.0
    states = [state_of(rules) for rules in made]
    assert fill(sampler, states) == [1, 0, 1, 1, 1, 1]
    found = [state.rules for state in states if state.rules is not None]
    assert [rules.is_slow for rules in found] == [False, True, False, False, False, False]
    assert found[1].budget.seconds >= 0.04 and not made[1].threads
    assert fill(sampler, [state_of(SlowRules("slow", is_quick=True))]) == [0]


@pytest.mark.usefixtures("patient", "one_thread")
def test_a_slow_choice_is_trusted_again_after_ever_more_quick_masks(sampler: Sampler) -> None:
    """And so are the others of its request, so that not each of them has to be slow once."""
    rules = SlowRules(is_quick=True)
    first, sibling = state_of(rules), state_of(rules.fork_rules())
    choice, other = first.rules, sibling.rules
    assert choice is not None and other is not None and other.is_trusted
    for proofs in (PROOFS, 2 * PROOFS):
        assert choice.is_trusted
        first.observe_token(6)
        rules.seconds = 0.2
        assert fill(sampler, [first])[0] > 0
        assert choice.is_slow and not other.is_trusted
        rules.seconds, choice.is_slow = 0.0, False
        for _ in range(proofs):
            assert not choice.is_trusted
            first.observe_token(6)
            first.follow_rules()
            choice.is_slow = False  # a processor may be interrupted


@pytest.mark.usefixtures("patient", "one_thread")
def test_tokens_of_trusted_choices_count_for_the_budget(sampler: Sampler) -> None:
    state = state_of(SlowRules(is_quick=True))
    for _ in range(70):
        fill(sampler, [state])
        state.observe_token(6)
    assert state.rules is not None
    assert 40 <= state.rules.budget.tokens <= 70


def test_a_request_ends_when_its_masks_take_too_long() -> None:
    state = state_of(SlowRules("", 0.1))
    with pytest.raises(CostlyGrammarError, match="masks and"):
        for _ in range(100):
            state.observe_token(6)
            state.follow_rules()
    assert 5 < state.num_output_tokens < 40
