"""Who is believed to live, also when this process itself stood still."""

from __future__ import annotations

import time

import pytest

from pd.core.leases import Leases
from pd.core.messages import LEASE_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def look_until(leases: Leases[str], clock: list[float], until: float) -> list[str]:
    """Look ten times a second, as nodes do; returns who expired."""
    found: list[str] = []
    while clock[0] < until:
        clock[0] += 0.1
        found += [name for name in leases.expired(clock[0]) if name not in found]
    return found


def test_silence_for_a_lease_ends_it(clock: list[float]) -> None:
    leases: Leases[str] = Leases()
    leases.renew("a")
    assert look_until(leases, clock, 1000 + LEASE_SECONDS - 0.2) == []
    assert look_until(leases, clock, 1000 + LEASE_SECONDS + 0.2) == ["a"]


def test_a_sign_of_life_renews_it(clock: list[float]) -> None:
    leases: Leases[str] = Leases()
    for _ in range(5):
        leases.renew("a")
        assert look_until(leases, clock, clock[0] + LEASE_SECONDS - 0.2) == []


def test_who_is_dropped_is_forgotten(clock: list[float]) -> None:
    leases: Leases[str] = Leases()
    leases.renew("a")
    assert "a" in leases and list(leases) == ["a"] and len(leases) == 1
    assert leases.drop("a")
    assert not leases.drop("a")
    assert look_until(leases, clock, 1010) == []


def test_own_standstill_is_not_held_against_the_others(clock: list[float]) -> None:
    leases: Leases[str] = Leases()
    leases.renew("alive")
    leases.renew("dead")
    leases.expired(clock[0])
    clock[0] += 60.0  # stopped, with everything that the others said unread
    assert leases.expired(clock[0]) == []
    leases.renew("alive")
    assert look_until(leases, clock, clock[0] + 1.5) == ["dead"]
