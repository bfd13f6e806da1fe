"""Identifies processes by pid and start time, so we never signal a later one with the same pid.

We use the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_KILL_SECONDS = 5.0


def read_start(pid: int) -> int | None:
    """Read when a process started, in clock ticks after boot; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == b"Z" else int(fields[19])


def open_process(pid: int, start: int) -> int | None:
    """Open a pidfd of the process with this start time; None if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        if read_start(pid) == start:
            return handle
        os.close(handle)
    return None


def end_process(pid: int, start: int, grace: float) -> None:
    """Let a process drain for ``grace`` seconds, then kill it and its group."""
    handle = open_process(pid, start)
    if handle is not None:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        select.select([handle], [], [], grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        os.close(handle)


def end_descendants(group: int) -> None:
    """Kill a process group and all children of ours, adopted ones included."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def list_session(leader: int) -> list[tuple[int, int]]:
    """List the processes of a session by pid and start."""
    found = []
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader and (start := read_start(pid)) is not None:
                found.append((pid, start))
    return found


def kill_session(processes: Collection[tuple[int, int]]) -> None:
    """Kill these processes, by pid and start, and all others of their sessions."""
    for leader in {os.getsid(pid) for pid, start in processes if read_start(pid) == start}:
        for pid, start in {*processes, *list_session(leader)}:
            handle = open_process(pid, start)
            if handle is not None:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [], _KILL_SECONDS)
                os.close(handle)
