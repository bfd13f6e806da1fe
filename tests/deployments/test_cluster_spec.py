"""Files of deployments: what is refused before anything starts, and what becomes of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pd.cluster.plans import plan_all, plan_nodes
from pd.cluster.spec import load_spec
from pd.commands.servers import list_server_flags
from pd.core.errors import UsageError

ROOT = Path(__file__).parents[2]
BASE = {
    "model": "/models/m",
    "hosts": {"a": {"node": "10.0.0.1"}, "b": {"labels": {"zone": "x"}}},
    "nodes": [{"role": "prefill", "host": "a"}, {"role": "decode", "host": "b"}],
    "proxy": {"host": "a"},
}


def load(tmp_path: Path, text: str | dict[str, Any]) -> Any:
    file = tmp_path / "cluster.yaml"
    file.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return load_spec(file, list_server_flags())


REFUSED: dict[str, tuple[str | dict[str, Any], str]] = {
    "no mapping": ("- 1", "Expected `object`"),
    "no YAML": ("a: [", "is not YAML"),
    "deep": ("[" * 5_000, "is not YAML"),
    "no model": ({"nodes": [{"role": "unified"}]}, "missing required field `model`"),
    "a key that is there twice": ("model: a\nmodel: b", "is there twice"),
    "an unknown key": (BASE | {"modle": "x"}, "did you mean model?"),
    "an unknown key of a host": (BASE | {"hosts": {"a": {"ssh": "user@host"}}}, "`ssh`"),
    "a host without a place": (BASE | {"hosts": {"a": {}}}, "hosts.a: give node"),
    "an unknown host": (BASE | {"load": ["c"]}, "load: no host c"),
    "no decode node": (BASE | {"nodes": [{"role": "prefill"}]}, "no decode node"),
    "an unknown role": (BASE | {"nodes": [{"role": "router"}]}, "router"),
    "a wrong count": (BASE | {"nodes": [{"role": "unified", "count": 0}]}, ">= 1"),
    "ports of others": (
        BASE | {"nodes": [{"role": "unified", "count": 2, "ports": [1]}]},
        "1 ports for 2 nodes",
    ),
    "a port that is none": (BASE | {"proxy": {"port": 70000}}, "<= 65535"),
    "a flag of a key": (BASE | {"flags": {"host": "0.0.0.0"}}, "set by proxy.listen or hosts"),
    "a secret flag": (BASE | {"proxy": {"flags": {"api_key": "s"}}}, "pass_environment"),
    "an unknown flag": (BASE | {"flags": {"page-sise": 4}}, "did you mean page-size?"),
    "a flag without a value": (BASE | {"flags": {"page-size": None}}, "no value"),
    "a variable that is not set": (BASE | {"pass_environment": ["PD_NOT_SET"]}, "PD_NOT_SET"),
    "a name that leads elsewhere": (BASE | {"layouts": {"../x": {}}}, "regex"),
    "a key file that is not there": (BASE | {"cluster_key_file": "none"}, "cluster key"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_files_that_cannot_work_are_refused_by_key(tmp_path: Path, what: str) -> None:
    text, reason = REFUSED[what]
    with pytest.raises(UsageError) as problem:
        load(tmp_path, text)
    message = problem.value.message
    assert reason in message and message.isprintable() and "cluster.yaml" in message


def test_values_mean_what_they_mean_on_the_command_line(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        "model: 0123\nnodes: [{role: unified}]\n"
        "flags: {page-size: 16, enable_x: true, load-format: off}\n".replace(
            "enable_x: true, ", ""
        ),
    )
    (unified,) = [process for process in plan_all(spec) if process.role == "unified"]
    assert unified.arguments == ["--model=0123", "--page-size=16", "--load-format=off"]


def test_processes_have_the_places_and_ports_of_the_file(tmp_path: Path) -> None:
    nodes = [
        {"role": "decode", "host": "a", "count": 2, "ports": [1, 2], "gpus": 2},
        {"role": "decode", "host": "b", "flags": {"page-size": 8}},
        {"role": "prefill", "host": "b", "bootstrap_ports": [9]},
    ]
    spec = load(tmp_path, BASE | {"nodes": nodes, "flags": {"page-size": 4}})
    planned = {process.name: process for process in plan_all(spec)}
    assert [*planned] == [
        *("main-proxy", "main-decode-0", "main-decode-1", "main-decode-2", "main-prefill-0"),
    ]
    assert [process.port for process in planned.values()] == [0, 1, 2, 0, 0]
    assert planned["main-decode-1"].host.node == "10.0.0.1"
    assert planned["main-decode-1"].gpus == 2
    assert planned["main-decode-2"].host.labels == {"zone": "x"}
    assert "--page-size=8" in planned["main-decode-2"].arguments
    assert planned["main-prefill-0"].bootstrap_port == 9
    group = spec.layouts["main"].nodes[0]
    added = plan_nodes(spec, "main", group, 2, [*planned])
    assert [process.name for process in added] == ["main-decode-3", "main-decode-4"]


def test_secrets_go_where_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_API_KEY", "k")
    hosts = {"a": {"node": "x", "environment": {"OWN": "1"}}, "b": {"node": "y"}}
    spec = load(tmp_path, BASE | {"hosts": hosts, "pass_environment": ["PD_API_KEY"]})
    for process in plan_all(spec):
        own = {"OWN": "1"} if process.host.node == "x" else {}
        assert process.environment == {"PD_API_KEY": "k"} | own
        assert "k" not in process.arguments


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*/cluster.yaml")), ids=str)
def test_examples_can_be_loaded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_API_KEY", "k")
    assert plan_all(load_spec(file, list_server_flags()))
