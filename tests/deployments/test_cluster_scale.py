"""``pd-launch cluster scale``: nodes are added to a deployment that is up, and taken away."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from cluster_helpers import (
    TOKENS,
    Command,
    pid_of,
    pids_with,
    run,
    spec_of,
    state_of,
    unified_layout,
    wait_gone,
    write,
)
from processes import Stream, wait_until
from tiny import tiny_model

from pd.cluster.deployment import Deployment
from pd.cluster.host import Host
from pd.cluster.protocol import ProcessState
from pd.cluster.reach import Local
from pd.cluster.scale import Wanted, _Scaling, parse_wanted
from pd.cluster.spec_file import load_spec
from pd.cluster.state import ClusterState, HostState, changing, create_state
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.cluster.commands import NodePlan
    from pd.cluster.spec import ClusterSpec


def split(**settings: Any) -> dict[str, Any]:
    """A prefill and a decode node on this machine."""
    nodes = [{"role": role, "host": "here", "devices": ["cpu"]} for role in ("prefill", "decode")]
    return spec_of({"here": {"local": True}}, nodes=nodes, proxy={"host": "here"}, **settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "split.yaml", split())


CLIENTS = 6


def names(file: Path) -> set[str]:
    """The names of the processes that ``status`` finds, which are all ready."""
    status, out, log = run("status", file)
    assert status == 0, out + log
    return {line.split()[1] for line in out.splitlines()[1:]}


def uses(url: str) -> int:
    """Number of nodes that the proxy has."""
    return len(httpx.get(f"{url}/workers", timeout=30).json()["workers"])


@contextlib.contextmanager
def traffic(url: str) -> Iterator[list[Stream]]:
    """Streams one after the other of several clients, on all nodes, until the end of the block."""
    over, streams = threading.Event(), list[Stream]()

    def ask(number: int) -> None:
        while not over.is_set():
            streams.append(Stream(url, [*TOKENS, number], 200).join())

    with ThreadPoolExecutor(CLIENTS) as clients:
        for number in range(CLIENTS):
            clients.submit(ask, number)
        wait_until(lambda: len(streams) >= CLIENTS, 60)
        try:
            yield streams
        finally:
            over.set()


@pytest.mark.full
def test_nodes_come_and_go_and_streams_go_on(file: Path) -> None:
    up = Command("up", file, "--detach")
    (url,) = up.urls().values()
    assert up.end() == (0, "")
    first = {"main-proxy", "main-prefill-0", "main-decode-0"}
    status, out, log = run("scale", file, "decode=3", "main.prefill=2")
    assert status == 0, log
    more = {"main-decode-1", "main-decode-2", "main-prefill-1"}
    assert {line.split()[1] for line in out.splitlines()[1:]} == names(file) == first | more
    assert uses(url) == 5

    with traffic(url) as streams:
        status, _, log = run("scale", file, "decode=1", "prefill=1")
    assert status == 0, log
    assert len(streams) > CLIENTS
    assert all(stream.succeeded() for stream in streams), streams
    assert names(file) == first
    wait_until(lambda: uses(url) == 2, 30)

    # A number is not given twice, since logs have the names of nodes.
    assert run("scale", file, "decode=2")[0] == 0
    assert names(file) == first | {"main-decode-3"}

    status, _, log = run("scale", file, "decode=0")
    assert (status, "no node generates tokens" in log) == (2, True), log
    assert names(file) == first | {"main-decode-3"}
    assert run("down", file)[0] == 0
    assert state_of(file) is None


@pytest.mark.full
def test_the_command_in_the_foreground_knows_who_came_and_who_was_sent_away(file: Path) -> None:
    up = Command("up", file)
    (url,) = up.urls().values()
    state = state_of(file)
    assert state is not None
    assert run("scale", file, "decode=2")[0] == 0
    assert run("scale", file, "prefill=2", "decode=1")[0] == 0
    assert names(file) == {"main-proxy", "main-prefill-0", "main-prefill-1", "main-decode-0"}
    assert Stream(url, TOKENS, 5).join().succeeded()
    assert up.process.poll() is None
    up.process.send_signal(signal.SIGINT)
    assert up.end()[0] == 0
    wait_gone(state.token)
    # It stopped the new node, too, in its turn, and has its log.
    logs = {path.name for path in state.logs.iterdir()}
    assert {"here-main-prefill-1.log", "here-main-prefill-1.metrics"} <= logs
    assert "was killed" not in up.log


@pytest.mark.full
def test_a_node_that_does_not_start_changes_nothing(file: Path) -> None:
    up = Command("up", file)
    up.urls()
    before = names(file)
    spec = yaml.safe_load(file.read_text())
    spec["flags"]["page-size"] = 3
    write(file, spec)
    status, _, log = run("scale", file, "decode=2", "prefill=2")
    assert status == 1
    assert "ended with status 2" in log
    assert "--page-size must be one of" in log
    assert names(file) == before
    # It stops everything a while after a node that it needs has ended.
    time.sleep(4.0)
    assert up.process.poll() is None
    assert run("down", file)[0] == 0


@pytest.mark.full
def test_a_node_that_does_not_start_on_another_name_of_the_machine_ends_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "cluster.key").write_text("k" * 64)
    hosts = {"a": {"local": True}}
    settings = {"cluster_key_file": "cluster.key", **unified_layout("a")}
    file = write(tmp_path / "two.yaml", spec_of(hosts, **settings))
    up = Command("up", file, "--detach")
    (url,) = up.urls().values()
    assert up.end()[0] == 0
    state = state_of(file)
    assert state is not None
    before = pids_with(state.token)
    assert len(before) == 2

    hosts = {name: {"local": True, "address": f"192.0.2.{n}"} for n, name in enumerate("ab", 1)}
    broken = {"role": "unified", "host": "b", "devices": ["cpu"], "flags": {"page-size": 3}}
    settings["nodes"] = [*settings["nodes"], broken]
    write(file, spec_of(hosts, **settings))
    status, _, log = run("scale", file, "unified=2")
    assert (status, "main-unified-1 on host b" in log) == (1, True), log
    assert "--page-size must be one of" in log
    assert pids_with(state.token) == before
    assert Stream(url, TOKENS, 5).join().succeeded()
    assert state_of(file) == state
    assert run("down", file)[0] == 0


@pytest.mark.full
def test_a_proxy_with_a_key_is_asked_with_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes run where the file says, too, so that a relative path is the same for all of them."""
    (tmp_path / "model").symlink_to(tiny_model())
    here = {"local": True, "directory": str(tmp_path)}
    spec = split(pass_environment=["PD_API_KEY"]) | {"model": "model", "hosts": {"here": here}}
    spec["proxy"]["listen"] = "0.0.0.0"
    write(file, spec)
    monkeypatch.setenv("PD_API_KEY", "a-secret-of-this-test")
    up = Command("up", file, "--detach")
    up.urls()
    assert up.end()[0] == 0
    assert run("scale", file, "decode=2")[0] == 0
    monkeypatch.delenv("PD_API_KEY")
    status, _, log = run("scale", file, "decode=1")
    assert (status, "set PD_ADMIN_API_KEY" in log) == (1, True), log
    assert len(names(file)) == 4
    assert run("down", file)[0] == 0


