"""Prompts with an objective for their first token: which goes first, and for how long a late one
may be passed over."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from requests_for_tests import make_request

from pd.radix import RadixCache
from pd.scheduling.slack import SlackOrder
from pd.scheduling.waiting_queue import WINDOW, WaitingQueue

if TYPE_CHECKING:
    from pd.core.request import Request


class Simulation:
    """A queue whose prompts are computed one after the other, a token in a millisecond, by a clock
    of its own."""

    def __init__(self, policy: str = "lpm", max_overtakes: int = 1_000_000) -> None:
        self.now = 1000.0
        order = SlackOrder(self.seconds, WINDOW, lambda: self.now)
        self.queue = WaitingQueue(policy, RadixCache(4), max_overtakes, order)

    @staticmethod
    def seconds(request: Request) -> float:
        return 1e-3 * len(request.prompt)

    def add(self, tokens: int, ttft: float, waited: float = 0.0) -> Request:
        request = make_request([tokens % 97] * tokens, ttft=ttft)
        request.due = self.now - waited + ttft
        self.queue.add(request)
        return request

    def order(self) -> list[Request]:
        return list(self.queue.candidates())

    def compute(self) -> Request:
        """Compute the prompt that goes first."""
        first = next(iter(self.queue.candidates()))
        self.queue.admit(first)
        self.now += self.seconds(first)
        return first


def test_the_least_slack_goes_first_and_late_prompts_go_last() -> None:
    s = Simulation()
    late = s.add(10, 1.0, waited=1.5)
    patient = s.add(100, 1.0)
    urgent = s.add(100, 1.0, waited=0.8)
    long = s.add(850, 1.0)
    hopeless = s.add(500, 1.0, waited=0.7)
    assert s.order() == [urgent, long, patient, late, hopeless]


def test_a_prompt_that_waited_as_long_again_as_its_objective_goes_first() -> None:
    s = Simulation()
    late = s.add(10, 1.0, waited=1.9)
    later = s.add(10, 1.0, waited=1.95)
    urgent = s.add(100, 1.0, waited=0.7)
    assert s.order() == [urgent, later, late]
    s.now += 0.06
    assert s.order() == [later, urgent, late], "the bound of one is reached"
    s.now += 0.06
    assert s.order() == [later, late, urgent]


def test_prompts_without_an_objective_and_those_admitted_before_do_not_wait() -> None:
    s = Simulation()
    urgent, unpromised, again = s.add(100, 1.0, waited=0.8), s.add(100, 0.0), s.add(100, 1.0)
    again.times.admitted = s.now
    assert s.order() == [again, unpromised, urgent]


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_without_objectives_the_policy_orders(policy: str) -> None:
    s = Simulation(policy)
    requests = [s.add(tokens, 0.0) for tokens in (300, 10, 100)]
    assert s.order() == requests


def test_a_policy_that_a_user_chose_stays() -> None:
    s = Simulation("priority")
    patient, urgent = s.add(10, 9.0), s.add(10, 1.0)
    patient.priority = 1
    assert s.order() == [patient, urgent]


def run(policy: str, seed: int, load: float) -> int:
    """Prompts of half a minute that were in time; with ``load`` 1 there is just time for all."""
    rng = random.Random(seed)
    s = Simulation(policy)
    arrivals, at = [], s.now
    while at < 1030.0:
        tokens = rng.choice([20, 50, 100, 400])
        at += rng.expovariate(load / 0.1425)
        arrivals.append((at, tokens))
    waiting: dict[Request, None] = {}
    in_time = 0
    while arrivals or waiting:
        while arrivals and (not waiting or arrivals[0][0] <= s.now):
            came, tokens = arrivals.pop(0)
            s.now = max(s.now, came)
            waiting[s.add(tokens, 1.0, waited=s.now - came)] = None
        before = s.now
        first = s.compute()
        del waiting[first]
        in_time += s.now <= first.due
        if policy != "priority":  # which ends all overtaking
            owed = [r for r in waiting if r.due + r.ttft <= before]
            assert all(first.due <= other.due for other in owed), seed
    return in_time


def test_under_overload_no_late_prompt_is_overtaken_beyond_its_bound(seed: int) -> None:
    """And of loads with short peaks more prompts are in time than in order of arrival."""
    run("lpm", seed, load=1.5)
    by_slack = sum(run("lpm", seed + number, load=0.9) for number in range(20))
    by_age = sum(run("priority", seed + number, load=0.9) for number in range(20))
    assert by_slack > by_age, (by_slack, by_age, seed)


def test_only_a_window_of_prompts_is_predicted() -> None:
    asked: list[Any] = []

    def seconds(request: Request) -> float:
        asked.append(request)
        return 0.0

    order = SlackOrder(seconds, 4, lambda: 0.0)
    requests = [make_request([1] * 4, ttft=5.0) for _ in range(10)]
    assert len(order(requests)) == 10
    assert asked == requests[:4]
