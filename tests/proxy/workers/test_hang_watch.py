"""Which children of a proxy of several processes hang, and which only got no CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pd.proxy.workers.hangs import HANG_SECONDS, HangWatch
from pd.proxy.workers.ledger import Ledger
from pd.util.starvation import largest_growth

_INTERVAL = 1.0


class Child:
    """A child whose event loop turns when the test says so."""

    def __init__(self, memory: memoryview, number: int) -> None:
        self.number, self.pid = number, 1000 + number
        self.kills = 0
        self.delay = 0.0
        self._ledger = Ledger(memory, number)

    def turn(self) -> None:
        self._ledger.note_turn(0)

    def send_kill(self) -> None:
        self.kills += 1


class World:
    """Children, the watch over them and a clock."""

    def __init__(self, count: int, *, counts_delays: bool = True) -> None:
        self.memory = memory = memoryview(bytearray(Ledger.get_size(count)))
        self.children: Any = [Child(memory, number) for number in range(count)]
        self.now = 0.0
        self._counts_delays = counts_delays
        self.watch = HangWatch(lambda: self.children, Ledger(memory), self._read, lambda: self.now)

    def look(self, late: float = 0.0) -> None:
        self.now += _INTERVAL + late
        self.watch.check_children(_INTERVAL)

    def _read(self, pid: int) -> dict[int, float] | None:
        return {pid: self.children[pid - 1000].delay, 1: 0.5} if self._counts_delays else None


def test_only_a_child_that_had_a_cpu_and_did_not_turn_is_ended() -> None:
    """The parent stands still or is late at random moments, with all children or without them."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(50):
        world = World(4)
        healthy, starved, pausing, hung = world.children
        for child in world.children:
            child.turn()
        pauses = chance.randrange(2, 50)
        for look in range(1, 200):
            late = chance.choice((0.0, chance.random(), 10 * HANG_SECONDS))
            # A parent that was stopped together with its children may go on before they do.
            were_stopped = late > HANG_SECONDS and chance.random() < 0.5
            if not were_stopped:
                healthy.turn()
            if not look % pauses:
                pausing.turn()
            starved.delay += _INTERVAL + late
            world.look(late)
            if hung.kills:
                break
            if were_stopped:
                healthy.turn()
        assert HANG_SECONDS <= look <= HANG_SECONDS + 3
        assert [child.kills for child in world.children] == [0, 0, 0, 1]
        world.look()
        assert hung.kills == 1, "once is enough"


def test_a_child_that_gets_little_cpu_has_so_much_longer() -> None:
    world = World(1)
    (child,) = world.children
    child.turn()
    looks = 0
    while not child.kills:
        child.delay += 0.75 * _INTERVAL
        world.look()
        looks += 1
    assert 4 * HANG_SECONDS - 4 <= looks <= 4 * HANG_SECONDS + 4


def test_where_delays_are_not_counted_the_parents_lateness_takes_their_place() -> None:
    world = World(1, counts_delays=False)
    (child,) = world.children
    child.turn()
    for _ in range(300):
        world.look(late=_INTERVAL)
    assert child.kills == 0
    for _ in range(int(HANG_SECONDS) + 1):
        world.look()
    assert child.kills == 1


def test_a_child_that_imports_its_modules_and_one_that_has_begun_anew_do_not_hang() -> None:
    world = World(1)
    for _ in range(300):
        world.look()
    assert world.children[0].kills == 0
    world.children[0].turn()
    for _ in range(int(HANG_SECONDS) - 5):
        world.look()
    first, world.children[0] = world.children[0], Child(world.memory, 0)
    for _ in range(int(HANG_SECONDS) - 5):
        world.look()
    assert first.kills == world.children[0].kills == 0


@pytest.mark.parametrize(
    ("last", "delays", "grown"),
    [({}, {}, 0.0), ({1: 2.0, 2: 5.0}, {1: 3.0, 2: 5.5}, 1.0), ({1: 2.0}, {3: 0.5}, 0.5)],
)
def test_a_process_is_delayed_as_its_most_delayed_thread_is(
    last: dict[int, float], delays: dict[int, float], grown: float
) -> None:
    assert largest_growth(last, delays) == grown