@pytest.mark.full
def test_what_a_killed_command_has_left_is_ended_and_who_is_gone_is_replaced(file: Path) -> None:
    up = Command("up", file, "--detach")
    (url,) = up.urls().values()
    assert up.end()[0] == 0
    first = names(file)
    killed = Command("scale", file, "decode=3")
    wait_until(lambda: "decode-2" in killed.log, 30, lambda: killed.log)
    killed.process.kill()
    killed.process.wait()
    os.kill(pid_of(file, "main-decode-0"), signal.SIGKILL)
    status, _, log = run("scale", file, "decode=2")
    assert status == 0, log
    assert "main-decode-0 on host here is gone" in log
    assert "main-decode-1 on host here was left behind" in log
    more = {"main-decode-3", "main-decode-4"}
    assert names(file) == first - {"main-decode-0"} | more
    wait_until(lambda: uses(url) == 3, 30)
    assert Stream(url, TOKENS, 5).join().succeeded()
    assert run("down", file)[0] == 0


def test_two_commands_do_not_change_a_deployment_at_once(tmp_path: Path) -> None:
    state = ClusterState("spec-0", "run", {}, None)
    create_state(state)
    with (
        changing(state),
        pytest.raises(SetupError, match="another command changes the number of nodes"),
        changing(state),
    ):
        pass
    with changing(state):
        pass


