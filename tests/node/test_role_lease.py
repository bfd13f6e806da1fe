"""A node's role is moved by one proxy at a time, and by administrators."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pd.core.messages import LEASE_SECONDS, PreferRole, RoleState
from pd.node.role_lease import RoleLease

if TYPE_CHECKING:
    from pd.core.node_info import Role


def order(role: Role | None, *, term: int = 0, fixed: bool = False) -> PreferRole:
    return PreferRole(to="node", sender="proxy", role=role, fixed=fixed, term=term)


def test_the_first_proxy_that_asks_gets_the_lease_and_keeps_it() -> None:
    lease, now = RoleLease(), 10.0
    assert lease.describe_state(now) == RoleState()
    for _ in range(20):
        lease.note_request(b"one", now, wanted=True)
        lease.note_request(b"two", now, wanted=True)
        now += 0.5
    assert lease.describe_state(now) == RoleState(decider="one", term=1)
    assert not lease.follow_order(b"two", order("decode", term=1), now)
    assert lease.follow_order(b"one", order("decode", term=1), now)
    assert lease.describe_state(now) == RoleState("decode", False, "one", 1)


def test_a_lease_that_was_not_renewed_goes_to_the_next_that_asks() -> None:
    lease = RoleLease()
    lease.note_request(b"one", 0.0, wanted=True)
    late = LEASE_SECONDS + 0.1
    assert lease.describe_state(late).decider == ""
    lease.note_request(b"two", late, wanted=True)
    assert lease.describe_state(late) == RoleState(decider="two", term=2)


def test_an_order_of_a_lease_that_ended_is_refused_for_ever() -> None:
    """The proxy stood still with the order on its way, and has the lease again when it arrives."""
    lease = RoleLease()
    lease.note_request(b"one", 0.0, wanted=True)
    stale = order("decode", term=1)
    assert not lease.follow_order(b"one", stale, LEASE_SECONDS + 0.1), "nobody has the lease"
    lease.note_request(b"one", 10.0, wanted=True)
    assert not lease.follow_order(b"one", stale, 10.0), "it has another one"
    assert lease.follow_order(b"one", order("decode", term=2), 10.0)


def test_a_proxy_that_stands_down_lets_another_have_the_lease_at_once() -> None:
    lease = RoleLease()
    lease.note_request(b"one", 0.0, wanted=True)
    lease.note_request(b"two", 0.1, wanted=False)
    assert lease.describe_state(0.1).decider == "one"
    lease.note_request(b"one", 0.2, wanted=False)
    lease.note_request(b"two", 0.3, wanted=True)
    assert lease.describe_state(0.3) == RoleState(decider="two", term=2)


def test_what_an_administrator_set_stays() -> None:
    lease = RoleLease()
    lease.note_request(b"one", 0.0, wanted=True)
    assert lease.follow_order(b"two", order("prefill", fixed=True), 0.0), "which needs no lease"
    assert not lease.follow_order(b"one", order("decode", term=1), 0.0)
    assert lease.describe_state(0.0) == RoleState("prefill", True, "one", 1, 1)
    assert lease.follow_order(b"one", order("unified", fixed=True), 0.0)


def test_an_administrator_leaves_the_role_to_proxies_again() -> None:
    lease = RoleLease()
    lease.note_request(b"one", 0.0, wanted=True)
    assert lease.follow_order(b"two", order("prefill", fixed=True), 0.0)
    assert not lease.follow_order(b"one", order(None, term=1), 0.0), "no administrator wants it"
    assert lease.follow_order(b"two", order(None, fixed=True), 0.0)
    assert lease.describe_state(0.0) == RoleState("prefill", False, "one", 1, 2)
    assert lease.follow_order(b"one", order("decode", term=1), 0.0)


def test_no_two_proxies_move_the_role_in_one_term(seed: int) -> None:
    """Proxies that ask, fall silent, stand down and send orders of the past."""
    rng, lease, now = random.Random(seed), RoleLease(), 0.0
    proxies = [b"a", b"b", b"c"]
    known: dict[bytes, int] = {}
    moved: dict[int, bytes] = {}
    last = 0
    for _ in range(20_000):
        now += rng.choice([0.1, 0.5, 0.5, LEASE_SECONDS])
        proxy = rng.choice(proxies)
        lease.note_request(proxy, now, wanted=rng.random() < 0.9)
        state = lease.describe_state(now)
        assert state.term >= last
        last = state.term
        if state.decider == proxy.decode():
            known[proxy] = state.term
        mover = rng.choice(proxies)
        if lease.follow_order(mover, order("decode", term=known.get(mover, 0)), now):
            assert moved.setdefault(last, mover) == mover, seed
            assert lease.describe_state(now).decider == mover.decode(), seed
    assert len(moved) > 100
