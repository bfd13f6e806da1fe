"""No room sees a foreign byte over nvlink, whatever is aborted, restarted or late.

The schedules of ``late_writes`` with stores into shared memory that take their time: D's own thread
does nothing to keep them out, only the protocol does. ``PD_TEST_SEED=n`` picks other schedules.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from late_writes import EXTRA_PLANES, ForeignBytes, Node, Schedule, run_schedules
from nvlink_shm import ShmDevice, shm_planes

from pd.transfer.nvlink import sessions as nvlink_sessions
from pd.transfer.nvlink.manager import NvlinkManager

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class SlowDevice(ShmDevice):
    """Each store takes another time."""

    rng: random.Random

    def next_delay(self) -> float:
        return self.rng.choice([0.0, 0.001, 0.003, 0.012])


class NvlinkSchedule(Schedule):
    """Its pools are shared memory."""

    def __init__(self, seed: str, *, careless: str = "", planes: bool = False) -> None:
        extra = EXTRA_PLANES * planes
        super().__init__("nvlink", seed, careless=careless, extra_planes=extra)
        self._paths: dict[str, Path] = {}
        for node in (self._p, self._d):
            private = node.pages.pool
            pool, self._paths[node.role] = shm_planes(private.layout, private.num_pages)
            node.pages.use(pool)

    def steps(self) -> Iterator[None]:
        try:
            yield from super().steps()
        finally:
            for path in self._paths.values():
                path.unlink()

    def _start(self, node: Node) -> None:
        self._lives += 1
        node.instance = f"{node.role}-{self._lives}"
        device = SlowDevice(node.pages.pool, self._paths[node.role])
        device.rng = random.Random(self._rng.random())
        node.manager = NvlinkManager(node.pages.pool, node.instance, device=device)


def run_all(
    count: int, *, careless: str = "", series: str = "", planes: bool = False
) -> list[NvlinkSchedule]:
    def make(seed: str) -> NvlinkSchedule:
        return NvlinkSchedule(seed, careless=careless, planes=planes)

    return run_schedules("nvlink", count, make, series=series)


@pytest.fixture(autouse=True)
def no_process_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides live in this process, so a channel's end always follows the drain."""
    monkeypatch.setattr(nvlink_sessions, "LAST_WRITE_SECONDS", 0.0)


def test_no_room_sees_a_foreign_byte() -> None:
    count = 60
    done = run_all(count)
    # The schedules are worth something: all that they are about happened.
    assert sum(s.committed for s in done) > count
    assert sum(s.aborted for s in done) > count
    assert sum(s.restarts for s in done) > count // 10


def test_no_room_sees_a_foreign_byte_in_any_plane() -> None:
    done = run_all(20, series="planes", planes=True)
    assert sum(s.committed for s in done) > 20
    assert sum(s.aborted for s in done) > 20


@pytest.mark.full
def test_no_room_sees_a_foreign_byte_in_many_schedules() -> None:
    run_all(1000, series="many")


def test_the_same_schedules_notice_a_decode_node_without_quarantine() -> None:
    """That is, the tests above can fail."""
    with pytest.raises(ForeignBytes):
        run_all(400, careless="decode")
