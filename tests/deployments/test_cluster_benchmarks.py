"""`pd-bench --cluster`: what is refused before anything starts, which files are up together, and
that what was started is stopped."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from cluster_helpers import Benchmark, pids_with, spec_of, state_of, unified_layout, write
from processes import wait_until

from pd import cli
from pd.bench.deployments import (
    DeploymentFile,
    ServedLayout,
    _fetch_from,
    _layouts,
    groups_of,
)
from pd.bench.load.client import LoadClient
from pd.bench.load.command import INTERRUPTED
from pd.bench.load.records import read_records
from pd.cluster import protocol
from pd.cluster.enter import Surroundings
from pd.cluster.host import Host
from pd.cluster.reach import Local
from pd.cluster.spec_file import load_spec
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.bench.load.measure import Server
    from pd.bench.load.settings import LoadSettings

HERE = {"here": {"local": True}}
LOAD = (
    *("--dataset-name", "random", "--vocab-size", "256", "--random-input-len", "12"),
    *("--random-output-len", "6", "--max-client-lag-ms", "100000", "--max-client-cpu", "10"),
)
GOODPUT = ("--goodput", "ttft:100000")


def on_gpu(device: str, **settings: Any) -> dict[str, Any]:
    layout = unified_layout() | {
        "nodes": [{"role": "unified", "host": "here", "devices": [device]}]
    }
    return spec_of(HERE, layouts={"main": layout}, **settings)


# ---- before anything starts


@pytest.mark.parametrize(
    ("command", "flags", "complaint"),
    [
        ("serve", ["--url", "http://127.0.0.1:9"], "leave out --url"),
        ("serve", ["--save-result", "x.json"], "give --output-dir with --cluster"),
        ("serve", ["--load-host", "far"], "name the hosts in its load: list"),
        ("serve", ["--layout", "split"], "--layout split: the layouts are a, b"),
        ("serve", ["--cancel-rate", "2"], "--cancel-rate is a share"),
        ("serve", ["--cluster", "nowhere.yaml"], "cannot read nowhere.yaml"),
        ("serve", ["--cluster", "key.yaml"], "pass_environment: PD_API_KEY is not set here"),
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
    layouts = {name: unified_layout() for name in ("a", "b")}
    write(tmp_path / "two.yaml", spec_of(HERE, layouts=layouts))
    monkeypatch.delenv("PD_API_KEY", raising=False)
    keyed = spec_of(HERE, layouts={"c": unified_layout()}, pass_environment=["PD_API_KEY"])
    write(tmp_path / "key.yaml", keyed)
    asked = [command, "--cluster", "two.yaml", *LOAD, *flags]
    if "http://h" in "".join(flags):
        # A server that is not there would be an error of its own.
        monkeypatch.setattr("pd.bench.sweep._Sweep.run", lambda sweep: None)
    assert cli.bench(asked) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1
    assert state_of(tmp_path / "two.yaml") is None


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (on_gpu("cuda:0"), on_gpu("cuda:1"), True),
        (on_gpu("cuda:0"), on_gpu("cuda:0"), False),
        (on_gpu("cuda"), on_gpu("cuda:0"), False),
        (on_gpu("cuda:0", share_devices=True), on_gpu("cuda:0"), False),
        (on_gpu("cuda:0", share_devices=True), on_gpu("cuda:0", share_devices=True), True),
        (on_gpu("cpu"), on_gpu("cpu"), True),
    ],
)
def test_files_are_up_together_unless_they_need_the_same_gpu(
    one: dict[str, Any], other: dict[str, Any], together: bool, tmp_path: Path
) -> None:
    files = [
        DeploymentFile(path, load_spec(path), "")
        for path in (write(tmp_path / "one.yaml", one), write(tmp_path / "other.yaml", other))
    ]
    assert groups_of(files) == ([files] if together else [[file] for file in files])


def test_ctrl_c_in_one_deployment_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    @contextlib.contextmanager
    def served(files: list[DeploymentFile], args: object) -> Iterator[list[ServedLayout]]:
        started.extend(file.path.stem for file in files)
        names = [name for file in files for name in file.names]
        yield [ServedLayout(name, "http://h:1", (), LoadClient(())) for name in names]

    monkeypatch.setattr("pd.bench.deployments.served", served)
    monkeypatch.setattr("pd.bench.serve_deployments.measure_and_write", lambda *args: INTERRUPTED)
    files = [write(tmp_path / f"{name}.yaml", on_gpu("cuda:0")) for name in ("one", "other")]
    clusters = [word for file in files for word in ("--cluster", str(file))]
    assert cli.bench(["serve", *clusters, *LOAD]) == INTERRUPTED
    assert started == ["one"]


@pytest.mark.parametrize(("flags", "gpus"), [([], 2), (["--gpus", "4"], 4)])
@pytest.mark.parametrize("command", ["serve", "sweep"])
def test_rates_are_per_gpu_of_the_layouts_file_unless_said_otherwise(
    command: str, flags: list[str], gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = {"role": "unified", "host": "here", "devices": ["cuda:0"], "flags": {"tp-size": 2}}
    layout = unified_layout() | {"nodes": [node]}
    file = write(tmp_path / "one.yaml", spec_of(HERE, layouts={"main": layout}))
    found: list[int | None] = []

    @contextlib.contextmanager
    def started(files: list[DeploymentFile], *_: object) -> Iterator[list[ServedLayout]]:
        client, main = LoadClient(()), SimpleNamespace(url="http://h:1")
        monkeypatch.setattr("pd.bench.deployments._client", lambda *args: client)
        running = cast(Any, SimpleNamespace(layouts={"main": main}))
        yield list(_layouts(files[0], running, argparse.Namespace()))

    def probed(settings: LoadSettings, client: LoadClient) -> Server:
        found.append(settings.gpus)
        raise SetupError("enough is known")

    monkeypatch.setattr("pd.bench.deployments.served", started)
    monkeypatch.setattr("pd.bench.load.measure.probe_server", probed)
    monkeypatch.setattr("pd.bench.load.command.probe_server", probed)
    assert cli.bench([command, "--cluster", str(file), *LOAD, *GOODPUT, *flags]) == 1
    assert found == [gpus]


def test_an_environment_reaches_a_load_process_by_its_standard_input(tmp_path: Path) -> None:
    line = Surroundings(str(tmp_path), {"SECRET": "of this test"}).line()
    program = "import os, sys; print(os.getcwd(), os.environ['SECRET'], sys.stdin.read())"
    command = [sys.executable, "-m", "pd.cluster.enter", sys.executable, "-c", program]
    done = subprocess.run(command, input=line + b"the rest", capture_output=True, check=True)
    assert done.stdout.decode().strip() == f"{tmp_path} of this test the rest"


@pytest.mark.parametrize("body", [None, b"{}"])
def test_the_harness_asks_from_a_host_with_the_authorities_that_this_trusts(
    body: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host("here", Local(), "python3", "127.0.0.1", threading.Condition())
    asked: list[object] = []

    def call(request: object, *_: object) -> protocol.Fetched:
        asked.append(request)
        return protocol.Fetched(200, b"answer")

    monkeypatch.setattr(host, "call", call)
    fetch = _fetch_from(host, "/etc/ca.pem")
    assert fetch("https://h/x", headers={"A": "b"}, body=body, timeout=3.0) == (200, "answer")
    expected = protocol.FetchUrl("https://h/x", 3.0, {"A": "b"}, body, authorities="/etc/ca.pem")
    assert asked == [expected]


# ---- real nodes


@pytest.mark.full
def test_ctrl_c_writes_what_there_is_and_stops_the_deployment(tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", spec_of(HERE, **unified_layout()))
    out = tmp_path / "out"
    flags = ["--num-prompts", "100000", "--request-rate", "5", "--output-dir", str(out)]
    command = Benchmark(tmp_path, "serve", "--cluster", str(file), *LOAD, *flags)
    wait_until(lambda: " answered, " in command.log, 60, lambda: command.log)
    state = state_of(file)
    assert state is not None
    command.process.send_signal(signal.SIGTERM)
    status, _ = command.end()
    assert status == 130, command.log
    assert not pids_with(state.token)
    assert state_of(file) is None
    records = read_records(out / "main" / "requests.jsonl")
    assert records and {record.status for record in records} <= {"ok", "interrupted"}
    assert (out / "one.hosts" / "here-main-unified-0.log").is_file()


@pytest.mark.full
def test_a_sweep_over_two_files_names_their_layouts(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.yaml", spec_of(HERE, load=["here"], **unified_layout()))
        for name in ("left", "right")
    ]
    output, out = tmp_path / "sweep.json", tmp_path / "out"
    clusters = [word for file in files for word in ("--cluster", str(file))]
    search = ["--min-rate", "4", "--max-rate", "4", "--repeats", "1", "--num-prompts", "8"]
    places = ["--output", str(output), "--output-dir", str(out)]
    assert cli.bench(["sweep", *clusters, *LOAD, *GOODPUT, *search, *places]) == 0
    rows = json.loads(output.read_text())["results"]
    found = {row["deployment"]: row["highest_rate"] for row in rows if "highest_rate" in row}
    assert found == {"left-main": 4, "right-main": 4}
    for name in ("left", "right"):
        assert (out / f"{name}-main-4.000-0" / "requests.jsonl").is_file()
        assert (out / f"{name}.hosts" / "here-main-proxy.metrics").is_file()
        assert (out / f"{name}.hosts" / "here-load-0.log").is_file()
    assert [state_of(file) for file in files] == [None, None]
