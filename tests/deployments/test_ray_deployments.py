"""Deployments on a Ray cluster of two hosts: they start, lose processes and hosts, and scale."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import netns
import pytest
from processes import wait_until
from ray_hosts import (
    Load,
    RayHosts,
    find_own_pids,
    find_pids,
    kill_host,
    list_pids,
    list_ports,
    read_rows,
    read_urls,
    write_spec,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def two_hosts(directory: Path, *flags_of_second: str) -> Iterator[RayHosts]:
    """A Ray cluster of two hosts, of which the first is the head."""
    netns.require()
    with netns.network() as network:
        running = RayHosts([network.a, network.b], directory)
        try:
            running.start(network.a, "--num-gpus=0")
            running.start(network.b, *flags_of_second)
            yield running
        finally:
            running.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[RayHosts]:
    with two_hosts(tmp_path) as running:
        yield running


class Served:
    """A deployment on two hosts that several tests use, one after another."""

    def __init__(self, hosts: RayHosts, directory: Path) -> None:
        self.hosts, (self.a, self.b) = hosts, hosts.hosts
        self.file = write_spec(
            directory / "cluster.yaml",
            ray={"address": hosts.address},
            hosts={"near": {"node": self.a.address}, "far": {"labels": {"zone": "far"}}},
            nodes=[
                {"role": "unified", "host": "near"},
                {"role": "decode", "host": "far", "gpus": 1},
                {"role": "prefill", "host": "far"},
            ],
            proxy={"host": "near", "listen": "0.0.0.0"},
            pass_environment=["PD_TEST_SECRET"],
        )
        up = hosts.launch("up", self.file, "--trust-network", outside=True)
        self.url = read_urls(up)["main"]

    def read_pids(self) -> dict[str, int]:
        states = self.hosts.read_states(self.file)
        assert {state.state for state in states.values()} == {"ready"}
        return {name: state.pid for name, state in states.items()}

    @contextlib.contextmanager
    def under_load(self) -> Iterator[None]:
        """No request fails in the block and shortly afterwards."""
        load = Load(self.url, pause=0.4)
        try:
            with load.goes_on():
                yield
        finally:
            load.stop()


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PD_TEST_SECRET", "secret of the operator")
        with two_hosts(directory, "--num-gpus=3", "--labels=zone=far") as hosts:
            yield Served(hosts, directory)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("served")) as running:
        yield running


def read_environment(pid: str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def wait_for_state(
    hosts: RayHosts, file: Path, name: str, state: str, restarts: int
) -> dict[str, str]:
    """Wait until a process is in this state, and return its row of ``status``."""

    def is_reached() -> bool:
        found = hosts.read_states(file)[name]
        return (found.state, found.restarts) == (state, restarts)

    wait_until(is_reached, 120)
    return read_rows(hosts.launch("status", file, expect=None))[name]


def test_processes_have_the_places_of_the_file_and_the_operators_environment(
    served: Served,
) -> None:
    assert served.url.startswith(f"http://{served.a.address}:")
    rows = read_rows(served.hosts.launch("status", served.file))
    places = {name: row["host"] for name, row in rows.items()}
    near, far = served.a.address, served.b.address
    assert places == {
        "main-proxy": near,
        "main-unified-0": near,
        "main-decode-0": far,
        "main-prefill-0": far,
    }
    # Ray's environment is not passed on.
    decode = read_environment(rows["main-decode-0"]["pid"])
    unified = read_environment(rows["main-unified-0"]["pid"])
    assert decode["CUDA_VISIBLE_DEVICES"] in ("0", "1", "2")
    assert decode["PD_TEST_SECRET"] == "secret of the operator"
    assert not {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & unified.keys()
    assert not [name for name in unified if name.startswith("RAY_")]


def test_the_list_of_jobs_shows_no_secret(served: Served) -> None:
    token = served.hosts.token.read_text()
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {token}"}) as client:
        listed = client.get(f"http://{served.hosts.address}/api/jobs/").text
    (cluster_key,) = served.hosts.directory.glob("state-0/pd/clusters/*/cluster.key")
    assert "pd.cluster.control" in listed
    for secret in ("secret of the operator", cluster_key.read_text(), token):
        assert secret not in listed
    # The key that proves the control service is gone when it is up.
    assert not list(served.hosts.directory.glob("state-operator/pd/clusters/*.key"))


def test_a_killed_process_starts_again_at_its_address_and_no_request_fails(served: Served) -> None:
    before = served.hosts.read_states(served.file)["main-decode-0"]
    with served.under_load():
        os.kill(before.pid, signal.SIGKILL)
        after = wait_for_state(served.hosts, served.file, "main-decode-0", "ready", 1)
    assert after["url"] == before.url and after["pid"] != str(before.pid)


def test_nodes_come_and_go_under_load_and_no_request_fails(served: Served) -> None:
    with served.under_load():
        rows = read_rows(served.hosts.launch("scale", served.file, "decode=2"))
        assert rows["main-decode-1"]["host"] == served.b.address
    with served.under_load():
        rows = read_rows(served.hosts.launch("scale", served.file, "decode=1"))
        assert "main-decode-1" not in rows


def test_a_lost_host_is_reported_and_no_request_fails_and_down_leaves_nothing(
    served: Served,
) -> None:
    """The last test with this deployment, which it ends."""
    hosts, a, b = served.hosts, served.a, served.b
    with served.under_load():
        kill_host(b)
        row = wait_for_state(hosts, served.file, "main-prefill-0", "lost", 0)
        # It may still run, so it starts nowhere else.
        assert row["state"] == f"lost no member of the Ray cluster is {b.address}"
    hosts.launch("down", served.file, "--lost", b.address)
    assert "is not up" not in hosts.launch("status", served.file, expect=1)
    wait_until(lambda: not find_own_pids(a), 30)
    left = [p for p in hosts.directory.rglob("*") if p.is_file() and "state-1" not in str(p)]
    assert not [p for p in left if "clusters" in p.parts and ".logs" not in str(p)], left
    assert list(hosts.home.iterdir()) == []


@pytest.mark.full
def test_a_deployment_without_an_address_has_a_ray_of_its_own_that_ends_with_it(
    tmp_path: Path,
) -> None:
    netns.require()
    with netns.network() as network:
        hosts = RayHosts([network.a], tmp_path)
        try:
            file = write_spec(tmp_path / "cluster.yaml", nodes=[{"role": "unified"}], proxy={})
            url = read_urls(hosts.launch("up", file))["main"]
            assert url.startswith("http://127.0.0.1:")
            assert read_rows(hosts.launch("status", file))["main-unified-0"]["state"] == "ready"
            (record,) = find_record(hosts)
            directory = Path(json.loads(record.read_text())["ray"]["directory"])
            assert (directory / "token").stat().st_mode & 0o777 == 0o600
            assert record.stat().st_mode & 0o777 == 0o600
            hosts.launch("down", file)
            wait_until(lambda: not list_pids(network.a), 30)
            assert not directory.exists() and not find_record(hosts)
        finally:
            hosts.close()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_deployments_on_one_ray_cluster_do_not_see_each_other(
    tmp_path: Path,
) -> None:
    """They have processes of the same names, on the same host."""
    with serve(tmp_path) as served:
        start_another(served, tmp_path)


def start_another(served: Served, tmp_path: Path) -> None:
    before = served.read_pids()
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(secrets.token_hex(32))
    other = write_spec(
        tmp_path / "other.yaml",
        ray={"address": served.hosts.address, "key_file": str(key), "control_port": 8266},
        hosts={"near": {"node": served.a.address}},
        nodes=[{"role": "unified", "host": "near"}],
        proxy={"host": "near", "listen": "0.0.0.0"},
    )
    with served.under_load():
        load = Load(read_urls(served.hosts.launch("up", other))["main"], threads=1)
        try:
            with load.goes_on():
                rows = read_rows(served.hosts.launch("status", other))
        finally:
            load.stop()
        assert rows.keys() == {"main-proxy", "main-unified-0"}
        socket.create_connection((served.a.address, 8266)).close()
        assert not {int(row["pid"]) for row in rows.values()} & {*before.values()}
        assert served.read_pids() == before
        served.hosts.launch("down", other)
    assert served.read_pids() == before


@pytest.mark.full
@pytest.mark.timeout(900)
def test_serving_goes_on_for_a_minute_after_the_head_has_died(
    hosts: RayHosts, tmp_path: Path
) -> None:
    a, b = hosts.hosts
    file = write_spec(
        tmp_path / "cluster.yaml",
        ray={"address": hosts.address},
        hosts={"far": {"node": b.address}},
        nodes=[{"role": "unified", "host": "far", "count": 2}],
        proxy={"host": "far", "listen": "0.0.0.0"},
    )
    load = Load(read_urls(hosts.launch("up", file))["main"])
    try:
        kill_host(a)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert not load.problems, load.problems[:3]
            time.sleep(0.5)
        with load.goes_on():
            pass
    finally:
        load.stop()
    wait_until(lambda: not find_own_pids(b), 150)
    hosts.launch("down", file)


# Parts of Ray by their command lines. The last two are on the head.
VICTIMS = {
    "worker": b"ray::Supervisor",
    "raylet": b"raylet/raylet",
    "gcs": b"gcs_server",
    "control": b"ray::ControlService",
}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("victim", "number", "backend"),
    [
        ("worker", KILL, "nixl"),
        ("worker", STOP, "tcp"),
        ("raylet", KILL, "tcp"),
        ("raylet", STOP, "nixl"),
        ("gcs", KILL, "nixl"),
        ("gcs", STOP, "tcp"),
        ("control", KILL, "tcp"),
        ("control", STOP, "nixl"),
        ("host", KILL, "nixl"),
    ],
)
def test_no_part_that_dies_or_stops_fails_a_request_or_leaves_a_process_port_or_memory(
    hosts: RayHosts, tmp_path: Path, victim: str, number: signal.Signals, backend: str
) -> None:
    a, b = hosts.hosts
    memory = hosts.list_shared_memory()
    # Without this, UCX finds shared memory between namespaces of one machine.
    environment = {"UCX_TLS": "tcp"} if backend == "nixl" else {}
    file = write_spec(
        tmp_path / "cluster.yaml",
        ray={"address": hosts.address},
        transfer_backend=backend,
        flags={"trust-network": True} if backend == "nixl" else {},
        hosts={
            "near": {"node": a.address, "environment": environment},
            "far": {"node": b.address, "environment": environment},
        },
        nodes=[
            {"role": "unified", "host": "near"},
            {"role": "prefill", "host": "near"},
            {"role": "decode", "host": "far"},
        ],
        proxy={"host": "near", "listen": "0.0.0.0"},
    )
    load = Load(read_urls(hosts.launch("up", file))["main"])
    try:
        with load.goes_on():
            pass
        own = {host: set(find_own_pids(host)) for host in hosts.hosts}
        ports = {
            host: {port for port, pids in list_ports(host).items() if pids & own[host]}
            for host in hosts.hosts
        }
        assert all(ports.values())
        with load.goes_on():
            if victim == "host":
                kill_host(b)
            else:
                pids = find_pids(a if victim in ("gcs", "control") else b, VICTIMS[victim])
                assert pids
                for pid in pids:
                    os.kill(pid, number)
            time.sleep(40)
    finally:
        load.stop()
    # The first attempts may need the part that has died: a host that is declared lost, or the
    # lease's end.
    deadline = time.monotonic() + 400
    while find_record(hosts):
        assert time.monotonic() < deadline
        hosts.launch("down", file, expect=None)
        if find_record(hosts):
            hosts.launch("down", file, "--lost", b.address, expect=None)
    for host in hosts.hosts:
        wait_until(lambda host=host: not find_own_pids(host), 150)
        assert not ports[host] & list_ports(host).keys()
    assert hosts.list_shared_memory() <= memory
    # Ray's dashboard makes the directories pymp-*.
    assert all(path.match("pymp-*") for path in (hosts.scratch / "tmp").iterdir())


def find_record(hosts: RayHosts) -> list[Path]:
    """Find the operator's record of what is up."""
    state = Path(hosts.environment()["XDG_STATE_HOME"])
    return list(state.glob("pd/clusters/*.json"))
