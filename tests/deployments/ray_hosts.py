"""Ray clusters on hosts of their own (network namespaces), and deployments on them.

Ray listens on all interfaces whatever it is told, so nothing here runs outside of a namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from processes import python_path
from tiny import tiny_model

from pd.cluster.deployment import find_deployment, make_deployment_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import netns

    from pd.cluster.orders import ProcessState

ROOT = Path(__file__).parents[2]
PORT, DASHBOARD_PORT = 6379, 8265
# A process with this ends at once when it imports Ray or unpickles.
GUARD = """
import os, pickle, sys, _pickle
def forbid(event, arguments):
    os.write(2, f"forbidden to the operator: {event} {arguments}".encode())
    os._exit(99)
def guard(event, arguments):
    is_ray = event == "import" and arguments[0].partition(".")[0] in ("ray", "cloudpickle")
    if is_ray or event == "pickle.find_class":
        forbid(event, arguments)
for module in (pickle, _pickle):
    module.loads = module.load = module.Unpickler = lambda *a, **k: forbid("unpickling", a)
sys.addaudithook(guard)
"""
# pd-launch in such a process, which may start no program but Ray.
OPERATOR = f"""{GUARD}
def guard_programs(event, arguments):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.fork"):
        if "ray.scripts.scripts" not in str(arguments):
            forbid(event, arguments)
sys.addaudithook(guard_programs)
from pd.cli import launch
sys.exit(launch())
"""
FLAGS = {"load-format": "dummy", "page-size": 4, "kv-cache-tokens": 2048, "cpu-threads": 1}


def write_spec(path: Path, **settings: Any) -> Path:
    """Write a deployment of the tiny model on CPUs."""
    flags = FLAGS | {"device": "cpu"} | settings.pop("flags", {})
    spec = {"model": str(tiny_model()), "transfer_backend": "tcp", "flags": flags, **settings}
    path.write_text(yaml.safe_dump(spec))
    return path


def list_pids(host: netns.Host) -> list[int]:
    """List the processes in a host's namespace."""
    command = ["ip", "netns", "pids", host.namespace]
    return [int(pid) for pid in subprocess.check_output(command).split()]


def find_pids(host: netns.Host, text: bytes) -> list[int]:
    """Find processes on a host by their command line. Ray's workers name themselves in it."""
    found = []
    for pid in list_pids(host):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if text in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def find_own_pids(host: netns.Host) -> list[int]:
    """Find the processes on a host that belong to a deployment, our actors in Ray included."""
    texts = (b"-m\0pd.", b"ray::Supervisor", b"ray::ControlService")
    return [pid for text in texts for pid in find_pids(host, text)]


def list_ports(host: netns.Host) -> dict[int, set[int]]:
    """List the ports on which a host listens, with the processes that have them open."""
    table = subprocess.check_output([*host.prefix, "ss", "-ltnpH"], text=True)
    return {
        int(line.split()[3].rpartition(":")[2]): set(map(int, re.findall(r"pid=(\d+)", line)))
        for line in table.splitlines()
    }


