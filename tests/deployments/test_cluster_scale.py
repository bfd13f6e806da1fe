"""``pd-launch cluster scale``: nodes are added to a deployment that is up, and taken away."""

from __future__ import annotations

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from cluster_helpers import TOKENS, Command, run, spec_of, state_of, wait_gone, write
from processes import Stream, wait_until

from pd.cluster.deployment import Deployment
from pd.cluster.host import Host
from pd.cluster.protocol import ProcessState
from pd.cluster.reach import Local
from pd.cluster.scale import Wanted, _Scaling, parse_wanted
from pd.cluster.spec_file import load_spec
from pd.cluster.state import ClusterState, HostState
from pd.core.errors import UsageError

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
    """Of the processes that ``status`` finds, which are all ready."""
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
    assert up.process.poll() is None
    assert run("down", file)[0] == 0


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
    assert "give the administrator's key in PD_ADMIN_API_KEY" in log
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
    """Plans of further nodes beside those that run, each with its host, name and device."""
    changed = threading.Condition()
    hosts = {
        name: Host(name, Local(), "python3", host.public_address, changed)
        for name, host in spec.hosts.items()
    }
    for host, name, device in running:
        hosts[host].processes[name] = ProcessState(name, 1, "main", name.split("-")[1], device)
    known = {name: HostState(Local(), "python3", "10.0.0.1") for name in hosts}
    state = ClusterState("spec-0", "run", known, None)
    scaling = _Scaling(spec, Deployment(state, changed, hosts, print), 1.0, 1.0)
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
    running = [("a", "main-unified-0", "cuda:0")]
    spec = loaded(tmp_path, group)
    assert [p.device for p in planned(spec, running, "unified", 1)] == ["cuda:2"]
    with pytest.raises(UsageError, match="has a node"):
        planned(spec, running, "unified", 2)


def test_ports_of_the_file_come_first_and_then_free_ones(tmp_path: Path) -> None:
    group = UNIFIED | {"count": 2, "ports": [30000, 30001]}
    plans = planned(loaded(tmp_path, group), [], "unified", 3)
    assert [plan.settings.ports for plan in plans] == [[30000], [30001], []]
