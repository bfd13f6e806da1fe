"""Deployments of the tiny model that tests start from YAML files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from processes import python_path, wait_until
from tiny import tiny_model

from pd.cluster.host_processes import TOKEN_VARIABLE
from pd.cluster.state import deployment_id, load_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    import netns

    from pd.cluster.state import ClusterState

ROOT = Path(__file__).parents[2]
ENDS_WITHIN = 60.0
TOKENS = [5, 3, 9, 200, 7, 7, 1]


def spec_of(hosts: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A deployment of the tiny model, as the YAML file has it."""
    flags = {"load-format": "dummy", "page-size": 4, "kv-cache-tokens": 2048, "cpu-threads": 1}
    return {"model": str(tiny_model()), "flags": flags, "hosts": hosts, **settings}


def unified_layout(host: str = "here") -> dict[str, Any]:
    """The cheapest layout: one unified node."""
    nodes = [{"role": "unified", "host": host, "devices": ["cpu"]}]
    return {"nodes": nodes, "proxy": {"host": host}}


def write(path: Path, spec: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(spec))
    return path


def state_of(file: Path) -> ClusterState | None:
    return load_state(deployment_id(file))


@contextlib.contextmanager
def foreign_process(*command: str, **environment: str) -> Iterator[int]:
    """A process that looks like those of a deployment and is none; it must survive."""
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        yield process.pid
        assert process.poll() is None, "a process that the deployment did not start has ended"
    finally:
        process.kill()
        process.wait()


class _Program:
    """A command as a process."""

    started: ClassVar[list[_Program]] = []

    def __init__(self, log: Path, module: str, *arguments: str) -> None:
        self._log = log
        env = os.environ | {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("w") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env=env,
            )
        self.started.append(self)

    @classmethod
    def stop_all(cls) -> None:
        """End those that a failed test has left."""
        for command in cls.started:
            if command.process.poll() is None:
                command.process.terminate()
                command.process.wait(ENDS_WITHIN)
        cls.started.clear()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> tuple[int, str]:
        """Exit status and the rest of its standard output."""
        out, _ = self.process.communicate(timeout=ENDS_WITHIN)
        return self.process.returncode, out


class Command(_Program):
    """``pd-launch cluster ACTION FILE``."""

    def __init__(self, action: str, file: Path, *flags: str) -> None:
        super().__init__(
            file.with_suffix(f".{action}.log"), "pd.cli", "cluster", action, str(file), *flags
        )

    def urls(self) -> dict[str, str]:
        """Wait for the line that ``up`` prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        found: dict[str, str] = json.loads(line)["layouts"]
        return found


class Benchmark(_Program):
    """``pd-bench ARGUMENTS``, with its log in a directory."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        super().__init__(directory / "bench.log", "pd.bench", *arguments)


def run(action: str, file: Path, *flags: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    command = Command(action, file, *flags)
    return *command.end(), command.log


def table(out: str) -> list[list[str]]:
    """Cells of what ``status`` prints, without the titles."""
    return [line.split(maxsplit=6) for line in out.splitlines()[1:]]


def pid_of(file: Path, name: str) -> int:
    _, out, _ = run("status", file)
    (pid,) = (int(row[5]) for row in table(out) if row[1] == name)
    return pid


def pids_with(token: str) -> list[int]:
    """Processes of a run on all hosts, or on that of the token."""
    wanted, found = f"{TOKEN_VARIABLE}={token}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(v == wanted or v.startswith(wanted + b"-") for v in variables):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_gone(token: str) -> None:
    wait_until(lambda: not pids_with(token), ENDS_WITHIN, lambda: pids_with(token))


def kill_host(host: netns.Host) -> None:
    """All its processes at once."""
    found = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
    )
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(int(pid), signal.SIGKILL)
