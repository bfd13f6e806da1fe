"""No room ever sees a foreign byte, whatever is aborted, restarted, duplicated or late.

``PD_TEST_SEED=n`` picks other schedules; a failure names the seed of its schedule.
"""

from __future__ import annotations

import time

import pytest
from late_writes import EXTRA_PLANES, ForeignBytes, Schedule
from transfer_helpers import SEED, backends

_WIDTH = 8


def run_all(
    backend: str, count: int, *, careless: str = "", series: str = "", planes: bool = False
) -> list[Schedule]:
    """Run schedules, a few at a time since they mostly wait."""
    print(f"PD_TEST_SEED={SEED}: {count} schedules of {backend}")
    waiting = [
        (seed, Schedule(backend, seed, careless=careless, extra_planes=EXTRA_PLANES * planes))
        for seed in (f"{SEED}/{series}{backend}/{number}" for number in range(count))
    ]
    done = [schedule for _, schedule in waiting]
    running = []
    while waiting or running:
        while waiting and len(running) < _WIDTH:
            seed, schedule = waiting.pop(0)
            running.append((seed, schedule.steps()))
        for entry in list(running):
            seed, steps = entry
            try:
                next(steps)
            except StopIteration:
                running.remove(entry)
            except AssertionError as error:
                for _, others in running:
                    others.close()
                error.add_note(f"in schedule {seed}")
                raise
        time.sleep(0.0002)
    return done


COUNTS_WITH_PLANES = {"fake": 40, "tcp": 30, "nixl": 8, "mooncake": 4}


@pytest.mark.parametrize("backend", backends(*COUNTS_WITH_PLANES))
def test_no_room_sees_a_foreign_byte_in_any_plane(backend) -> None:
    done = run_all(backend, COUNTS_WITH_PLANES[backend], series="planes", planes=True)
    assert sum(s.committed for s in done) > len(done)
    assert sum(s.aborted for s in done) > len(done)


COUNTS = {"fake": 80, "tcp": 40, "nixl": 12, "mooncake": 6}
MANY = {"fake": 2500, "tcp": 1000, "nixl": 200, "mooncake": 200}


# Mooncake's schedules, which mostly wait, have all planes above.
@pytest.mark.parametrize("backend", backends(*COUNTS, full=["mooncake"]))
def test_no_room_sees_a_foreign_byte(backend) -> None:
    count = COUNTS[backend]
    done = run_all(backend, count)
    # The schedules are worth something: all that they are about happened.
    assert sum(s.committed for s in done) > count
    assert sum(s.aborted for s in done) > count
    assert sum(s.restarts for s in done) > count // 10


@pytest.mark.full
@pytest.mark.parametrize("backend", backends(*MANY))
def test_no_room_sees_a_foreign_byte_in_many_schedules(backend) -> None:
    run_all(backend, MANY[backend], series="many")


def test_the_same_schedules_notice_a_decode_node_without_quarantine() -> None:
    """That is, the tests above can fail."""
    with pytest.raises(ForeignBytes):
        run_all("fake", 1000, careless="decode")
