"""A Ray cluster of this machine alone, started for one deployment and ended with it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from pd.core.errors import SetupError
from pd.util.process_handles import kill_session, list_session

_START_SECONDS, _POLL_SECONDS = 60.0, 0.1


class LocalRay(msgspec.Struct):
    """A head: its dashboard's address, its directory, and its processes by pid and start time."""

    address: str
    directory: str
    processes: list[tuple[int, int]] = []

    def read_token(self) -> str:
        """Read the token for clients."""
        return Path(self.directory, "token").read_text()


def start_local_ray() -> LocalRay:
    """Start a head in a session of its own, with a token for this user. Raises SetupError."""
    # In /tmp, because Ray makes Unix sockets here, and their paths have to be short.
    directory = tempfile.mkdtemp(prefix="pd-ray-", dir="/tmp")
    token, log_file = Path(directory, "token"), Path(directory, "start.log")
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    here = ("127.0.0.1", 0)
    with socket.create_server(here) as one, socket.create_server(here) as other:
        port, client_port = one.getsockname()[1], other.getsockname()[1]
    ray = LocalRay(f"127.0.0.1:{port}", directory)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--port=0", "--node-ip-address=127.0.0.1", f"--temp-dir={directory}"]
    # We need neither workers in advance nor a reader of their logs.
    command += ["--num-cpus=0", "--include-log-monitor=False", "--disable-usage-stats"]
    # Ray does not start if somebody else takes this port, so nobody else gets the token.
    command += [f"--dashboard-port={port}", "--dashboard-host=127.0.0.1"]
    command += ["--include-dashboard=true", "--dashboard-agent-listen-port=0"]
    command += [f"--ray-client-server-port={client_port}"]  # or it ends where 10001 is taken
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with log_file.open("wb") as log:
        head = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while b"--block" not in log_file.read_bytes():  # in the last line of a started head
        ray.processes = list_session(head.pid)
        if head.poll() is not None or time.monotonic() > deadline:
            reason = log_file.read_text(errors="replace")[-1500:]
            stop_local_ray(ray)
            raise SetupError(f"cannot start Ray on this machine: {reason}")
        time.sleep(_POLL_SECONDS)
    ray.processes = list_session(head.pid)
    return ray


def stop_local_ray(ray: LocalRay) -> None:
    """Kill the recorded processes and the rest of their session, and remove the directory.

    We do not send SIGTERM, because ``ray start --block`` then takes half a minute.
    """
    kill_session(ray.processes)
    shutil.rmtree(ray.directory, ignore_errors=True)
