"""``pd-bench --cluster``: what is refused before it starts, and load from hosts of a deployment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import netns
import pytest
from processes import python_path, wait_until
from ray_hosts import GUARD, ROOT, RayHosts, kill_host, list_pids, write_spec

from pd import cli
from pd.bench.deployments import DeploymentFile, ServedLayout, count_gpus
from pd.bench.load.client import LoadClient
from pd.bench.load.command import INTERRUPTED
from pd.bench.load.records import read_records
from pd.cluster.deployment import find_deployment, make_deployment_id
from pd.cluster.spec import load_spec
from pd.util.children import module_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYOUT: dict[str, Any] = {"nodes": [{"role": "unified"}]}
LOAD = (
    *("--dataset-name", "random", "--vocab-size", "256", "--random-input-len", "12"),
    *("--random-output-len", "6", "--max-client-lag-ms", "100000", "--max-client-cpu", "10"),
)
GOODPUT = ("--goodput", "ttft:100000")


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("command", "flags", "complaint"),
    [
        ("serve", ["--url", "http://127.0.0.1:9"], "leave out --url"),
        ("serve", ["--save-result", "x.json"], "give --output-dir with --cluster"),
        ("serve", ["--layout", "split"], "--layout split: the layouts are a, b"),
        ("serve", ["--cluster", "nowhere.yaml"], "cannot read nowhere.yaml"),
        ("serve", ["--cluster", "key.yaml"], "pass_environment: PD_API_KEY is not set"),
        ("serve", ["--cluster", "below/two.yaml"], "two files are called two"),
        ("sweep", [], "--goodput is missing"),
        ("sweep", [*GOODPUT, "--deployment", "a=http://h"], "two layouts would be called a"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    command: str,
    flags: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PD_API_KEY", raising=False)
    file = write_spec(tmp_path / "two.yaml", layouts={"a": LAYOUT, "b": LAYOUT})
    write_spec(tmp_path / "key.yaml", layouts={"c": LAYOUT}, pass_environment=["PD_API_KEY"])
    if "http://h" in "".join(flags):
        # A server that is not there would be an error of its own.
        monkeypatch.setattr("pd.bench.sweep._Sweep.run", lambda sweep: None)
    assert cli.bench([command, "--cluster", "two.yaml", *LOAD, *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1
    assert find_deployment(make_deployment_id(file)) is None


def test_ctrl_c_in_one_deployment_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    @contextlib.contextmanager
    def served(file: DeploymentFile, args: object) -> Iterator[list[ServedLayout]]:
        started.append(file.path.stem)
        yield [ServedLayout(name, "http://h:1", (), LoadClient(())) for name in file.names]

    monkeypatch.setattr("pd.bench.deployments.start_layouts", served)
    monkeypatch.setattr("pd.bench.load.command.measure_and_write", lambda *args: INTERRUPTED)
    files = [write_spec(tmp_path / f"{name}.yaml", **LAYOUT) for name in ("one", "other")]
    clusters = [word for file in files for word in ("--cluster", str(file))]
    assert cli.bench(["serve", *clusters, *LOAD]) == INTERRUPTED
    assert started == ["one"]


def test_gpus_of_a_layout_are_those_that_ray_gives_to_its_nodes(tmp_path: Path) -> None:
    nodes = [{"role": "unified", "gpus": 2}, {"role": "decode", "count": 2, "gpus": 0.5}]
    spec = load_spec(write_spec(tmp_path / "one.yaml", nodes=nodes))
    assert count_gpus(spec, "main") == 3
    assert count_gpus(load_spec(write_spec(tmp_path / "none.yaml", **LAYOUT)), "main") is None


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[RayHosts]:
    netns.require()
    with netns.lan(3) as lan:
        running = RayHosts(lan.hosts, tmp_path)
        try:
            for host in lan.hosts:
                running.start(host)
            yield running
        finally:
            running.close()


def write_three_hosts(hosts: RayHosts, path: Path, backend: str) -> Path:
    """A prefill and a decode node on two hosts, and load from two."""
    # Without this, UCX finds shared memory between namespaces of one machine.
    environment = {"UCX_TLS": "tcp"} if backend == "nixl" else {}
    flags = {"trust-network": True} if backend == "nixl" else {}
    names = dict(zip(("first", "second", "third"), hosts.hosts, strict=True))
    return write_spec(
        path,
        ray={"address": hosts.address},
        hosts={n: {"node": h.address, "environment": environment} for n, h in names.items()},
        transfer_backend=backend,
        flags=flags,
        nodes=[{"role": "prefill", "host": "first"}, {"role": "decode", "host": "second"}],
        proxy={"host": "first", "listen": "0.0.0.0"},
        load=["second", "third"],
    )


def guard_programs(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """Make an environment in which no program of Python imports Ray or unpickles."""
    guard = directory / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    return environment | {"PYTHONPATH": f"{guard}:{environment['PYTHONPATH']}"}


@pytest.mark.parametrize(
    "code",
    ["import ray", "import pickle; pickle.loads(b'N.')", "import _pickle; _pickle.loads(b'N.')"],
)
def test_programs_of_these_benchmarks_end_when_they_unpickle(code: str, tmp_path: Path) -> None:
    """Otherwise the tests that use the guard would show nothing."""
    environment = guard_programs(os.environ | {"PYTHONPATH": python_path(ROOT)}, tmp_path)
    command = [*module_command("pd.bench")[:-2], "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 99 and "forbidden to the operator" in done.stderr


def start_benchmark(hosts: RayHosts, *arguments: object) -> subprocess.Popen[str]:
    """Start pd-bench. Neither it nor any program that it starts imports Ray or unpickles."""
    command = [*hosts.head.prefix, sys.executable, "-m", "pd.bench", *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=guard_programs(hosts.environment(), hosts.directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def runs_nothing_of_ours(hosts: RayHosts) -> bool:
    pids = [pid for host in hosts.hosts for pid in list_pids(host)]
    commands = subprocess.run(
        ["ps", "-o", "args=", "-p", ",".join(map(str, pids)) or "1"], capture_output=True, text=True
    ).stdout
    return not re.search(r"-m pd\.(cli|cluster|bench)", commands)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_load_from_two_hosts_and_what_all_hosts_say_are_in_one_directory(
    backend: str, hosts: RayHosts, tmp_path: Path
) -> None:
    file, out = write_three_hosts(hosts, tmp_path / "three.yaml", backend), tmp_path / "out"
    flags = ["--num-prompts", "12", "--request-rate", "50", "--warmup", "1", "--output-dir", out]
    benchmark = start_benchmark(hosts, "serve", "--cluster", file, *LOAD, *flags)
    output, _ = benchmark.communicate(timeout=280)
    assert benchmark.returncode == 0, output
    records = read_records(out / "main" / "requests.jsonl")
    assert [record.status for record in records] == ["ok"] * 12
    assert {record.process for record in records} == {"second/0", "third/0"}
    assert all(record.output_tokens == 6 for record in records)
    summary = json.loads((out / "main" / "summary.json").read_text())
    assert summary["valid"] and summary["client"]["clock_error_ms"] < 5
    assert summary["server"]["output_tokens"] >= 12 * 6
    collected = {path.name for path in (out / "three.hosts").iterdir()}
    names = {"main-prefill-0", "main-decode-0", "main-proxy"}
    assert {f"{name}.{suffix}" for name in names for suffix in ("log", "metrics")} <= collected
    metrics = (out / "three.hosts" / "main-decode-0.metrics").read_text()
    sent = re.search(rf'^pd_transfer_bytes_total{{backend="{backend}"}} (\S+)', metrics, re.M)
    assert sent is not None and float(sent[1]) > 0
    wait_until(lambda: runs_nothing_of_ours(hosts), 30)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_sweep_of_a_deployment_has_results_without_unpickling(
    hosts: RayHosts, tmp_path: Path
) -> None:
    file, out = write_three_hosts(hosts, tmp_path / "three.yaml", "tcp"), tmp_path / "sweep.json"
    flags = ["--min-rate", "4", "--max-rate", "4", "--repeats", "1", "--seconds", "2"]
    benchmark = start_benchmark(
        hosts, "sweep", "--cluster", file, *LOAD, *GOODPUT, *flags, "--output", out
    )
    output, _ = benchmark.communicate(timeout=280)
    assert benchmark.returncode == 0, output
    rows = json.loads(out.read_text())["results"]
    assert [row["deployment"] for row in rows if row.get("valid")] == ["main"], rows
    wait_until(lambda: runs_nothing_of_ours(hosts), 30)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["second", "third"])
def test_a_host_that_dies_under_load_is_named(victim: str, hosts: RayHosts, tmp_path: Path) -> None:
    file, out = write_three_hosts(hosts, tmp_path / "three.yaml", "tcp"), tmp_path / "out"
    flags = ["--num-prompts", "100000", "--request-rate", "5", "--output-dir", out]
    benchmark = start_benchmark(hosts, "serve", "--cluster", file, *LOAD, *flags)
    assert benchmark.stdout is not None
    lines: list[str] = []
    for line in benchmark.stdout:
        lines.append(line)
        if " answered, " in line:
            break
    kill_host(hosts.hosts[("first", "second", "third").index(victim)])
    rest, _ = benchmark.communicate(timeout=280)
    output = "".join(lines) + rest
    assert benchmark.returncode == 1, output
    host = hosts.hosts[("first", "second", "third").index(victim)]
    assert host.address in output or f"{victim}/0" in output, output
