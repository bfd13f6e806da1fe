"""Leases: which processes count as alive, even if this process itself stalls."""

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
    """Check ten times a second, as nodes do. Returns the expired processes."""
    found: list[str] = []
    while clock[0] < until:
        clock[0] += 0.1
        found += [name for name in leases.find_expired(clock[0]) if name not in found]
    return found


def test_a_silent_process_loses_its_lease(clock: list[float]) -> None:
    leases: Leases[str] = Leases()
    leases.renew_lease("a")
    assert look_until(leases, clock, 1000 + LEASE_SECONDS - 0.2) == []
    assert look_until(leases, clock, 1000 + LEASE_SECONDS + 0.2) == ["a"]


def test_a_sign_of_life_renews_the_lease(clock: list[float]) -> None:
    leases: Leases[str] = Leases()
    for _ in range(5):
        leases.renew_lease("a")
        assert look_until(leases, clock, clock[0] + LEASE_SECONDS - 0.2) == []


def test_a_dropped_process_is_forgotten(clock: list[float]) -> None:
    leases: Leases[str] = Leases()
    leases.renew_lease("a")
    assert "a" in leases and list(leases) == ["a"] and len(leases) == 1
    assert leases.drop_lease("a")
    assert not leases.drop_lease("a")
    assert look_until(leases, clock, 1010) == []


def test_a_stall_of_this_process_extends_all_leases(clock: list[float]) -> None:
    leases: Leases[str] = Leases()
    leases.renew_lease("alive")
    leases.renew_lease("dead")
    leases.find_expired(clock[0])
    clock[0] += 60.0  # stopped, with everything that the others said unread
    assert leases.find_expired(clock[0]) == []
    leases.renew_lease("alive")
    assert look_until(leases, clock, clock[0] + 1.5) == ["dead"]