def test_a_port_is_taken_on_its_own_host_only(tmp_path: Path) -> None:
    groups = [{"role": "unified", "host": host, "ports": [30000]} for host in ("a", "b")]
    plans = planned(loaded(tmp_path, *groups), [], "unified", 3)
    assert [(plan.host, plan.settings.ports) for plan in plans] == [
        ("a", [30000]),
        ("b", [30000]),
        ("a", []),
    ]


def test_a_node_goes_where_a_gpu_is_free(tmp_path: Path) -> None:
    small = UNIFIED | {"devices": ["cuda:0"]}
    large = {"role": "unified", "host": "b", "devices": ["cuda:0", "cuda:1"]}
    running = [("a", "main-unified-0", "cuda:0"), ("b", "main-unified-1", "cuda:0")]
    (plan,) = planned(loaded(tmp_path, small, large), running, "unified", 1)
    assert (plan.host, plan.device) == ("b", "cuda:1")


@pytest.mark.full
def test_a_proxy_with_an_administrators_key_is_asked_with_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, split(pass_environment=["PD_ADMIN_API_KEY"]))
    monkeypatch.setenv("PD_ADMIN_API_KEY", "a-secret-of-this-test")
    up = Command("up", file, "--detach")
    up.urls()
    assert up.end()[0] == 0
    assert run("scale", file, "decode=2")[0] == 0
    monkeypatch.setenv("PD_ADMIN_API_KEY", "another-key")
    status, _, log = run("scale", file, "decode=3")
    assert status == 1
    assert "set PD_ADMIN_API_KEY to it" in log
    assert "main-decode-3" not in names(file)
    status, _, log = run("down", file)
    assert status == 0
    assert "a-secret-of-this-test" not in log


def test_a_deployment_that_is_not_up_has_no_nodes_to_change(file: Path) -> None:
    status, _, log = run("scale", file, "decode=2")
    assert (status, log) == (1, f"{file} is not up\n")


# ---- what is asked for, and where nodes go


def loaded(tmp_path: Path, *groups: dict[str, Any], **settings: Any) -> ClusterSpec:
    hosts = {"a": {"ssh": "root@10.0.0.1"}, "b": {"ssh": "root@10.0.0.2"}}
    layouts = {"main": {"nodes": list(groups), "proxy": {"host": "a"}}}
    spec = spec_of(hosts, layouts=layouts, **settings)
    return load_spec(write(tmp_path / "spec.yaml", spec))


