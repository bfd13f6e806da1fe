"""The supervisor of one process, without Ray: it restarts within bounds, and stops on order."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import msgspec
from processes import wait_until

from pd.cluster import supervisor
from pd.cluster.orders import Process, ProcessState
from pd.cluster.supervisor import Supervisor

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def start_supervisor(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: tuple[float, ...]
) -> Supervisor:
    """Supervise a program that runs some code."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(supervisor, "_BACKOFF_SECONDS", pauses)
    monkeypatch.setattr(Supervisor, "_make_command", lambda self: [sys.executable, "-Sc", code])
    # Without Ray there is no worker to end after the lease.
    monkeypatch.setattr(Supervisor, "_supervise_process", Supervisor._keep_running)
    order = Process("main-decode-0", "main", "decode", [])
    return Supervisor("name", msgspec.json.encode(order), "", "127.0.0.1")


def read_state(running: Supervisor, grace: float | None = None) -> ProcessState:
    return msgspec.json.decode(running.renew_lease([], grace), type=ProcessState)


def test_a_process_that_always_fails_starts_ten_times_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    write = f"import time; open({str(started)!r}, 'a').write(f'{{time.time()}}\\n')"
    code = f"{write}; raise SystemExit(7)"
    running = start_supervisor(code, tmp_path, monkeypatch, (0.0, 0.0, 0.6))
    wait_until(lambda: read_state(running).state == "failed", 60)
    state = read_state(running)
    assert (state.restarts, state.detail) == (9, "ended with status 7")
    times = [float(line) for line in started.read_text().split()]
    assert len(times) == 10
    assert all(later - earlier >= 0.6 for earlier, later in itertools.pairwise(times[2:]))


def test_an_order_to_drain_ends_a_process_that_waits_for_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_supervisor("raise SystemExit(7)", tmp_path, monkeypatch, (1000.0,))
    wait_until(lambda: read_state(running).state == "waiting", 60)
    assert "starts again in 1000 s" in read_state(running).detail
    wait_until(lambda: read_state(running, 5.0).state == "ended", 60)


def test_an_order_to_drain_ends_a_running_process_and_does_not_start_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time; time.sleep(1000)"
    running = start_supervisor(code, tmp_path, monkeypatch, (0.0,))
    wait_until(lambda: (tmp_path / "pd/clusters/name/main-decode-0.lock").exists(), 60)
    assert read_state(running, 30.0).state == "draining"
    wait_until(lambda: read_state(running, 30.0).state == "ended", 60)
    assert read_state(running).restarts == 0
