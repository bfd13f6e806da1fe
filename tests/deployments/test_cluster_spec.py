"""What a deployment's YAML file may say, and what is said about the rest."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd.cluster.claims import gpus_of
from pd.cluster.commands import arguments, node_command, plan_nodes, proxy_command
from pd.cluster.spec_file import (
    MAX_FILE_BYTES,
    check_environment,
    check_known_flags,
    load_spec,
)
from pd.commands.cluster import start_deployment
from pd.commands.servers import server_flags
from pd.core.errors import UsageError

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("configs/*/cluster.yaml"))

TWO_HOSTS: dict[str, Any] = {
    "model": "DIR",
    "transfer_backend": "tcp",
    "flags": {"page-size": 8},
    "hosts": {
        "first": {"local": True, "address": "10.0.0.1"},
        "second": {"ssh": "me@10.0.0.2", "port": 2222, "python": "/opt/pd/bin/python"},
    },
    "layouts": {
        "split": {
            "nodes": [
                {"role": "prefill", "host": "first", "devices": ["cuda:0"], "ports": [30000]},
                {
                    "role": "decode",
                    "host": "second",
                    "count": 2,
                    "devices": ["cuda:0", "cuda:1"],
                    "flags": {"page_size": 16, "kv-digest": True},
                },
            ],
            "proxy": {"host": "first", "port": 8000, "flags": {"policy": "round_robin"}},
        }
    },
}


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The deployment above with other values; a path's last key may be new, None removes it."""
    spec = copy.deepcopy(TWO_HOSTS)
    for path, value in changes:
        place: Any = spec
        *above, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in above:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return spec


def load(tmp_path: Path, spec: object) -> Any:
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump(spec))
    return load_spec(file)


class FakeHost:
    """What command lines need to know of a host."""

    run_directory = "/run/there"


# ---- commands


def test_nodes_become_commands(tmp_path: Path) -> None:
    spec = load(tmp_path, TWO_HOSTS)
    plans = plan_nodes(spec)
    assert [p.name for p in plans] == ["split-prefill-0", "split-decode-0", "split-decode-1"]
    host: Any = FakeHost()
    assert node_command(spec, plans[2], host, with_key=True) == [
        *("/opt/pd/bin/python", "-m", "pd.cli", "decode", "--model=DIR"),
        *("--host=0.0.0.0", "--advertise-host=10.0.0.2", "--port=0", "--device=cuda:1"),
        *("--transfer-backend=tcp", "--cluster-key-file=/run/there/cluster.key"),
        *("--page-size=16", "--kv-digest"),
    ]
    prefill = node_command(spec, plans[0], host, with_key=True)
    assert {"--port=30000", "--bootstrap-port=0", "--page-size=8"} <= set(prefill)
    urls = {"prefill": ["http://a:1"], "decode": ["http://b:1", "http://b:2"]}
    proxy = proxy_command(spec, "split", urls, host, with_key=False)
    assert proxy[4:] == [
        *("--host=127.0.0.1", "--port=8000", "--prefill=http://a:1"),
        *("--decode=http://b:1", "--decode=http://b:2", "--policy=round_robin"),
    ]


def test_flags_become_arguments() -> None:
    flags = {"a": True, "b": False, "c": None, "d": 3, "e": [1, "x"], "f": "with space"}
    assert arguments(flags) == ["--a", "--d=3", "--e=1", "--e=x", "--f=with space"]


def test_a_host_may_have_the_model_elsewhere(tmp_path: Path) -> None:
    spec = load(tmp_path, changed(("hosts.second.model", "/models/x")))
    host: Any = FakeHost()
    models = [node_command(spec, p, host, with_key=False)[4] for p in plan_nodes(spec)]
    assert models == ["--model=DIR", "--model=/models/x", "--model=/models/x"]


def test_one_layout_needs_no_name(tmp_path: Path) -> None:
    layout = TWO_HOSTS["layouts"]["split"]
    spec = load(
        tmp_path, changed(("layouts", None), ("nodes", layout["nodes"]), ("proxy", layout["proxy"]))
    )
    assert list(spec.layouts) == ["main"]


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.key").write_text("k" * 32)
    changes = ("cluster_key_file", "cluster.key"), ("hosts.second.identity", "keys/id")
    spec = load(tmp_path, changed(*changes))
    assert spec.cluster_key_file == tmp_path / "cluster.key"
    assert spec.hosts["second"].identity == tmp_path / "keys/id"


# ---- errors


