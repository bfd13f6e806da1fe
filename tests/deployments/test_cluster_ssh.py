"""A deployment over ssh, to a real sshd in each of two network namespaces."""

from __future__ import annotations

import getpass
import json
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import netns
import pytest
from cluster_helpers import (
    ROOT,
    TOKENS,
    Benchmark,
    Command,
    kill_host,
    pids_with,
    run,
    spec_of,
    state_of,
    wait_gone,
    write,
)
from lacking import skip_or_fail
from processes import wait_until

from pd.bench.load.records import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.cluster.state import ClusterState

pytestmark = pytest.mark.full

PORT = 2222
SSHD = "/usr/sbin/sshd"
WITHIN = 20.0


@pytest.fixture
def network() -> Iterator[netns.Network]:
    netns.require()
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        skip_or_fail("ssh tests need openssh-server and openssh-client")
    with netns.network() as running:
        yield running


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A user's and a host's key pair, made for this test."""
    for name in ("user", "host"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    return tmp_path


@pytest.fixture
def servers(network: netns.Network, keys: Path, state_home: Path) -> Iterator[netns.Network]:
    """The network with an sshd on both hosts, which knows the user's key."""
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd confines its own unprivileged part
    with ExitStack() as stack:
        for host in (network.a, network.b):
            config = keys / f"{host.namespace}.conf"
            config.write_text(
                f"ListenAddress {host.address}:{PORT}\nHostKey {keys / 'host'}\nPidFile none\n"
                f"AuthorizedKeysFile {keys / 'user.pub'}\nStrictModes no\nUsePAM no\n"
                "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
                f"SetEnv PYTHONPATH={ROOT} XDG_STATE_HOME={state_home} OMP_NUM_THREADS=1\n"
            )
            log = stack.enter_context((keys / f"{host.namespace}.sshd.log").open("wb"))
            server = subprocess.Popen(
                [*host.prefix, SSHD, "-D", "-e", "-f", str(config)], stderr=log
            )
            stack.callback(server.wait)
            # With its sessions, which would not hear of the end of a network that is gone.
            stack.callback(kill_host, host)
        for host in (network.a, network.b):
            wait_until(lambda h=host: listens(h), WITHIN)
        yield network


