"""``python -m pd.cluster.watcher FD``: runs one pd process, and ends it whatever happens to Ray.

A Ray worker, raylet or head may be killed or stopped at any time. Descriptor FD brings one line of
JSON (:class:`WatchOrder`), then lines from the supervisor: an empty one is a beat, and a number of
seconds lets the process drain for so long. If no line comes for the time of the lease, we drain it.

The process inherits its lock file, which holds its pid and start time. So whoever gets the lock
knows that no earlier process of the same name lives on this host. We use the standard library only,
because we have to start fast and stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import TypedDict

from pd.util.process_handles import end_descendants, end_process, read_start

BEAT = b"\n"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_SECONDS, _POLL_SECONDS, _PIPE_BYTES = 10.0, 0.05, 65536
_NEVER = float("inf")


class WatchOrder(TypedDict):
    """A process to run. ``grace``: seconds for draining; ``lease``: seconds without a beat."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    lock: str
    grace: float
    lease: float


def main() -> int:
    """Run the process to its end, and return its exit status (128 + N after signal N)."""
    control, libc = int(sys.argv[1]), ctypes.CDLL(None)
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    # We fork, because a Ray worker that exits kills its children, but not their children.
    watcher = os.fork()
    if watcher:
        return os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1])
    # We adopt orphans of the process, so we can end them, too.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def prepare_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)

    with os.fdopen(os.dup(control), "rb", buffering=0) as beginning:  # beats follow the line
        order: WatchOrder = json.loads(beginning.readline() or "null")
    if order is None:
        raise SystemExit("the supervisor ended before it said what to run")
    lock = take_lock(order["lock"], order["grace"])
    child = subprocess.Popen(
        order["command"],
        env=order["environment"],
        cwd=order["directory"] or None,
        pass_fds=[lock],
        start_new_session=True,
        preexec_fn=prepare_child,
    )
    os.pwrite(lock, json.dumps([child.pid, read_start(child.pid) or 0]).encode(), 0)
    try:
        status = _watch_child(child, control, order)
    finally:
        end_descendants(child.pid)
    return status if status >= 0 else 128 - status


def _watch_child(child: subprocess.Popen[bytes], control: int, order: WatchOrder) -> int:
    sources = [os.pidfd_open(child.pid), control]
    lease_end, kill_at = time.monotonic() + order["lease"], _NEVER
    while True:
        pause = max(0.0, min(lease_end, kill_at) - time.monotonic())
        ready, _, _ = select.select(sources, [], [], pause)
        if sources[0] in ready:
            return child.wait()
        # As much as a pipe holds, because half a number would be another one.
        lines, now = os.read(control, _PIPE_BYTES) if ready else b"", time.monotonic()
        if ready and not lines:
            # The supervisor is gone. The process serves on, because another one may take over.
            sources.remove(control)
        graces = [float(line) for line in lines.split()]
        if kill_at == _NEVER:
            lease_end = now + order["lease"] if lines else lease_end
            graces += [order["grace"]] if now >= lease_end else []
            if graces:
                lease_end = _NEVER
                child.send_signal(signal.SIGTERM)
        kill_at = min([kill_at, *(now + grace for grace in graces)])
        if now >= kill_at:
            kill_at = now + _KILL_SECONDS
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def take_lock(path: str, grace: float) -> int:
    """Lock a process's name on this host, after ending an earlier process with this name."""
    lock, deadline = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), _NEVER
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            return lock
        if deadline == _NEVER:
            with contextlib.suppress(ValueError, TypeError):
                pid, start = json.loads(os.pread(lock, 100, 0))
                end_process(pid, start, grace)
            deadline = time.monotonic() + _KILL_SECONDS
        if time.monotonic() > deadline:
            raise SystemExit(f"{path}: an earlier process has it and does not end")
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
