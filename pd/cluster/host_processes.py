"""Processes on the agent's host, which are never mistaken for others.

A pid alone may belong to another process by the time it is used. So a process is opened by its pid,
its start time and the machine's boot, and signals go through the file descriptor of the process
(pidfd), which never leads to another one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

import msgspec

# Every process of a run on one host has it in its environment, and so has whatever it starts.
TOKEN_VARIABLE = "PD_CLUSTER_TOKEN"
# Seconds for which a process without an environment is looked at: Linux shows none for an instant
# after exec, and starved processes may stay there.
_EXEC_WITHIN = 0.5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Identity(msgspec.Struct, frozen=True):
    """The pid, start time in ticks and boot, which together belong to one process only."""

    pid: int
    started: int
    boot: str


def identity_of(pid: int) -> Identity | None:
    """The identity of the process that has this pid now; None if there is none."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return Identity(pid, int(fields[19]), _BOOT_ID.read_text().strip())


class ProcessHandle:
    """An open process. Close it when it is no longer needed."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    @classmethod
    def of(cls, identity: Identity) -> ProcessHandle | None:
        """The process with this identity; None if it has ended."""
        handle = cls.of_pid(identity.pid)
        if handle is None:
            return None
        if handle.ended or identity_of(identity.pid) != identity:
            handle.close()
            return None
        return handle

    @classmethod
    def of_pid(cls, pid: int) -> ProcessHandle | None:
        """Whatever process has this pid now; None if there is none."""
        try:
            return cls(os.pidfd_open(pid))
        except OSError:
            return None

    def fileno(self) -> int:
        """Readable once the process has ended, even if its parent has not noticed yet."""
        return self._pidfd

    @property
    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.Signals(number))

    def close(self) -> None:
        os.close(self._pidfd)


def kill_all_with(token: str) -> list[int]:
    """SIGKILL every process of this user that has the token, and return their pids.

    These are what processes of a run on one host have started and left behind, when they were
    killed.
    """
    wanted = f"{TOKEN_VARIABLE}={token}".encode()
    killed: list[int] = []
    deadline = time.monotonic() + _EXEC_WITHIN
    while True:
        found, unknown = _kill_with(wanted)
        new = [pid for pid in found if pid not in killed]
        killed += new
        # A process that starts another one while it is being killed needs a second look.
        if not new and (not unknown or time.monotonic() > deadline):
            return killed
        if not new:
            time.sleep(0.005)


def _kill_with(wanted: bytes) -> tuple[list[int], bool]:
    """Returns pids that were killed, and whether some process showed no environment."""
    killed: list[int] = []
    unknown = False
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        handle = ProcessHandle.of_pid(int(entry.name))
        if handle is None:
            continue
        try:
            # Read after opening: what the handle leads to had this environment.
            variables = (entry / "environ").read_bytes()
            if not variables and not handle.ended:
                os.readlink(entry / "exe")  # threads of the kernel have none
                unknown = True
            if wanted in variables.split(b"\0") and not handle.ended:
                handle.send(signal.SIGKILL)
                killed.append(int(entry.name))
        except OSError:
            pass  # another user's, or it has just ended
        finally:
            handle.close()
    return killed, unknown