NODE = "layouts.split.nodes.1"
REFUSED = {
    "unknown key": (("modle", "x"), "unknown key modle (did you mean model?)"),
    "unknown key of a host": (
        ("hosts.second.adress", "10.0.0.2"),
        "unknown key hosts.second.adress (did you mean address?)",
    ),
    "unknown key of a node": (
        (f"{NODE}.device", "cpu"),
        "unknown key layouts.split.nodes[1].device (did you mean devices?)",
    ),
    "missing key": (("layouts.split.proxy", None), "the key layouts.split.proxy is missing"),
    "role": ((f"{NODE}.role", "decoder"), "layouts.split.nodes[1].role: input should be 'prefill'"),
    "count": ((f"{NODE}.count", 0), "layouts.split.nodes[1].count: input should be greater"),
    "port": (("layouts.split.proxy.port", 70000), "layouts.split.proxy.port: input should be less"),
    "port as text": (("layouts.split.proxy.port", "8000"), "layouts.split.proxy.port: "),
    "device": ((f"{NODE}.devices", ["gpu0"]), "layouts.split.nodes[1].devices[0]: 'gpu0' is not "),
    "no hosts": (("hosts", {}), "hosts: "),
    "unknown host": (
        (f"{NODE}.host", "secnod"),
        "layouts.split.nodes[1].host: there is no host secnod (did you mean second?)",
    ),
    "unknown load host": (("load", ["third"]), "load: there is no host third"),
    "no way": (("hosts.first.local", None), "hosts.first: give one of local: true, netns: NAME"),
    "two ways": (("hosts.second.netns", "n"), "hosts.second: give one of"),
    "local: false": (("hosts.first.local", False), "hosts.first.local: "),
    "ssh's keys": (("hosts.first.port", 22), "hosts.first.port: only a host with ssh has it"),
    "an option for ssh": (
        ("hosts.second.ssh", "-oProxyCommand=x"),
        "hosts.second.ssh: '-oProxyCommand=…' is not one word such as user@10.0.0.2",
    ),
    "an option for ip": (("hosts.first", {"netns": "-n"}), "hosts.first.netns: "),
    "spaces for ssh": (("hosts.second.ssh", "me@far; touch /tmp/x"), "hosts.second.ssh: "),
    "a relative interpreter": (
        ("hosts.second.python", ".venv/bin/python"),
        "hosts.second.python: give an absolute path, not .venv/bin/python",
    ),
    "a name for a file": (
        ("hosts", {"../x": {"local": True}}),
        "hosts.../x: '../x' is not a name of up to 32 letters, digits, - and _",
    ),
    "the place of logs": (
        ("hosts.logs", {"local": True}),
        "hosts.logs: logs of all hosts are collected under the name logs; name the host diff",
    ),
    "the short form beside layouts": (
        ("nodes", [{"role": "unified", "host": "first"}]),
        "nodes does not go with layouts: write it below one of the layouts",
    ),
    "nothing that generates": (
        (f"{NODE}.role", "prefill"),
        "layouts.split.nodes: no node generates tokens: add one of role decode, or of role unified",
    ),
    "nothing that computes prompts": (
        ("layouts.split.nodes.0.role", "decode"),
        "layouts.split.nodes: no node computes prompts: add one of role prefill, or of role",
    ),
    "loopback": (
        ("hosts.first.address", None),
        "hosts.first: give the address by which the other hosts of layouts.split reach it",
    ),
    "ports": (
        (f"{NODE}.ports", [1, 2, 3]),
        "layouts.split.nodes[1].ports: 3 ports for 2 nodes",
    ),
    "ports of prefill": (
        (f"{NODE}.bootstrap_ports", [1, 2]),
        "layouts.split.nodes[1].bootstrap_ports: only prefill nodes have them",
    ),
    "a port twice": (
        ("layouts.split.nodes.0.bootstrap_ports", [8000]),
        "layouts.split.nodes[0].bootstrap_ports[0]: layouts.split.proxy.port has port 8000 of host "
        "first already",
    ),
    "a GPU twice": (
        (f"{NODE}.devices", ["cuda", "cuda:0"]),
        "layouts.split.nodes[1] (node 1): layouts.split.nodes[1] (node 0) has device cuda:0 of "
        "host second already; share_devices: true allows it",
    ),
    "a flag with a key": (
        (f"{NODE}.flags", {"port": 1}),
        "layouts.split.nodes[1].flags.port: this flag is set by ports",
    ),
    "a secret": (
        ("layouts.split.proxy.flags", {"api_key": "s"}),
        "layouts.split.proxy.flags.api_key: this flag is set by pass_environment: [PD_API_KEY]",
    ),
    "a proxy out of reach": (
        ("load", ["second"]),
        "layouts.split.proxy.listen: host second sends requests, and does not reach 127.0.0.1",
    ),
    "a key file": (("cluster_key_file", "nowhere.key"), "cannot read the cluster key"),
    "a variable": (
        ("pass_environment", ["A=secret"]),
        "pass_environment[0]: 'A=…' is not the name of a variable",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_name_the_key(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UsageError) as refused:
        load(tmp_path, changed(change))
    assert f"two.yaml: {message}" in refused.value.message
    assert "\n" not in refused.value.message


def test_devices_may_be_shared_if_the_file_says_so(tmp_path: Path) -> None:
    load(tmp_path, changed((f"{NODE}.devices", ["cuda:0"]), ("share_devices", True)))


TP = "layouts.split.nodes.1.flags.tp-size"


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ([], 3),
        ([("layouts.split.nodes.1.count", 1)], 2),
        ([("layouts.split.nodes.1.devices", ["cuda:0", "cuda:2"]), (TP, 2)], 5),
        ([("flags.tp_size", "2"), (TP, 1)], 4),
        # Both roles on one GPU of one machine.
        (
            [
                ("layouts.split.nodes.1.host", "first"),
                ("layouts.split.nodes.1.count", 1),
                ("share_devices", True),
            ],
            1,
        ),
        ([("layouts.split.nodes.0.devices", ["cpu"])], 2),
        ([("layouts.split.nodes.0.devices", ["auto"])], None),
        ([("layouts.split.nodes.1.devices", None)], None),
    ],
)
def test_gpus_of_a_layout_are_counted_once(
    changes: list[tuple[str, Any]], gpus: int | None, tmp_path: Path
) -> None:
    assert gpus_of(load(tmp_path, changed(*changes)), "split") == gpus


