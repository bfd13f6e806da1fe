"""Prefix leases: who gets one, when it ends, and that running requests take the pages anyway."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pd.radix import RadixCache, check_invariants
from pd.scheduling import prefix_leases
from pd.scheduling.prefix_leases import PrefixLeases

if TYPE_CHECKING:
    from pd.radix import TreeNode

PAGES = 80  # an owner may lease 10 of them, and all owners 40


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(prefix_leases, "time", clock)
    return clock


class Prompts:
    """A cache of pages of one token, filled with prompts that share nothing."""

    def __init__(self) -> None:
        self.radix = RadixCache(1)
        self.leases = PrefixLeases(self.radix, PAGES)
        self.count = 0

    def insert(self, pages: int) -> TreeNode:
        tokens = np.arange(self.count, self.count + pages, dtype=np.int32)
        self.count += pages
        return self.radix.insert_prefix(tokens, tokens.copy()).handle

    def lease(self, owner: str, rid: str, pages: int, seconds: float = 60.0) -> bool:
        return self.leases.add_lease(owner, rid, self.insert(pages), pages, seconds)


@pytest.fixture
def prompts(clock: Clock) -> Prompts:
    return Prompts()


def test_a_leased_prefix_outlives_newer_ones(prompts: Prompts) -> None:
    assert prompts.lease("a", "r", 5)
    prompts.insert(20)
    assert prompts.radix.evict_pages(20).min() >= 5
    assert prompts.radix.evict_pages(3).tolist() == [2, 3, 4]
    assert prompts.leases.count_leases() == {"leases": 1, "pages": 2, "granted": 1, "refused": 0}


def test_an_expired_lease_keeps_nothing(prompts: Prompts, clock: Clock) -> None:
    prompts.lease("a", "r", 5, seconds=30)
    clock.now += 31
    prompts.insert(5)
    prompts.leases.end_expired()
    assert sorted(prompts.radix.evict_pages(5)) == [0, 1, 2, 3, 4]


def test_a_request_has_one_lease(prompts: Prompts) -> None:
    assert prompts.lease("a", "r", 6)
    assert prompts.lease("a", "r", 7)
    assert prompts.leases.count_leases()["pages"] == 7


def test_an_owners_oldest_leases_end_first(prompts: Prompts) -> None:
    for number in range(4):
        assert prompts.lease("a", str(number), 4)
    assert prompts.lease("b", "0", 4)
    assert prompts.leases.count_leases()["pages"] == 12
    prompts.leases.end_lease("a", "1")
    assert prompts.leases.count_leases()["pages"] == 12, "the second lease had ended before"
    prompts.leases.end_lease("a", "3")
    assert prompts.leases.count_leases()["pages"] == 8


def test_a_prefix_beyond_the_owners_share_is_refused(prompts: Prompts) -> None:
    assert prompts.lease("a", "r", 3)
    assert not prompts.lease("a", "s", 11)
    assert prompts.leases.count_leases() == {"leases": 1, "pages": 3, "granted": 1, "refused": 1}


def test_all_owners_together_get_half_of_the_pool(prompts: Prompts) -> None:
    granted = [prompts.lease(str(owner), "r", 10) for owner in range(6)]
    assert granted == [True] * 4 + [False] * 2


def test_any_order_of_operations_keeps_the_books(prompts: Prompts, clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        owner, rid = rng.choice("abcde"), rng.choice("rst")
        match rng.randrange(4):
            case 0 | 1:
                prompts.lease(owner, rid, rng.randrange(1, 13), rng.uniform(0, 9))
            case 2:
                prompts.leases.end_lease(owner, rid)
            case _:
                prompts.radix.evict_pages(rng.randrange(20))
        clock.now += rng.uniform(0, 2)
        check_invariants(prompts.radix)
        assert prompts.leases.count_leases()["pages"] <= PAGES // 2, seed
    clock.now += 60
    assert prompts.leases.count_leases()["leases"] == prompts.radix.leased_pages == 0
