"""Which requests are held to be what nodes die of, on a clock of the test."""

from __future__ import annotations

import random

from pd.core.messages import LEASE_SECONDS, NodeHeartbeat
from pd.proxy.dispatch.suspicion import (
    AT_ONCE_SECONDS,
    BROKEN_SECONDS,
    DEATHS_IN_COMPANY,
    WINDOW_SECONDS,
    Death,
    Suspicion,
)
from pd.proxy.nodes.node_handle import NodeHandle

R, S, T = (("owner", name) for name in "RST")


class Deaths:
    """Nodes that die, each with these requests in its step, a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0
        self.suspicion = Suspicion(lambda: self.now)
        self._count = 0

    def of(self, *requests: tuple[str, str], after: float = 1.0, others: bool = False) -> Death:
        self.now += after
        self._count += 1
        return self.suspicion.note_death(f"node {self._count}", requests, others=others)


def test_what_two_nodes_died_of_alone_is_given_no_third() -> None:
    deaths = Deaths()
    first = deaths.of(R)
    assert not deaths.suspicion.is_guilty(R, (first,))
    assert deaths.suspicion.is_guilty(R, (first, deaths.of(R)))


def test_two_nodes_that_are_killed_at_once_are_no_reason_to_stop_a_request() -> None:
    deaths = Deaths()
    row = (deaths.of(R), deaths.of(R, after=AT_ONCE_SECONDS / 2))
    assert not deaths.suspicion.is_guilty(R, row)
    assert deaths.suspicion.is_guilty(R, (*row, deaths.of(R, after=0.0)))


def test_a_request_that_was_not_in_every_step_does_not_share_the_suspicion() -> None:
    deaths = Deaths()
    row = (deaths.of(R, S), deaths.of(R, T))
    assert deaths.suspicion.is_guilty(R, row)
    assert not deaths.suspicion.is_guilty(S, row[:1])


def test_those_that_were_in_the_same_steps_are_given_one_more_node() -> None:
    deaths = Deaths()
    row = (deaths.of(R, S), deaths.of(R, S))
    assert not deaths.suspicion.is_guilty(R, row)
    assert not deaths.suspicion.is_guilty(S, row)
    row = (*row, deaths.of(R))
    assert deaths.suspicion.is_guilty(R, row)
    assert len(row) == DEATHS_IN_COMPANY


def test_a_node_that_hangs_after_a_failed_step_has_died_once_for_as_long_as_it_hangs() -> None:
    deaths = Deaths()
    first = deaths.suspicion.note_step_failure("node", [R])
    for _ in range(4):
        deaths.now += BROKEN_SECONDS / 2
        assert deaths.suspicion.note_death("node", []) is first
    deaths.now += 1.0
    assert deaths.suspicion.is_guilty(R, (first, deaths.of(R)))


def test_requests_of_other_processes_are_company_that_nobody_here_knows() -> None:
    deaths = Deaths()
    row = (deaths.of(R, others=True), deaths.of(R, others=True))
    assert not deaths.suspicion.is_guilty(R, row)
    assert deaths.suspicion.is_guilty(R, (*row, deaths.of(R)))
    row = (deaths.of(S, others=True), deaths.of(S))
    assert deaths.suspicion.is_guilty(S, row)


def test_a_node_has_others_if_two_heartbeats_in_a_row_count_more_than_was_sent() -> None:
    node = NodeHandle("decode", "http://127.0.0.1:1")
    found = []
    for running in (1, 0, 2, 3, 1, 0):
        beat = NodeHeartbeat(to="p", sender="d", ready=True, queued_tokens=0, running=running)
        node.take_heartbeat(beat)
        found.append(node.num_others)
    assert found == [0, 0, 0, 2, 1, 0]


def test_each_death_without_a_request_takes_one_more_with_it() -> None:
    deaths = Deaths()
    deaths.of()
    row = [deaths.of(R)]
    deaths.of(S)
    for _ in range(2):
        row.append(deaths.of(R))
        assert not deaths.suspicion.is_guilty(R, tuple(row))
    row.append(deaths.of(R))
    assert deaths.suspicion.is_guilty(R, tuple(row))


def test_old_deaths_without_a_request_say_nothing() -> None:
    deaths = Deaths()
    deaths.of()
    deaths.now += WINDOW_SECONDS
    row = (deaths.of(R), deaths.of(R))
    assert deaths.suspicion.is_guilty(R, row)


def test_what_one_request_is_convicted_of_says_nothing_in_favour_of_another() -> None:
    deaths = Deaths()
    row = (deaths.of(R), deaths.of(R))
    assert deaths.suspicion.is_guilty(R, row)
    row = (deaths.of(S), deaths.of(S))
    assert deaths.suspicion.is_guilty(S, row)


def test_a_node_that_hangs_and_then_dies_has_died_once() -> None:
    deaths = Deaths()
    first = deaths.suspicion.note_death("node", [R])
    assert deaths.suspicion.note_death("node", []) is first
    assert deaths.suspicion.is_guilty(R, (first, deaths.of(R)))


def test_a_node_that_hangs_works_and_hangs_again_has_hung_twice() -> None:
    deaths = Deaths()
    first = deaths.suspicion.note_death("node", [R])
    deaths.suspicion.note_recovery("node")
    deaths.now += 1.0
    assert deaths.suspicion.is_guilty(R, (first, deaths.suspicion.note_death("node", [R])))


def test_a_node_that_works_behind_a_failed_step_may_still_end_of_that() -> None:
    deaths = Deaths()
    first = deaths.suspicion.note_step_failure("node", [R])
    deaths.suspicion.note_recovery("node")
    assert deaths.suspicion.note_death("node", []) is first


def test_a_death_that_peers_reported_first_does_not_speak_for_their_requests() -> None:
    deaths = Deaths()
    deaths.suspicion.note_report("node", R)
    deaths.suspicion.note_report("another", S)
    deaths.now += LEASE_SECONDS / 2
    assert deaths.suspicion.note_death("node", [T]).requests == {R, T}
    deaths.now += LEASE_SECONDS
    assert deaths.suspicion.note_death("another", []).requests == frozenset()


def test_a_node_that_fails_a_step_and_then_ends_has_died_once() -> None:
    deaths = Deaths()
    first = deaths.suspicion.note_step_failure("node", [R])
    deaths.now += BROKEN_SECONDS / 2
    assert deaths.suspicion.note_death("node", []) is first
    assert deaths.suspicion.is_guilty(R, (first, deaths.of(R)))


def test_a_node_that_ends_long_after_a_step_that_it_failed_has_died_of_something_else() -> None:
    deaths = Deaths()
    first = deaths.suspicion.note_step_failure("node", [R])
    deaths.now += 1.1 * BROKEN_SECONDS
    deaths.suspicion.note_death("node", [])
    assert not deaths.suspicion.is_guilty(R, (first, deaths.of(R)))


def test_requests_that_a_broken_node_got_do_not_speak_for_what_broke_it() -> None:
    deaths = Deaths()
    first = deaths.suspicion.note_step_failure("node", [R])
    deaths.now += 1.0
    assert deaths.suspicion.note_death("node", [S]).requests == {R, S}
    assert deaths.suspicion.is_guilty(R, (first, deaths.of(R)))


def test_every_step_that_one_node_fails_counts() -> None:
    deaths = Deaths()
    row = [deaths.suspicion.note_step_failure("node", [R])]
    deaths.now += 1.0
    assert deaths.suspicion.is_guilty(R, (*row, deaths.suspicion.note_step_failure("node", [R])))


def test_nodes_killed_at_random_convict_hardly_anybody(seed: int) -> None:
    """Half of the nodes that die had nothing in a step; the request makes no progress at all."""
    rng = random.Random(seed)
    convicted = 0
    for _ in range(100):
        deaths, row = Deaths(), list[Death]()
        for _ in range(6):
            deaths.of()
        for _ in range(12):
            if rng.random() < 0.5:
                row.append(deaths.of(R, S))
            else:
                deaths.of()
        convicted += any(
            deaths.suspicion.is_guilty(R, tuple(row[:end])) for end in range(1, len(row) + 1)
        )
    assert convicted <= 5
