"""No room ever sees a foreign byte, whatever is aborted, restarted, duplicated or late.

``PD_TEST_SEED=n`` picks other schedules; a failure names the seed of its schedule.
"""

from __future__ import annotations

import pytest
from late_writes import EXTRA_PLANES, ForeignBytes, Schedule, run_schedules
from transfer_helpers import backends


def run_all(
    backend: str, count: int, *, careless: str = "", series: str = "", planes: bool = False
) -> list[Schedule]:
    def make(seed: str) -> Schedule:
        return Schedule(backend, seed, careless=careless, extra_planes=EXTRA_PLANES * planes)

    return run_schedules(backend, count, make, series=series)


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
