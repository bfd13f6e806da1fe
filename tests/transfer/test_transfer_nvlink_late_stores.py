"""No room sees a foreign byte over nvlink, whatever is aborted, restarted or late.

The schedules of ``late_writes`` with stores into shared memory that take their time: D's own thread
does nothing to keep them out, only the protocol does. ``PD_TEST_SEED=n`` picks other schedules.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from late_writes import EXTRA_PLANES, ForeignBytes, Node, Schedule
from nvlink_shm import ShmDevice, shm_planes
from transfer_helpers import SEED, node_info

from pd.transfer.nvlink import sessions as nvlink_sessions
from pd.transfer.nvlink.manager import NvlinkManager

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WIDTH = 8


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

    def _introduce(self) -> None:
        p, d = self._p, self._d
        assert p.manager is not None
        assert d.manager is not None
        p.peer, d.peer = d.instance, p.instance
        p.manager.connect(node_info(d.instance, "decode", d.manager, d.pages.pool))
        d.manager.connect(node_info(p.instance, "prefill", p.manager, p.pages.pool))


def run_all(
    count: int, *, careless: str = "", series: str = "", planes: bool = False
) -> list[NvlinkSchedule]:
    print(f"PD_TEST_SEED={SEED}: {count} schedules")
    done, running, left = [], [], list(range(count))
    while left or running:
        while left and len(running) < _WIDTH:
            seed = f"{SEED}/{series}nvlink/{left.pop(0)}"
            schedule = NvlinkSchedule(seed, careless=careless, planes=planes)
            done.append(schedule)
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
