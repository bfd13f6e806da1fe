"""A deployment over four network namespaces, started by its YAML file for a benchmark whose
load comes from one of the hosts.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import netns
import pytest
from cluster_helpers import Benchmark, kill_host, spec_of, state_of, write
from processes import wait_until

from pd import cli
from pd.bench.load.records import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("client", "proxy", "prefill", "decode")
RANDOM = ("--dataset-name", "random", "--vocab-size", "256")
LOAD = (*RANDOM, "--random-input-len", "12", "--random-output-len", "6")
# A machine that other tests keep busy makes every client late.
PATIENT = ("--max-client-lag-ms", "100000", "--max-client-cpu", "10")
WITHIN = 60.0


@pytest.fixture
def network() -> Iterator[dict[str, netns.Host]]:
    netns.require()
    with netns.lan(len(NAMES)) as lan:
        yield dict(zip(NAMES, lan.hosts, strict=True))


def four_hosts(network: dict[str, netns.Host], backend: str) -> dict[str, Any]:
    """The deployment of these tests."""
    # Without this, UCX finds shared memory between namespaces of one machine.
    env = {"UCX_TLS": "tcp"} if backend == "nixl" else {}
    flags = {"trust-network": True} if backend == "nixl" else {}
    hosts = {
        name: {"netns": host.namespace, "address": host.address, "environment": env}
        for name, host in network.items()
    }
    nodes = [
        {"role": role, "host": role, "devices": ["cpu"], "flags": flags}
        for role in ("prefill", "decode")
    ]
    proxy = {"host": "proxy", "listen": "0.0.0.0"}
    return spec_of(hosts, nodes=nodes, proxy=proxy, transfer_backend=backend, load=["client"])


def nothing_runs(network: dict[str, netns.Host]) -> bool:
    commands = [["ip", "netns", "pids", host.namespace] for host in network.values()]
    return not any(subprocess.run(c, capture_output=True, check=True).stdout for c in commands)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_load_from_a_host_and_what_all_hosts_say_are_in_one_directory(
    backend: str, network: dict[str, netns.Host], tmp_path: Path
) -> None:
    file, out = write(tmp_path / "four.yaml", four_hosts(network, backend)), tmp_path / "out"
    flags = ["--num-prompts", "12", "--request-rate", "50", "--processes", "2", "--warmup", "1"]
    command = ["serve", "--cluster", str(file), *LOAD, *PATIENT, *flags, "--output-dir", str(out)]
    assert cli.bench(command) == 0
    records = read_records(out / "main" / "requests.jsonl")
    assert [record.status for record in records] == ["ok"] * 12
    assert {(record.session % 2, record.process) for record in records} == {
        (0, "client/0"),
        (1, "client/1"),
    }
    assert all(record.output_tokens == 6 for record in records)
    summary = json.loads((out / "main" / "summary.json").read_text())
    assert summary["settings"]["url"].startswith(f"http://{network['proxy'].address}:")
    # From the proxy's metrics, which this machine does not reach.
    assert summary["server"]["output_tokens"] >= 12 * 6

    collected = {path.name for path in (out / "four.hosts").iterdir()}
    logs = {"prefill-main-prefill-0", "decode-main-decode-0", "proxy-main-proxy"}
    assert {f"{name}.log" for name in (*logs, "client-load-0", "client-load-1")} <= collected
    assert {f"{name}.metrics" for name in logs} <= collected
    metrics = (out / "four.hosts" / "decode-main-decode-0.metrics").read_text()
    sent = re.search(rf'^pd_transfer_bytes_total{{backend="{backend}"}} (\S+)', metrics, re.M)
    assert sent is not None and float(sent[1]) > 0
    assert nothing_runs(network)
    assert state_of(file) is None


@pytest.mark.full
@pytest.mark.parametrize("victim", ["decode", "client"])
def test_a_host_that_dies_under_load_is_named_and_the_rest_is_stopped(
    victim: str, network: dict[str, netns.Host], tmp_path: Path
) -> None:
    file, out = write(tmp_path / "four.yaml", four_hosts(network, "tcp")), tmp_path / "out"
    flags = ["--num-prompts", "100000", "--request-rate", "5", "--output-dir", str(out)]
    command = Benchmark(tmp_path, "serve", "--cluster", str(file), *LOAD, *PATIENT, *flags)
    wait_until(lambda: " answered, " in command.log, WITHIN, lambda: command.log)
    kill_host(network[victim])
    status, _ = command.end()
    ran = {"decode": "main-decode-0", "client": "nothing"}[victim]
    assert status == 1, command.log
    last = command.log.splitlines()[-1]
    assert re.search(rf"host {victim} \(.*\) is lost: .*it ran {ran}", last), command.log
    assert nothing_runs(network)
    assert (out / "four.hosts" / "prefill-main-prefill-0.log").is_file()
    if victim != "client":  # which had the records
        summary = json.loads((out / "main" / "summary.json").read_text())
        assert summary["interrupted"] is True
        assert any(r.status == "ok" for r in read_records(out / "main" / "requests.jsonl"))