def kill_host(host: netns.Host) -> None:
    """End everything on a host at once, as when it loses power."""
    deadline = time.monotonic() + 20
    while (pids := list_pids(host)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


class RayHosts:
    """A head and further members, each in a namespace with a state directory of its own."""

    def __init__(self, hosts: Sequence[netns.Host], directory: Path) -> None:
        self.hosts, self.head = hosts, hosts[0]
        # Sockets of Ray have longer paths than pytest's directories leave room for.
        self.scratch = Path(tempfile.mkdtemp(prefix="pdt-", dir="/tmp"))
        (self.scratch / "tmp").mkdir()
        self.token = directory / "token"
        self.token.write_text("0123456789abcdef" * 4)
        self.token.chmod(0o600)
        self.home = directory / "home"
        self.home.mkdir()
        self.directory = directory
        self.raylets: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """Of the dashboard."""
        return f"{self.head.address}:{DASHBOARD_PORT}"

    def environment(self, host: netns.Host | None = None) -> dict[str, str]:
        """The environment of Ray on a host, or of the operator."""
        state = self.directory / f"state-{self.hosts.index(host) if host else 'operator'}"
        known = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))}
        return known | {
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(state),
            "PYTHONPATH": python_path(ROOT),
            # Where the head finds python3.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(self.scratch / "tmp"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            # A host that is gone is noticed after 3 s instead of 15.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
        }

    def start(self, host: netns.Host, *flags: str) -> None:
        """Start Ray on a host: the head first."""
        # Shared memory of its own, as on a machine of its own.
        mount = ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        command = [*host.prefix, *mount, sys.executable, "-m", "ray.scripts.scripts", "start"]
        command += ["--block", f"--node-ip-address={host.address}", "--disable-usage-stats"]
        # Fewer processes that nobody asks for anything: workers in advance, and a log monitor.
        command += ["--num-cpus=0", "--include-log-monitor=False", *flags]
        if host is self.head:
            command += ["--head", f"--port={PORT}", f"--temp-dir={self.scratch}"]
            command += ["--include-dashboard=true", f"--dashboard-host={host.address}"]
            command += [f"--dashboard-port={DASHBOARD_PORT}"]
        else:
            command += [f"--address={self.head.address}:{PORT}"]
        log = self.directory / f"ray-{self.hosts.index(host)}.log"
        # Ray gives up after 30 s, in which a busy machine may not have started its processes.
        for _ in range(4):
            with log.open("wb") as output:
                raylet = subprocess.Popen(
                    command,
                    env=self.environment(host),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self.raylets[host.address] = raylet
            while raylet.poll() is None:
                if b"--block" in log.read_bytes():
                    return
                time.sleep(0.1)
            kill_host(host)
        raise AssertionError(log.read_text())

    def launch(self, *arguments: object, expect: int | None = 0, outside: bool = False) -> str:
        """Run ``pd-launch cluster`` on the head's host or on one that is no member of the cluster,
        and return its standard output."""
        command = [
            *(() if outside else self.head.prefix),
            sys.executable,
            "-c",
            OPERATOR,
            "cluster",
        ]
        done = subprocess.run(
            [*command, *map(str, arguments)],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        print(f"$ cluster {arguments}: {done.returncode}\n{done.stdout}{done.stderr}", flush=True)
        if expect is not None:
            assert done.returncode == expect, done.stderr
        return done.stdout

    def read_states(self, file: Path) -> dict[str, ProcessState]:
        """Ask a control service from here, which costs less than a command."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", self.environment()["XDG_STATE_HOME"])
            found = find_deployment(make_deployment_id(file))
        assert found is not None
        try:
            return {state.name: state for state in found.read_states()}
        finally:
            found.client.close()

    def list_shared_memory(self) -> set[str]:
        """List the files in shared memory of all hosts, which is gone with a host's processes."""
        found = set()
        for address, raylet in self.raylets.items():
            with contextlib.suppress(FileNotFoundError):
                shared = Path(f"/proc/{raylet.pid}/root/dev/shm").iterdir()
                found |= {f"{address}: {path.name}" for path in shared}
        return found

    def close(self) -> None:
        for host in self.hosts:
            kill_host(host)
        for raylet in self.raylets.values():
            raylet.kill()
            raylet.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


class Load:
    """Threads that send requests one after another, and the problems that they had.

    Args:
        pause: seconds after each request, because processes that start meanwhile need the cores.
    """

    def __init__(self, url: str, threads: int = 2, pause: float = 0.1) -> None:
        self.problems: list[str] = []
        self.done = 0
        self._url, self._pause, self._over = url, pause, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        body = {
            "input_ids": [5, 3, 9, 200, 7],
            "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
        }
        with httpx.Client(timeout=60) as client:
            while not self._over.is_set():
                try:
                    answer = client.post(f"{self._url}/generate", json=body)
                    if answer.status_code != 200 or len(answer.json()["output_ids"]) != 12:
                        self.problems.append(answer.text)
                    self.done += 1
                except httpx.HTTPError as error:
                    self.problems.append(repr(error))
                self._over.wait(self._pause)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @contextlib.contextmanager
    def goes_on(self) -> Iterator[None]:
        """Whatever happens in the block, no request fails, and some end afterwards."""
        yield
        done, deadline = self.done, time.monotonic() + 60
        while self.done < done + 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.problems, self.problems[:3]
        assert self.done >= done + 4


def read_rows(table: str) -> dict[str, dict[str, str]]:
    """Read the table of ``status`` by the names of processes."""
    titles, *lines = table.splitlines()
    starts = [titles.index(title) for title in titles.split()]
    ends = [*starts[1:], 10_000]
    cells = [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in lines]
    rows = [dict(zip(titles.lower().split(), row, strict=True)) for row in cells]
    return {row["name"]: row for row in rows}


def read_urls(output: str) -> dict[str, str]:
    """Read the URLs that ``up`` has printed."""
    line = json.loads(output.splitlines()[-1])
    assert line["event"] == "ready"
    urls: dict[str, str] = line["layouts"]
    return urls
