"""The watcher: a process ends when its supervisor stops beating, and never lives twice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import wait_until

from pd.cluster.watcher import BEAT
from pd.util.children import module_command
from pd.util.process_handles import read_start

if TYPE_CHECKING:
    from collections.abc import Iterator

KILL = b"0\n"
# A process with a child. It writes its pids, and drains for as long as its argument says.
PROGRAM = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
def drain(*_):
    print("draining", flush=True)
    time.sleep(float(sys.argv[1]))
    os._exit(7)
signal.signal(signal.SIGTERM, drain)
print(os.getpid(), child.pid, flush=True)
while True:
    time.sleep(1)
"""


class Watched:
    """A watcher that a test feeds as a supervisor would."""

    def __init__(self, directory: Path, **order: Any) -> None:
        drain_seconds = order.pop("drain_seconds", 0)
        whole = {
            "command": [sys.executable, "-c", PROGRAM, str(drain_seconds)],
            "environment": dict(os.environ),
            "directory": "",
            "lock": str(directory / "node.lock"),
            "grace": 30.0,
            "lease": 60.0,
        }
        orders, self.control = os.pipe()
        self.watcher = subprocess.Popen(
            module_command("pd.cluster.watcher", orders), stdout=subprocess.PIPE, pass_fds=[orders]
        )
        os.close(orders)
        os.write(self.control, json.dumps(whole | order).encode() + b"\n")

    def read_pids(self) -> list[int]:
        assert self.watcher.stdout is not None
        return [int(pid) for pid in self.watcher.stdout.readline().split()]

    def read_line(self) -> bytes:
        assert self.watcher.stdout is not None
        return self.watcher.stdout.readline().strip()

    def tell(self, data: bytes) -> None:
        os.write(self.control, data)

    def lose_supervisor(self) -> None:
        os.close(self.control)
        self.control = -1

    def close(self) -> None:
        if self.control >= 0:
            with contextlib.suppress(BrokenPipeError):
                self.tell(KILL)
            os.close(self.control)
        self.watcher.wait(60)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Any]:
    started: list[Watched] = []

    def start(**order: Any) -> Watched:
        started.append(Watched(tmp_path, **order))
        return started[-1]

    yield start
    for each in started:
        each.close()


def has_ended(pids: list[int]) -> bool:
    return all(read_start(pid) is None for pid in pids)


def test_a_process_drains_when_beats_stop_and_takes_its_children_along(watched: Any) -> None:
    process = watched(lease=1.0)
    pids = process.read_pids()
    for _ in range(4):
        process.tell(BEAT)
    assert process.read_line() == b"draining"
    assert process.watcher.wait(60) == 7
    assert has_ended(pids)


def test_a_process_outlives_its_supervisor_for_the_rest_of_the_lease(watched: Any) -> None:
    process = watched(lease=3.0)
    pids = process.read_pids()
    process.lose_supervisor()
    with pytest.raises(subprocess.TimeoutExpired):
        process.watcher.wait(1.0)
    assert not has_ended(pids)
    assert process.watcher.wait(60) == 7
    assert has_ended(pids)


def test_a_process_that_does_not_drain_in_time_is_killed(watched: Any) -> None:
    process = watched(drain_seconds=1000)
    pids = process.read_pids()
    process.tell(b"0.5\n")
    assert process.read_line() == b"draining"
    assert process.watcher.wait(60) == 128 + signal.SIGKILL
    assert has_ended(pids)


def test_a_process_outlives_a_ray_worker_that_kills_its_children(watched: Any) -> None:
    process = watched()
    pids = process.read_pids()
    process.watcher.kill()
    process.watcher.wait(60)
    process.tell(BEAT)
    assert not has_ended(pids)
    process.tell(KILL)
    wait_until(lambda: has_ended(pids), 60)


def test_a_stopped_process_is_killed_on_order(watched: Any) -> None:
    process = watched()
    pids = process.read_pids()
    os.kill(pids[0], signal.SIGSTOP)
    process.tell(KILL)
    assert process.watcher.wait(60) == 128 + signal.SIGKILL
    assert has_ended(pids)


def test_a_process_drains_when_its_watcher_is_killed(watched: Any) -> None:
    process = watched()
    pids = process.read_pids()
    status = Path(f"/proc/{pids[0]}/status").read_text()
    os.kill(int(re.search(r"PPid:\t(\d+)", status)[1]), signal.SIGKILL)  # type: ignore[index]
    assert process.read_line() == b"draining"
    wait_until(lambda: has_ended(pids[:1]), 60)
    os.kill(pids[1], signal.SIGKILL)


def test_a_second_process_of_a_name_starts_when_the_first_has_ended(watched: Any) -> None:
    first = watched(drain_seconds=0.5)
    pids = first.read_pids()
    first.lose_supervisor()
    second = watched()
    # It has a pid only once the first one is gone.
    assert second.read_pids() and has_ended(pids)
    assert first.watcher.wait(60) == 7


def test_a_lock_names_no_other_process_that_got_the_pid(watched: Any, tmp_path: Path) -> None:
    first = watched()
    first.read_pids()
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        (tmp_path / "node.lock").write_text(json.dumps([stranger.pid, 1]))
        second = watched(grace=0.1)
        assert second.watcher.wait(60) == 1  # the lock stays taken
        assert stranger.poll() is None
        stranger.kill()