def test_a_node_takes_as_many_gpus_as_it_has_ranks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has device cuda:1 of host second already"):
        load(tmp_path, changed((TP, 2)))


def test_elastic_nodes_of_one_role_serve(tmp_path: Path) -> None:
    load(tmp_path, changed((f"{NODE}.role", "prefill"), (f"{NODE}.flags", {"elastic": "auto"})))
    load(tmp_path, changed(("layouts.split.nodes.0.role", "decode"), ("flags.elastic", "auto")))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("layouts:\n  a: 1\n  b: 2\n  a: 3", "line 4: the key a is there already"),
        ("model: x\nmodel: y", "line 2: the key model is there already"),
        ('hosts: {}\nmodel: "a\\0b"', r"line 2: no text can have the character \0"),
    ],
)
def test_what_no_deployment_can_have_is_refused_with_its_line(
    lines: str, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(lines)
    with pytest.raises(UsageError) as refused:
        load_spec(file)
    assert refused.value.message == f"{file}, {complaint}"


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "merged.yaml"
    node = "{role: unified, host: here, flags: {page-size: 8}}"
    file.write_text(
        f"model: DIR\nhosts: {{here: {{local: true}}}}\nnodes:\n- &one {node}\n"
        "- {<<: *one, flags: {page-size: 16}}\nproxy: {host: here}\n"
    )
    nodes = load_spec(file).layouts["main"].nodes
    assert [node.flags["page-size"] for node in nodes] == [8, 16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("flags", {"pagesize": 1}),
            "flags: pd-launch decode has no flag --pagesize (did you mean",
        ),
        ((f"{NODE}.flags", {"policy": 1}), "layouts.split.nodes[1].flags: pd-launch decode has no"),
        (("layouts.split.proxy.flags", {"page-size": 1}), "layouts.split.proxy.flags: pd-launch"),
    ],
)
def test_flags_that_no_command_has_are_refused(
    change: tuple[str, Any], message: str, tmp_path: Path
) -> None:
    spec = load(tmp_path, changed(change))
    with pytest.raises(UsageError) as refused:
        check_known_flags(spec, server_flags())
    assert message in refused.value.message


@pytest.mark.parametrize("value", [None, ""])
def test_a_key_that_is_not_set_here_is_not_left_out(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the proxy would start and serve everybody."""
    monkeypatch.setenv("PD_ADMIN_API_KEY", "set")
    if value is None:
        monkeypatch.delenv("PD_API_KEY", raising=False)
    else:
        monkeypatch.setenv("PD_API_KEY", value)
    passed = ("pass_environment", ["PD_ADMIN_API_KEY", "PD_API_KEY"])
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump(changed(passed)))
    with pytest.raises(UsageError) as refused:
        start_deployment(load_spec(file), file)
    assert refused.value.message.startswith("pass_environment: PD_API_KEY is not set here")
    hosts = (f"hosts.{name}.environment" for name in ("first", "second"))
    theirs = ((host, {"PD_API_KEY": "theirs"}) for host in hosts)
    check_environment(load(tmp_path, changed(passed, *theirs)))
    monkeypatch.setenv("PD_API_KEY", "set")
    check_environment(load(tmp_path, changed(passed)))


NO_FILES = [
    *(b"", b"- a", b"a: [", b"\xff\xfe", b"1: 2", b"a" * (1 << 21), b"[" * 3000),
    *(b"model: 2024-13-45", b"model: 0x_", b"model: !!int ''", b"model: !!bool x"),
    *(b"model: !!timestamp x", b"model: " + b"9" * 5000),
]


@pytest.mark.parametrize("content", NO_FILES, ids=lambda content: repr(content[:24]))
def test_a_file_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    assert len(content) < 10000 or len(content) > MAX_FILE_BYTES
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.yaml"):
        load_spec(file)
    with pytest.raises(UsageError, match="No such file"):
        load_spec(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_published_deployments_are_understood(path: Path) -> None:
    check_known_flags(load_spec(path), server_flags())
