"""Prompts with an objective for their first token: which goes first, how many are in time, and for
how long a late one may be passed over."""

from __future__ import annotations

import random
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prefill_bench import PrefillBench
from requests_for_tests import make_request
from shared_prompts import make_workload, serve_cached, usual

from pd.radix import RadixCache
from pd.scheduling.due_order import DueOrder, Prospect, prefer_cached, split_timely
from pd.scheduling.waiting_queue import WINDOW, WaitingQueue

if TYPE_CHECKING:
    from pd.scheduling.request import Request


def usual_ttft(request: Request) -> float:
    """What is promised where nothing is stated."""
    return usual(len(request.prompt))


class Simulation:
    """A queue whose prompts are computed one after the other, a token in a millisecond, by a clock
    of its own."""

    def __init__(self, policy: str = "lpm", max_overtakes: int = 1_000_000) -> None:
        self.now = 1000.0
        order = DueOrder(self.seconds, lambda _: 0, usual_ttft, WINDOW, lambda: self.now)
        self.queue = WaitingQueue(policy, RadixCache(4), max_overtakes, order)

    @staticmethod
    def seconds(request: Request, start: int = 0) -> float:
        return 1e-3 * (len(request.prompt) - start)

    def add(self, tokens: int, ttft: float, waited: float = 0.0) -> Request:
        request = make_request(np.full(tokens, tokens % 97), ttft=ttft)
        request.due_at = self.now - waited + ttft
        self.queue.add_request(request)
        return request

    def order(self) -> list[Request]:
        return list(self.queue.iter_candidates())

    def lengths(self) -> list[int]:
        return [len(request.prompt) for request in self.order()]

    def compute(self) -> Request:
        """Compute the prompt that goes first."""
        first = next(iter(self.queue.iter_candidates()))
        self.queue.admit_request(first)
        self.now += self.seconds(first)
        return first


# Queues of a node as they were recorded, by tokens and by seconds that they have waited, and the
# order under an objective.
RECORDED: list[tuple[str, float, list[tuple[int, float]], list[int]]] = [
    (
        "a burst: all are due at once, so the shortest go first and the longest are given up",
        1.0,
        [(6649, 0), (20, 0), (393, 0), (1482, 0), (45, 0), (267, 0), (570, 0), (981, 0)],
        [20, 45, 267, 393, 570, 981, 1482, 6649],
    ),
    (
        "the burst before left one that is late, and one that is not",
        1.0,
        [(910, 0.6), (150, 0.6), (300, 0), (310, 0), (30, 0)],
        [150, 30, 300, 310, 910],
    ),
    (
        "one that takes longer than the objective is late from the start",
        0.5,
        [(501, 0), (400, 0)],
        [400, 501],
    ),
    ("what is due first goes first where all can be in time", 2.0, [(90, 0), (500, 1)], [500, 90]),
    ("late ones follow, the shortest first", 0.1, [(300, 0), (200, 0.3), (99, 0)], [99, 200, 300]),
]


@pytest.mark.parametrize(("case", "ttft", "queue", "expected"), RECORDED)
def test_the_order_of_recorded_queues(
    case: str, ttft: float, queue: list[tuple[int, float]], expected: list[int]
) -> None:
    s = Simulation()
    for tokens, waited in queue:
        s.add(tokens, ttft, waited)
    assert s.lengths() == expected, case


def test_no_order_has_more_prompts_in_time(seed: int) -> None:
    rng = random.Random(seed)
    request = make_request([1])
    for _ in range(60):
        jobs = [
            Prospect(rng.uniform(0.1, 3), rng.choice([0.1, 0.4, 1.5, 3.1]), request)
            for _ in range(rng.randint(1, 6))
        ]
        timely, late = split_timely(jobs, 0.0)
        assert in_time(timely) == len(timely) == max(map(in_time, permutations(jobs))), seed
        assert sorted([*timely, *late]) == sorted(jobs), seed
        assert late == sorted(late, key=lambda each: each.seconds), seed


def in_time(jobs: Any) -> int:
    """Those of the jobs that are in time if they are done in this order."""
    end, count = 0.0, 0
    for job in jobs:
        end += job.seconds
        count += end <= job.due
    return count


# ---- cached prefixes


