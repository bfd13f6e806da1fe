"""``configs/two-hosts`` works just as its commands say, on two hosts with its addresses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import netns
import pytest
from processes import python_path

from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 30.0


def published() -> list[str]:
    """The commands in the header, in the order in which they stand there."""
    header = (ROOT / "configs/two-hosts/prefill.yaml").read_text()
    lines = re.findall(r"^#   (.*)$", header, re.MULTILINE)
    commands: list[str] = []
    for line in lines:
        if re.match(r"openssl|pd-launch|PD_API_KEY|curl", line):
            commands.append(line)
        elif line.startswith("    "):  # a command goes on
            commands[-1] += f"\n{line}"
    return [command.replace(" DIR", f" {EMBEDDED_MODEL}") for command in commands]


class Shells:
    """Runs commands in a directory, each on a host."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = os.environ | {"PATH": path, "PYTHONPATH": python_path(ROOT)}
        self._env["OMP_NUM_THREADS"] = "1"
        self._running: list[subprocess.Popen[str]] = []

    def serve(self, host: netns.Host, command: str) -> dict[str, str]:
        """Start in the background; the ready line."""
        log = (self._directory / f"{len(self._running)}.log").open("w")
        # With exec the shell becomes the process, so that its end is the process's.
        child = subprocess.Popen(
            [*host.prefix, "sh", "-c", command.replace("pd-launch", "exec pd-launch", 1)],
            cwd=self._directory,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self._running.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, f"{command} ended: {Path(log.name).read_text()[-2000:]}"
        ready: dict[str, str] = json.loads(line)
        return ready

    def run(self, host: netns.Host, command: str) -> str:
        """What it prints."""
        done = subprocess.run(
            [*host.prefix, "sh", "-c", command],
            cwd=self._directory,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "".join(path.read_text()[-2000:] for path in sorted(self._directory.glob("*.log")))

    def close(self) -> None:
        for child in reversed(self._running):
            child.terminate()
        for child in self._running:
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@pytest.fixture
def hosts() -> Iterator[tuple[netns.Host, netns.Host]]:
    """With the addresses of the example beside those that this machine knows."""
    netns.require()
    with netns.network() as net:
        for host, address in ((net.a, "10.0.0.1"), (net.b, "10.0.0.2")):
            host.ip("address", "add", f"{address}/24", "dev", "lan")
        yield net.a, net.b


@pytest.mark.full
def test_the_example_runs_as_it_is_written(
    hosts: tuple[netns.Host, netns.Host], tmp_path: Path
) -> None:
    first, second = hosts
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    make_key, prefill, decode, proxy, ask, drain = published()
    shells = Shells(tmp_path)
    try:
        shells.run(first, make_key)
        assert (tmp_path / "cluster.key").stat().st_mode & 0o777 == 0o600
        assert shells.serve(first, prefill)["url"] == "http://10.0.0.1:30000"
        assert shells.serve(second, decode)["url"] == "http://10.0.0.2:30100"
        shells.serve(first, proxy)
        answer = json.loads(shells.run(second, ask))
        assert answer["choices"][0]["message"]["content"], answer
        refused = json.loads(shells.run(second, ask.replace("Bearer secret", "Bearer guess")))
        assert refused["error"]["code"] == "authentication"
        shells.run(first, drain)
        refused = json.loads(shells.run(second, ask))
        assert refused["error"]["code"] == "unavailable", refused
    finally:
        shells.close()
