"""The breaker of one node, on a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pd.proxy.dispatch.failover import _blame_nodes as blame
from pd.proxy.nodes.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, RESET_SECONDS, Breaker
from pd.proxy.nodes.node_handle import NodeHandle


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def fail(breaker: Breaker, times: int) -> None:
    for number in range(times):
        breaker.note_failure([f"request {number}"], "why")


def test_failures_with_output_in_between_take_no_node_out(breaker: Breaker) -> None:
    for _ in range(10):
        fail(breaker, FAILURES - 1)
        breaker.note_success("another")
    assert breaker.allows_requests and not breaker.problem


def test_requests_that_fail_together_count_once(breaker: Breaker) -> None:
    for _ in range(FAILURES - 1):
        breaker.note_failure([f"request {number}" for number in range(100)], "why")
    assert breaker.allows_requests
    breaker.note_failure(["another"], "why")
    assert not breaker.allows_requests


def test_transfers_that_one_reset_ends_count_once(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAILURES - 1):
        for number in range(100):
            breaker.note_failure([number], "why", "partner")
        clock.now += RESET_SECONDS
    assert breaker.allows_requests
    breaker.note_failure(["another"], "why", "partner")
    assert not breaker.allows_requests


def test_failures_with_several_partners_at_once_are_as_many(breaker: Breaker) -> None:
    for number in range(FAILURES):
        breaker.note_failure([number], "why", f"partner {number}")
    assert not breaker.allows_requests


@pytest.mark.parametrize("elastic", [False, True])
def test_one_reset_takes_out_neither_nodes_nor_pairs(elastic: bool) -> None:
    nodes = [NodeHandle("prefill", "http://p"), NodeHandle("decode", "http://d")]
    way = Breaker() if elastic else None
    for _ in range(2 * FAILURES):
        attempt: Any = SimpleNamespace(
            hand_off=way, nodes=nodes, decode_node=nodes[1], get_partner=lambda _: nodes[0]
        )
        blame(attempt, nodes[1], "pair", "why")
    assert all(node.breaker.allows_requests for node in nodes)
    assert way is None or way.allows_requests


def test_a_node_is_out_until_a_probe_succeeds(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    assert not breaker.allows_requests and not breaker.awaits_probe
    assert breaker.problem == f"taken out after {FAILURES} failures in a row, the last: why"
    clock.now += FIRST_PAUSE
    assert breaker.awaits_probe and not breaker.allows_requests
    breaker.begin_attempt("probe")
    assert not breaker.awaits_probe
    breaker.note_success("one that was there before")
    assert not breaker.allows_requests
    breaker.note_success("probe")
    assert breaker.allows_requests and not breaker.problem


def test_each_probe_that_fails_doubles_the_pause(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    pause = FIRST_PAUSE
    for number in range(8):
        clock.now += pause
        breaker.begin_attempt(number)
        breaker.note_failure(["one that was there before"], "why")
        breaker.note_failure([number], "why")
        breaker.end_attempt(number)
        pause = min(2 * pause, LONGEST_PAUSE)
        clock.now += pause - 0.01
        assert not breaker.awaits_probe
        clock.now += 0.01
        assert breaker.awaits_probe
        clock.now -= pause


def test_a_probe_that_ends_without_a_result_makes_room_for_another(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, FAILURES)
    clock.now += FIRST_PAUSE
    breaker.begin_attempt("probe")
    breaker.end_attempt("probe")
    assert breaker.awaits_probe


def test_failures_with_a_partner_that_is_replaced_are_forgotten(
    breaker: Breaker, clock: Clock
) -> None:
    for number in range(FAILURES):
        breaker.note_failure([number], "why", "partner")
        clock.now += RESET_SECONDS
    clock.now += FIRST_PAUSE
    breaker.begin_attempt("probe")
    breaker.note_failure(["probe"], "why", "another partner")
    breaker.end_attempt("probe")
    breaker.forget_partner("another partner")
    assert not breaker.allows_requests
    breaker.forget_partner("partner")
    assert breaker.allows_requests and not breaker.problem
    fail(breaker, FAILURES)
    clock.now += FIRST_PAUSE
    assert breaker.awaits_probe, "the pause is the first one again"


def test_failures_of_its_own_keep_a_node_out_whatever_becomes_of_its_partner(
    breaker: Breaker,
) -> None:
    breaker.note_failure(["one"], "why", "partner")
    fail(breaker, FAILURES)
    breaker.forget_partner("partner")
    assert not breaker.allows_requests


def test_a_stuck_node_is_out_until_its_step_ends(breaker: Breaker, clock: Clock) -> None:
    breaker.is_stuck = True
    clock.now += 1000
    assert not breaker.allows_requests and breaker.problem
    breaker.is_stuck = False
    assert breaker.allows_requests


def test_a_failed_hand_off_of_a_probe_is_one_of_the_probed_node(clock: Clock) -> None:
    way, node, partner = Breaker(clock), Breaker(clock), Breaker(clock)
    nodes = [NodeHandle("prefill", "http://p"), NodeHandle("decode", "http://d")]
    nodes[0].breaker, nodes[1].breaker = node, partner
    probe: Any = SimpleNamespace(
        hand_off=way, nodes=nodes, decode_node=nodes[1], get_partner=lambda _: None
    )
    fail(node, FAILURES)
    clock.now += FIRST_PAUSE
    node.begin_attempt(probe)
    blame(probe, nodes[1], "pair", "why")
    node.end_attempt(probe)
    clock.now += FIRST_PAUSE
    assert not node.awaits_probe, "its pause is no longer than the first"
    clock.now += FIRST_PAUSE
    assert node.awaits_probe
    fail(way, FAILURES - 2)
    assert way.allows_requests and partner.allows_requests
    fail(way, 1)
    assert not way.allows_requests