def test_a_longer_cached_prefix_goes_first_where_all_stay_in_time(seed: int) -> None:
    rng = random.Random(seed)
    request = make_request([1])
    moved = 0
    for _ in range(200):
        jobs = [
            Prospect(rng.uniform(0.1, 9), rng.uniform(0.1, 2), request, rng.randint(0, 3))
            for _ in range(rng.randint(1, 5))
        ]
        timely, _ = split_timely(jobs, 0.0)
        chosen = prefer_cached(timely, 0.0, 8)
        assert sorted(chosen) == sorted(timely)
        assert in_time(chosen) == len(timely), seed
        moved += chosen != timely
        if chosen:
            first = [
                order[0].cached for order in permutations(timely) if in_time(order) == len(timely)
            ]
            assert chosen[0].cached == max(first), seed
    assert moved > 20


def test_objectives_leave_the_hit_rate_of_lpm(seed: int) -> None:
    """200 prompts at once. Nothing is stated of them, so they have the usual objectives. Of four
    queues, because a single one may lose more by chance."""
    rng = random.Random(seed)
    found = []
    for kind in ("documents", "turns", "documents", "turns"):
        prompts = make_workload(rng, kind, 200)
        by_prefix = serve_cached(prompts, "lpm")
        found.append([*by_prefix, *serve_cached(prompts, "lpm", by_due=True)])
    hits, late, hits_by_due, late_by_due = np.sum(found, axis=0)
    print(f"seed {seed}: {found}")
    assert hits_by_due >= 0.95 * hits
    assert late_by_due <= 1.02 * late


@pytest.mark.full
@pytest.mark.parametrize("kind", ["documents", "turns"])
def test_under_load_objectives_keep_most_hits_and_fewer_are_late(kind: str, seed: int) -> None:
    """Than in the order of arrival, where the pool makes the rate too high."""
    prompts = make_workload(random.Random(seed), kind, 200)
    hit_rate, _ = serve_cached(prompts, "lpm", load=0.8)
    _, late = serve_cached(prompts, "fcfs", load=0.8)
    found, missed = serve_cached(prompts, "lpm", load=0.8, by_due=True)
    print(f"seed {seed}: hit rate {hit_rate:.3f} and {found:.3f}, late {late} and {missed}")
    assert found >= 0.9 * hit_rate
    assert missed < 0.9 * late


# ---- bounds


def test_a_prompt_that_waited_twice_its_patience_goes_first() -> None:
    s = Simulation()
    late = s.add(150, 1.0, waited=1.95)
    later = s.add(140, 1.0, waited=1.85)
    urgent = s.add(100, 1.0, waited=0.7)
    assert s.order() == [urgent, later, late]
    s.now += 0.06
    assert s.order() == [late, urgent, later], "its patience is that of the objective"
    s.now += 0.1
    assert s.order() == [late, urgent, later], "owed and timely ones take turns"
    s.queue.admit_request(late)
    assert s.order() == [urgent, later]
    s.queue.admit_request(urgent)
    assert s.order() == [later]


def test_a_short_objective_does_not_have_a_long_prompt_overtake_all_others_soon() -> None:
    """It may wait for as long as if nothing were stated: what it takes itself would make all
    others late."""
    s = Simulation()
    long = s.add(5000, 1.0, waited=30.0)
    short = s.add(100, 1.0)
    assert s.order() == [short, long]
    s.now += 2 * usual_ttft(long) - 30.0
    assert s.order() == [long, short]


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


def test_only_a_window_of_prompts_is_predicted() -> None:
    asked: list[Any] = []

    def seconds(request: Request, start: int) -> float:
        asked.append(request)
        return 0.0

    order = DueOrder(seconds, lambda _: 0, lambda _: 0.0, 4, lambda: 0.0)
    requests = [make_request([1] * 4, ttft=5.0) for _ in range(10)]
    assert len(order(requests)) == 10
    assert asked == requests[:4]


# ---- loads

# Loads and seconds between bursts that are tried without the others.
SAMPLE = ((0.9, 0.0), (0.9, 3.0))


