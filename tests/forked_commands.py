"""``pd-launch`` processes that are forked from one which has imported everything, for tests.

A node takes most of a second of processor time to import its modules, a proxy half of one. The
server in this file imports them once for each process of tests, and forks what is started.
``test_cli_processes.py`` starts processes as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What a proxy imports, besides modules of pd, until it has answered requests.
SERVER_MODULES = (
    "anyio._backends._asyncio",
    "httpcore",
    "pydantic.v1",
    "tokenizers",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)
# What nodes and proxies import until they have answered requests, less libraries of backends, which
# read the environment when they are imported.
_PRELOADED = (
    "pd.commands.admin",
    "pd.commands.batch",
    "pd.commands.cluster",
    "pd.commands.demo",
    "pd.commands.node",
    "pd.commands.proxy",
    "pd.commands.servers",
    "pd.launch",
    "pd.node.node",
    "pd.proxy.server",
    *SERVER_MODULES,
)
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_SLAVE_REC, _MNT_DETACH = 1 << 19 | 1 << 14, 2
_MOST_BYTES = 1 << 20
_POLL_SECONDS = 0.005
_lock = threading.Lock()
# Seconds of processor time of forked processes that have ended and were waited for.
_cpu_seconds = 0.0


class ForkedCommand:
    """A ``pd-launch`` process, with the part of :class:`subprocess.Popen` that tests use.

    Args:
        program: file to run instead of ``pd-launch``, which it calls; None for ``pd-launch``.
        arguments: arguments of ``pd-launch``.
        namespace: network namespace to run in; None for that of the tests.
        log: descriptor of its standard error.

    Attributes:
        stdout: its standard output.
        returncode: its exit status, or minus the signal that ended it; None while it runs.
    """

    def __init__(
        self,
        program: str | None,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        namespace: str | None,
        log: int,
    ) -> None:
        self.returncode: int | None = None
        reading, writing = os.pipe()
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [program, *arguments]
        request = json.dumps([command, dict(env), namespace, os.getcwd()]).encode()
        assert len(request) < _MOST_BYTES
        with theirs:
            socket.send_fds(_server(), [request], [writing, log, theirs.fileno()])
            os.close(writing)
        self.stdout = os.fdopen(reading)
        self._waiting = threading.Lock()
        self._ended = select.poll()
        self._ended.register(self._status, select.POLLIN)
        self.pid: int = json.loads(self._status.recv(100))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        global _cpu_seconds
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            with self._waiting:
                if self.returncode is None and self._ended.poll(0):
                    self.returncode, seconds = json.loads(self._status.recv(100))
                    _cpu_seconds += seconds
                    self._status.close()
            if self.returncode is not None:
                return self.returncode
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("pd-launch", timeout or 0.0)
            time.sleep(_POLL_SECONDS)

    def send_signal(self, number: int) -> None:
        # It may have ended, and nobody may have been told yet.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def cpu_seconds() -> float:
    """Return processor seconds of forked processes that have ended and were waited for."""
    return _cpu_seconds


@functools.cache
def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
    command = [sys.executable, __file__, str(theirs.fileno())]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    with theirs:
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)

    def stop() -> None:
        ours.close()
        server.wait()

    atexit.register(stop)
    return ours


def _server() -> socket.socket:
    with _lock:
        return _start_server()


class _Server:
    """Forks commands, and tells who asked for them how they ended.

    Args:
        requests: brings program and arguments, environment, namespace and directory, with
            descriptors for standard output, standard error and the status.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._children: dict[int, socket.socket] = {}
        self._ended, wakes = os.pipe()
        for end in (self._ended, wakes):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        self._wakes = wakes

    def serve(self) -> list[Any] | None:
        """Serve until all clients have gone, then return None. In a forked process, return the
        command to run."""
        while True:
            ready, _, _ = select.select([self._requests, self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._reap()
            if self._requests in ready:
                request, descriptors, _, _ = socket.recv_fds(self._requests, _MOST_BYTES, 3)
                if not request:
                    return None
                if (command := self._fork(request, descriptors)) is not None:
                    return command

    def _reap(self) -> None:
        while self._children:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._children.pop(pid) as told, contextlib.suppress(OSError):
                seconds = usage.ru_utime + usage.ru_stime
                told.send(json.dumps([os.waitstatus_to_exitcode(status), seconds]).encode())

    def _fork(self, request: bytes, descriptors: list[int]) -> list[Any] | None:
        status = socket.socket(fileno=descriptors.pop())
        pid = os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            status.send(json.dumps(pid).encode())
            self._children[pid] = status
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._requests, status, *self._children.values()):
            end.close()
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
        for descriptor in (*descriptors, self._ended, self._wakes):
            os.close(descriptor)
        command, env, namespace, directory = json.loads(request)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(directory)
        if namespace is not None:
            _enter(namespace)
        random.seed()
        found: list[Any] = command
        return found


def _enter(namespace: str) -> None:
    """Enter a namespace like ``ip netns exec``, which also mounts its /sys, because UCX reads
    that."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(status: int) -> None:
        if status:
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")

    with open(f"/run/netns/{namespace}") as there:
        check(libc.setns(there.fileno(), _CLONE_NEWNET))
    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"", b"/", b"none", _MS_SLAVE_REC, None))
    check(libc.umount2(b"/sys", _MNT_DETACH))
    check(libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))


def _open_stream(number: int, errors: str) -> io.TextIOWrapper:
    """Open a descriptor for text that is written at once, as with PYTHONUNBUFFERED."""
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", errors, write_through=True)


def _main() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    import numpy as np
    import torch

    from pd import cli

    # NOTE: a process with other threads must not be forked.
    assert len(os.listdir("/proc/self/task")) == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    command = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if command is None:
        return
    # What these were when the server started may have been of another kind.
    sys.stdout, sys.stderr = _open_stream(1, "strict"), _open_stream(2, "backslashreplace")
    np.random.seed()
    torch.seed()
    program, *arguments = command
    sys.argv = [program or cli.__file__, *arguments]
    if program is not None:
        runpy.run_path(program, run_name="__main__")
        return
    # Processes that are spawned by this one import its main module.
    sys.modules["__main__"] = cli
    sys.exit(cli.launch())


if __name__ == "__main__":
    _main()
