"""The YAML file of a deployment. Errors name the key."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from pd.core.errors import UsageError
from pd.net.cluster_key import load_cluster_key
from pd.util.hints import suggest_name
from pd.util.strict_yaml import read_yaml

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,31}\Z")]
Variable = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\Z")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Flags = dict[str, str | list[str]]
# Flags set by other keys, and secrets, because a command line shows them to all users of a host.
_KEYS_OF_FLAGS = {
    "model": "model",
    "host": "proxy.listen or hosts",
    "advertise-host": "hosts",
    "port": "ports (of the proxy: port)",
    "bootstrap-port": "bootstrap_ports",
    "transfer-backend": "transfer_backend",
    "cluster-key-file": "cluster_key_file",
    **dict.fromkeys(("prefill", "decode", "unified", "discover"), "nodes"),
    "api-key": "pass_environment: [PD_API_KEY]",
    "admin-api-key": "pass_environment: [PD_ADMIN_API_KEY]",
    "config": "flags",
}


class Settings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A mapping of the file. We refuse unknown keys. docs/cluster.md describes all keys."""


class HostSettings(Settings, frozen=True):
    """Members of the Ray cluster. ``node`` is an address, a host name or a Ray node's name."""

    node: str = ""
    labels: dict[str, str] = {}
    directory: str = ""
    model: str = ""
    environment: dict[Variable, str] = {}


class NodeSettings(Settings, frozen=True):
    """``count`` nodes of one role with ``gpus`` GPUs each; on any host if none is named."""

    role: Literal["prefill", "decode", "unified"]
    host: str = ""
    count: Annotated[int, Meta(ge=1, le=256)] = 1
    gpus: Annotated[float, Meta(ge=0, le=64)] = 0
    ports: list[Port] = []
    bootstrap_ports: list[Port] = []
    flags: Flags = {}


class ProxySettings(Settings, frozen=True):
    """The proxy of a layout. ``port`` 0 picks a free one."""

    host: str = ""
    listen: str = "127.0.0.1"
    port: Port = 0
    flags: Flags = {}


class LayoutSettings(Settings, frozen=True):
    """Nodes of one proxy."""

    nodes: Annotated[list[NodeSettings], Meta(min_length=1)]
    proxy: ProxySettings = ProxySettings()


class RaySettings(Settings, frozen=True):
    """The Ray cluster by its dashboard's address. Without one, ``up`` starts it on this machine.

    ``key_file`` is a path of the operator's key, here and on the head; the head runs ``python``.
    """

    address: str = ""
    key_file: str = ""
    control_port: Port = 0
    python: str = "python3"


class ClusterSpec(Settings, frozen=True):
    """A deployment. ``flags`` are of every node, but a node's own win; ``load`` names hosts."""

    model: str
    layouts: Annotated[dict[Name, LayoutSettings], Meta(min_length=1)]
    ray: RaySettings = RaySettings()
    transfer_backend: str = ""
    flags: Flags = {}
    cluster_key_file: str = ""
    pass_environment: list[Variable] = []
    hosts: dict[Name, HostSettings] = {}
    load: list[str] = []


def load_spec(path: Path, known_flags: Mapping[str, Collection[str]] | None = None) -> ClusterSpec:
    """Read and check a file.

    Args:
        known_flags: the flags of each command, without dashes; None does not check them.

    Raises UsageError with the key's name if the file cannot be read or a value cannot work.
    """
    raw = read_yaml(path)
    try:
        if isinstance(raw, dict) and "nodes" in raw and "layouts" not in raw:
            main = {key: raw.pop(key) for key in ("nodes", "proxy") if key in raw}
            raw["layouts"] = {"main": main}
        spec = msgspec.convert(raw, ClusterSpec, strict=False)
        _check_values(spec, known_flags or {})
        if spec.cluster_key_file:
            key_file = (path.parent / os.path.expanduser(spec.cluster_key_file)).resolve()
            load_cluster_key(key_file)
            spec = msgspec.structs.replace(spec, cluster_key_file=str(key_file))
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}") from None
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}{_hint_at(str(error))}") from None
    return spec


def _hint_at(problem: str) -> str:
    unknown = re.search(r"unknown field `(\w+)`", problem)
    kinds = (ClusterSpec, HostSettings, NodeSettings, ProxySettings, LayoutSettings, RaySettings)
    keys = {key for kind in kinds for key in kind.__struct_fields__}
    return suggest_name(unknown[1], keys) if unknown else ""


def _check_values(spec: ClusterSpec, known_flags: Mapping[str, Collection[str]]) -> None:
    """Check everything beyond the schema. Raises UsageError."""
    for name, host in spec.hosts.items():
        if not host.node and not host.labels:
            raise UsageError(f"hosts.{name}: give node (address or name of a Ray node) or labels")
    named = [("load", name) for name in spec.load]
    roles = {node.role for layout in spec.layouts.values() for node in layout.nodes}
    flags: list[tuple[str, str, Flags]] = [("flags", role, spec.flags) for role in sorted(roles)]
    for name, layout in spec.layouts.items():
        where = f"layouts.{name}"
        named.append((f"{where}.proxy.host", layout.proxy.host))
        flags.append((f"{where}.proxy.flags", "proxy", layout.proxy.flags))
        for index, node in enumerate(layout.nodes):
            named.append((f"{where}.nodes[{index}].host", node.host))
            flags.append((f"{where}.nodes[{index}].flags", node.role, node.flags))
            for key, ports in (("ports", node.ports), ("bootstrap_ports", node.bootstrap_ports)):
                if ports and len(ports) != node.count:
                    problem = f"{len(ports)} ports for {node.count} nodes"
                    raise UsageError(f"{where}.nodes[{index}].{key}: {problem}")
        check_halves(f"{where}.nodes", layout, spec.flags)
    for where, name in named:
        if name and name not in spec.hosts:
            raise UsageError(f"{where}: no host {name}{suggest_name(name, spec.hosts)}")
    for where, command, given in flags:
        _check_flags(where, command, given, known_flags.get(command))
    environments = [host.environment for host in spec.hosts.values()]
    for variable in spec.pass_environment:
        # An empty key would be as bad: a proxy would serve everybody.
        if not os.environ.get(variable) and not all(e.get(variable) for e in environments or [{}]):
            raise UsageError(f"pass_environment: {variable} is not set; set it or leave it out")


def check_halves(where: str, layout: LayoutSettings, flags: Flags, absent: str = "") -> None:
    """Refuse a layout that cannot both prefill and decode (without the role ``absent``)."""
    halves = {"prefill", "decode"}
    for node in layout.nodes:
        elastic = (flags | node.flags).get("elastic") == "auto"
        if node.role != absent:
            halves -= halves if elastic or node.role == "unified" else {node.role}
    for role in sorted(halves):
        raise UsageError(f"{where}: no {role} node: add one, or one of role unified")


def _check_flags(where: str, command: str, flags: Flags, known: Collection[str] | None) -> None:
    for name, value in flags.items():
        spelled = name.replace("_", "-")
        if spelled in _KEYS_OF_FLAGS:
            raise UsageError(f"{where}.{name}: this flag is set by {_KEYS_OF_FLAGS[spelled]}")
        if known is not None and spelled not in known:
            hint = suggest_name(spelled, known)
            raise UsageError(f"{where}: pd-launch {command} has no flag --{spelled}{hint}")
        if value in ("", "null", "~"):
            raise UsageError(f"{where}.{name}: no value; give one (true for a switch)")