def make_load(rng: random.Random, load: float, burst: float) -> list[tuple[float, int]]:
    """Seconds and tokens of half a minute of prompts, most of them short, at multiples of
    ``burst``; with ``load`` 1 there is just time for all."""
    found, at = [], 0.0
    while at < 30.0:
        tokens = int(min(4000, max(5, rng.lognormvariate(4.6, 1.3))))
        at += rng.expovariate(load / 0.226)
        found.append((at // burst * burst if burst else at, tokens))
    return found


def serve(
    load: list[tuple[float, int]], objective: float | None, policy: str = "lpm"
) -> list[float]:
    """The seconds to all first tokens. ``objective``: None for what nothing is stated of."""
    s = Simulation(policy)
    begin, arrivals = s.now, list(load)
    waiting: dict[Request, float] = {}
    served = []
    is_turn_of_owed = True
    while arrivals or waiting:
        while arrivals and (not waiting or begin + arrivals[0][0] <= s.now):
            came, tokens = arrivals.pop(0)
            s.now = max(s.now, begin + came)
            ttft = usual(tokens) if objective is None else objective
            waiting[s.add(tokens, ttft, waited=s.now - begin - came)] = begin + came
        before = s.now
        first = s.compute()
        came = waiting.pop(first)
        served.append(s.now - came)
        if policy != "priority":  # which ends all overtaking
            owed = [
                other
                for other, at in waiting.items()
                if before >= at + 2 * max(other.ttft, usual_ttft(other))
            ]
            is_owed = before >= came + 2 * max(first.ttft, usual_ttft(first))
            assert is_owed or not owed or not is_turn_of_owed
            if is_owed:
                assert all(first.due_at <= other.due_at for other in owed)
            is_turn_of_owed = not is_owed
    return served


@pytest.mark.parametrize(
    ("load", "burst"),
    [
        pytest.param(load, burst, marks=() if (load, burst) in SAMPLE else pytest.mark.full)
        for load in (0.5, 0.9, 1.3)
        for burst in (0.0, 1.0, 3.0, 6.0)
    ],
)
def test_a_stated_objective_is_met_by_no_fewer_than_the_usual_ones(
    burst: float, load: float, seed: int
) -> None:
    """And by no fewer than in order of arrival; and nobody is passed over beyond the bound."""
    objectives = (0.3, 1.0, 4.0)
    counts = {"stated": 0, "usual": 0, "by age": 0}
    for number in range(4):
        arrivals = make_load(random.Random(seed + number), load, burst)
        without = serve(arrivals, None)
        for objective in objectives:
            for name, served in (
                ("stated", serve(arrivals, objective)),
                ("usual", without),
                ("by age", serve(arrivals, objective, "priority")),
            ):
                counts[name] += sum(seconds <= objective for seconds in served)
    # By chance, since nobody knows what comes next, some may be lost where hardly any is late.
    assert counts["stated"] >= 0.99 * max(counts["usual"], counts["by age"]), (counts, seed)
    if load > 0.5:
        assert counts["stated"] >= counts["by age"], (counts, seed)


# ---- prompts that run


def late_bench(now: list[float]) -> PrefillBench:
    """A scheduler that computes a token in a millisecond, 100 in a step."""
    bench = PrefillBench(budget=100, pages=4096)
    order = DueOrder(Simulation.seconds, lambda _: 0, usual_ttft, WINDOW, lambda: now[0])
    bench.scheduler.waiting = WaitingQueue("lpm", RadixCache(4), 64, order)
    return bench


def add(bench: PrefillBench, name: int, tokens: int, due: float) -> Request:
    request = bench.add([name] * tokens, ttft=1.0)
    request.due_at = due
    return request


def test_a_prompt_that_will_be_late_leaves_most_of_a_step_to_one_that_can_be_in_time() -> None:
    now = [1000.0]
    bench = late_bench(now)
    late = add(bench, 1, 3000, 1001.0)
    assert [(work.start, work.stop) for work in bench.step()] == [(0, 100)], "it is alone"
    timely = add(bench, 2, 700, 1001.0)
    taken = {work.sequence.request: work.stop - work.start for work in bench.step()}
    assert taken == {late: 13, timely: 87}
    now[0] += 2 * usual_ttft(late)
    taken = {work.sequence.request: work.stop - work.start for work in bench.step()}
    assert taken[late] == 50, "it was passed over for long enough"


def test_only_one_that_can_be_in_time_goes_beside_one_that_will_be_late() -> None:
    now = [1000.0]
    bench = late_bench(now)
    late = add(bench, 1, 1500, 1001.0)
    bench.step()
    add(bench, 2, 1300, 1001.0)
    bench.step()
    assert bench.scheduler.running == [late], "it will be late, too, and not much earlier"
    timely = add(bench, 3, 800, 1001.0)
    bench.step()
    assert bench.scheduler.running == [late, timely]