UNIFIED = {"role": "unified", "host": "a"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["decode"], "give ROLE=N or LAYOUT.ROLE=N such as decode=3, not decode"),
        (["decode=-1"], "give ROLE=N"),
        (["decode=1.5"], "give ROLE=N"),
        (["decod=1"], "a node's role is prefill, decode, unified, not decod"),
        (["other.decode=1"], "there is no layout other"),
        (["decode=300"], "at most 256 nodes"),
        (["decode=1", "main.decode=2"], "decode of main is given twice"),
        ([], "say how many nodes"),
    ],
)
def test_what_cannot_be_understood_is_refused(
    tmp_path: Path, words: list[str], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_wanted(words, loaded(tmp_path, UNIFIED))


def test_the_layout_is_named_where_there_are_several(tmp_path: Path) -> None:
    layout = {"nodes": [UNIFIED], "proxy": {"host": "a"}}
    raw = spec_of({"a": {"local": True}}, layouts={"one": layout, "two": layout})
    spec = load_spec(write(tmp_path / "spec.yaml", raw))
    with pytest.raises(UsageError, match=r"say of which layout: one\.unified, two\.unified"):
        parse_wanted(["unified=2"], spec)
    assert parse_wanted(["two.unified=2"], spec) == [Wanted("two", "unified", 2)]


def planned(
    spec: ClusterSpec, running: list[tuple[str, str, str]], role: Any, number: int
) -> list[NodePlan]:
    """Plans of further nodes beside those that run, each with its host, name and devices."""
    changed = threading.Condition()
    hosts = {
        name: Host(name, Local(), "python3", host.public_address, changed)
        for name, host in spec.hosts.items()
    }
    for host, name, device in running:
        hosts[host].processes[name] = ProcessState(
            name, 1, "main", name.split("-")[1], device.split()
        )
    known = {name: HostState(Local(), "python3", "10.0.0.1") for name in hosts}
    state = ClusterState("spec-0", "run", known, None)
    running = Deployment(state, changed, hosts, print)
    scaling = _Scaling(spec, running, 1.0, 1.0, threading.Event())
    plans: list[NodePlan] = []
    for _ in range(number):
        plans.append(scaling._plan(Wanted("main", role, 9), plans))
    return plans


def test_nodes_go_where_there_are_fewest_for_the_size_of_a_group(tmp_path: Path) -> None:
    small, large = UNIFIED, {"role": "unified", "host": "b", "count": 3}
    spec = loaded(tmp_path, small, large)
    running = [("a", "main-unified-0", ""), *(("b", f"main-unified-{n}", "") for n in (1, 2, 3))]
    plans = planned(spec, running, "unified", 4)
    assert sorted(plan.host for plan in plans) == ["a", "b", "b", "b"]
    assert [plan.name for plan in plans] == [f"main-unified-{n}" for n in (4, 5, 6, 7)]


def test_a_gpu_has_one_node(tmp_path: Path) -> None:
    gpus = [f"cuda:{n}" for n in range(4)]
    group = UNIFIED | {"devices": gpus}
    spec = loaded(tmp_path, group)
    running = [("a", "main-unified-0", "cuda:0"), ("a", "main-unified-1", "cuda:2")]
    assert [p.device for p in planned(spec, running, "unified", 2)] == ["cuda:1", "cuda:3"]
    with pytest.raises(UsageError, match="each of the devices cuda:0, cuda:1, cuda:2, cuda:3"):
        planned(spec, running, "unified", 3)
    shared = loaded(tmp_path, group, share_devices=True)
    assert [p.device for p in planned(shared, running, "unified", 3)][:2] == ["cuda:1", "cuda:3"]


def test_a_node_of_two_ranks_takes_two_gpus(tmp_path: Path) -> None:
    group = UNIFIED | {"devices": ["cuda:0", "cuda:2"], "flags": {"tp-size": 2}}
    running = [("a", "main-unified-0", "cuda:0 cuda:1")]
    spec = loaded(tmp_path, group)
    assert [p.device for p in planned(spec, running, "unified", 1)] == ["cuda:2"]
    with pytest.raises(UsageError, match="has a node"):
        planned(spec, running, "unified", 2)


def test_ports_of_the_file_come_first_and_then_free_ones(tmp_path: Path) -> None:
    group = UNIFIED | {"count": 2, "ports": [30000, 30001]}
    plans = planned(loaded(tmp_path, group), [], "unified", 3)
    assert [plan.settings.ports for plan in plans] == [[30000], [30001], []]