def listens(host: netns.Host) -> bool:
    command = [*host.prefix, "cat", "/proc/net/tcp"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return f":{PORT:04X} 00000000:0000 0A" in found.stdout


def two_hosts(net: netns.Network, keys: Path, *, known: bool = True) -> dict[str, Any]:
    known_hosts = keys / "known_hosts"
    key = " ".join((keys / "host.pub").read_text().split()[:2])
    addresses = [host.address for host in (net.a, net.b)] if known else []
    known_hosts.write_text("".join(f"[{address}]:{PORT} {key}\n" for address in addresses))
    hosts = {
        name: {
            "ssh": f"{getpass.getuser()}@{host.address}",
            "port": PORT,
            "identity": "user",
            "known_hosts": "known_hosts",
            "python": sys.executable,
        }
        for name, host in (("first", net.a), ("second", net.b))
    }
    nodes = [
        {"role": "prefill", "host": "first", "devices": ["cpu"]},
        {"role": "decode", "host": "second", "devices": ["cpu"]},
    ]
    proxy = {"host": "first", "listen": "0.0.0.0"}
    load = ["first", "second"]
    return spec_of(hosts, nodes=nodes, proxy=proxy, transfer_backend="tcp", load=load)


def in_foreground(net: netns.Network, keys: Path) -> tuple[Path, Command, ClusterState]:
    """The file of a deployment, the command that started it and waits, and the run."""
    file = write(keys / "ssh.yaml", two_hosts(net, keys))
    command = Command("up", file)
    command.urls()
    state = state_of(file)
    assert state is not None
    return file, command, state


def test_a_deployment_over_ssh_serves_and_stops(servers: netns.Network, keys: Path) -> None:
    file = write(keys / "ssh.yaml", two_hosts(servers, keys))
    command = Command("up", file, "--detach")
    url = command.urls()["main"]
    assert command.end()[0] == 0
    state = state_of(file)
    assert state is not None
    body = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    assert len(answer.get("output_ids", [])) == 5, answer
    status, out, _ = run("status", file)
    assert (status, out.count(" ready")) == (0, 3), out

    status, _, log = run("down", file)
    assert status == 0, log
    assert not pids_with(state.token)
    names = {path.name for path in state.logs.iterdir()}
    assert {"first-main-proxy.log", "second-main-decode-0.log"} <= names


def test_load_runs_from_both_hosts_and_is_merged(servers: netns.Network, keys: Path) -> None:
    file, out = write(keys / "ssh.yaml", two_hosts(servers, keys)), keys / "out"
    flags = [
        *("--dataset-name", "random", "--vocab-size", "256", "--random-input-len", "12"),
        *("--random-output-len", "6", "--num-prompts", "12", "--request-rate", "20"),
        *("--max-client-lag-ms", "100000", "--max-client-cpu", "10"),
    ]
    command = Benchmark(keys, "serve", "--cluster", str(file), *flags, "--output-dir", str(out))
    status, shown = command.end()
    # Clocks of a busy machine may differ by more than a result allows.
    assert status in (0, 3), command.log
    assert status == 0 or "clock_error_ms" in shown
    records = read_records(out / "main" / "requests.jsonl")
    assert [record.status for record in records] == ["ok"] * 12
    assert {(record.session % 2, record.process) for record in records} == {
        (0, "first/0"),
        (1, "second/0"),
    }
    summary = json.loads((out / "main" / "summary.json").read_text())
    assert 0 < summary["client"]["clock_error_ms"] < 1000
    names = {path.name for path in (out / "ssh.hosts").iterdir()}
    assert {"first-load-0.log", "second-load-0.log", "second-main-decode-0.metrics"} <= names


def test_a_host_that_dies_is_named_and_the_other_one_stopped(
    servers: netns.Network, keys: Path
) -> None:
    file, command, state = in_foreground(servers, keys)
    kill_host(servers.b)
    status, _ = command.end()
    assert status == 1
    assert "host second (ssh " in command.log
    assert "is lost: " in command.log and "it ran main-decode-0" in command.log
    wait_gone(state.token)

    # The run is not forgotten while a host cannot be asked.
    status, out, _ = run("status", file)
    assert status == 1
    assert "unreachable: host second" in out and "Connection refused" in out
    assert run("down", file)[0] == 1
    assert run("down", file, "--forget")[0] == 0
    assert state_of(file) is None


def test_a_host_that_is_cut_off_is_named_and_stops_by_itself(
    servers: netns.Network, keys: Path
) -> None:
    file, command, state = in_foreground(servers, keys)
    # Packets are lost from now on, and neither end is told.
    servers.b.ip("link", "set", "mgmt", "down")
    status, _ = command.end()
    assert status == 1
    assert "host second (ssh " in command.log and "it ran main-decode-0" in command.log
    assert "what ran there may still run" in command.log
    wait_gone(state.token)
    servers.b.ip("link", "set", "mgmt", "up")
    status, _, log = run("down", file)
    assert status == 0, log
    assert (state.logs / "second-main-decode-0.log").is_file()


def test_a_host_whose_key_is_not_known_is_not_talked_to(servers: netns.Network, keys: Path) -> None:
    file = write(keys / "ssh.yaml", two_hosts(servers, keys, known=False))
    status, out, log = run("up", file)
    assert (status, out) == (1, "")
    for name in ("first", "second"):
        assert f"host {name} (ssh " in log
    assert "Host key verification failed" in log


def test_processes_end_when_the_connection_does(servers: netns.Network, keys: Path) -> None:
    _, command, state = in_foreground(servers, keys)
    command.process.send_signal(signal.SIGKILL)
    command.end()
    wait_gone(state.token)
