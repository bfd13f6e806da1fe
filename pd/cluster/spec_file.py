"""Reads a deployment's YAML file and says what is wrong with it, key by key."""

from __future__ import annotations

import difflib
import os
import types
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from pd.cluster.claims import check_collisions
from pd.cluster.spec import SHAPES, ClusterSpec, Flags, HostSettings, LayoutSettings, refuse
from pd.cluster.state import LOGS
from pd.core.cluster_key import load_cluster_key
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from pydantic_core import ErrorDetails

MAX_FILE_BYTES = 1 << 20
# Flags that follow from other keys, and secrets, which every user of a host could read in its list
# of processes.
_FLAGS_BY_KEY = {
    "model": "model",
    "host": "hosts.NAME.address or proxy.listen",
    "advertise-host": "hosts.NAME.address",
    "port": "ports (of the proxy: port)",
    "bootstrap-port": "bootstrap_ports",
    "device": "devices",
    "transfer-backend": "transfer_backend",
    "cluster-key-file": "cluster_key_file",
    "prefill": "nodes",
    "decode": "nodes",
    "unified": "nodes",
    "api-key": "pass_environment: [PD_API_KEY]",
    "admin-api-key": "pass_environment: [PD_ADMIN_API_KEY]",
    "config": "flags",
}


def load_spec(path: Path) -> ClusterSpec:
    """Read and check a file.

    Raises:
        UsageError: the file cannot be read, or a key or value in it cannot work. The message names
            the key.
    """
    raw = _read(path)
    short = [key for key in ("nodes", "proxy") if key in raw]
    if short and "layouts" in raw:
        raise UsageError(
            f"{path}: {short[0]} does not go with layouts: write it below one of the layouts"
        )
    if short:
        # The short form of a single layout.
        raw = dict(raw)
        raw["layouts"] = {"main": {key: raw.pop(key) for key in short}}
    try:
        spec = ClusterSpec.model_validate(raw)
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_problem(error)}") from None
    try:
        return _resolved(check(spec), path.parent)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}") from None


class _RefusedYAMLError(yaml.YAMLError):
    """YAML that no deployment can have."""


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys, of which YAML's would keep the last, and the
    character \\0, which no path, variable or command line can have."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if "\0" in node.value:
            line = node.start_mark.line + 1
            # The value itself may be secret.
            raise _RefusedYAMLError(f"line {line}: no text can have the character \\0")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    line = key.start_mark.line + 1
                    raise _RefusedYAMLError(f"line {line}: the key {key.value} is there already")
                seen.add((key.tag, key.value))
        return node


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        raw = yaml.load(content, _Loader)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except _RefusedYAMLError as error:
        raise UsageError(f"{path}, {error}") from error
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply") from None
    # yaml lets errors of Python escape for values such as 2024-13-45 and !!int ''.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise UsageError(f"{path} must map keys to values; see configs/two-hosts/cluster.yaml")
    return raw


def _resolved(spec: ClusterSpec, directory: Path) -> ClusterSpec:
    """Paths of this machine, relative to the file, made absolute; the key file checked."""

    def absolute(path: Path | None) -> Path | None:
        return None if path is None else (directory / path.expanduser()).resolve()

    hosts = {
        name: host.model_copy(
            update={k: absolute(getattr(host, k)) for k in ("identity", "known_hosts")}
        )
        for name, host in spec.hosts.items()
    }
    key_file = absolute(spec.cluster_key_file)
    if key_file is not None:
        load_cluster_key(key_file)
    return spec.model_copy(update={"hosts": hosts, "cluster_key_file": key_file})


# ---- what a ValidationError says, for people


def _first_problem(error: ValidationError) -> str:
    # An unknown key explains the missing one beside it.
    found = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    return _problem(found[0])


def _problem(error: ErrorDetails) -> str:
    keys = [key for key in error["loc"] if key != "[key]"]
    where = _shown(keys)
    if error["type"] == "extra_forbidden":
        return f"unknown key {where}{_nearest(str(keys[-1]), _known_keys(keys[:-1]))}"
    if error["type"] == "missing":
        return f"the key {where} is missing"
    if error["type"] == "string_pattern_mismatch":
        shape = SHAPES[error["ctx"]["pattern"]]
        # What follows the name of a variable may be secret.
        name, sign, _ = str(error["input"]).partition("=")
        return f"{where}: {name + sign + '…' if sign else name!r:.60} is not {shape}"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _shown(keys: list[int | str]) -> str:
    shown = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return shown.removeprefix(".")


def _known_keys(keys: list[int | str]) -> list[str]:
    """The keys that the mapping at this place may have."""
    kind: Any = ClusterSpec
    for key in keys:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(key))
            kind = field.annotation if field is not None else None
        else:
            kind = _members(kind)
        kind = _without_none(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return list(kind.model_fields)
    return []


def _members(kind: Any) -> Any:
    """The type of a list's or a mapping's values."""
    return get_args(kind)[-1] if get_origin(kind) in (list, dict) else None


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next((one for one in get_args(kind) if one is not type(None)), None)
    return kind


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# ---- what a schema cannot say


def check(spec: ClusterSpec) -> ClusterSpec:
    """The deployment, in which everything that is named exists and nothing is used twice.

    Raises UsageError.
    """
    for name, host in spec.hosts.items():
        if name == LOGS:
            raise refuse(
                f"hosts.{name}",
                f"logs of all hosts are collected under the name {LOGS}; name the host differently",
            )
        _check_host(f"hosts.{name}", host)
    for name in spec.load:
        _check_name("load", name, spec.hosts)
    _check_flags("flags", spec.flags)
    for name, layout in spec.layouts.items():
        _check_layout(f"layouts.{name}", layout, spec)
    check_collisions(spec)
    return spec


def _check_name(where: str, name: str, hosts: Mapping[str, HostSettings]) -> None:
    if name not in hosts:
        hint = _nearest(name, hosts) or f"; the hosts are {', '.join(hosts)}"
        raise refuse(where, f"there is no host {name}{hint}")


def _check_host(where: str, host: HostSettings) -> None:
    ways = [way for way in ("local", "netns", "ssh") if getattr(host, way) is not None]
    if len(ways) != 1:
        given = " and ".join(ways) or "none"
        raise refuse(where, f"give one of local: true, netns: NAME and ssh: USER@HOST, not {given}")
    for key in ("port", "identity", "known_hosts"):
        if host.ssh is None and getattr(host, key) is not None:
            raise refuse(f"{where}.{key}", "only a host with ssh has it")
    if host.python is not None and "/" in host.python and not host.python.startswith("/"):
        raise refuse(f"{where}.python", f"give an absolute path, not {host.python}")
    if host.netns is not None and host.on_loopback:
        raise refuse(where, "a network namespace needs the address by which others reach it")


def _check_layout(where: str, layout: LayoutSettings, spec: ClusterSpec) -> None:
    proxy = layout.proxy
    _check_name(f"{where}.proxy.host", proxy.host, spec.hosts)
    _check_flags(f"{where}.proxy.flags", proxy.flags)
    for index, node in enumerate(layout.nodes):
        place = f"{where}.nodes[{index}]"
        _check_name(f"{place}.host", node.host, spec.hosts)
        _check_flags(f"{place}.flags", node.flags)
        for key in ("ports", "bootstrap_ports"):
            ports = getattr(node, key)
            if ports and len(ports) != node.count:
                raise refuse(f"{place}.{key}", f"{len(ports)} ports for {node.count} nodes")
        if node.bootstrap_ports and node.role != "prefill":
            raise refuse(f"{place}.bootstrap_ports", "only prefill nodes have them")
    check_serves(where, layout, spec)
    check_reachable(where, layout, spec)


def check_serves(where: str, layout: LayoutSettings, spec: ClusterSpec) -> None:
    """Refuse a layout without a node for one half of each request, which would never be ready."""
    halves = {"prefill", "decode"}
    for node in layout.nodes:
        elastic = (spec.flags | node.flags).get("elastic") == "auto"
        halves -= {"prefill", "decode"} if elastic or node.role == "unified" else {node.role}
    for role in sorted(halves):
        work = "computes prompts" if role == "prefill" else "generates tokens"
        raise refuse(
            f"{where}.nodes", f"no node {work}: add one of role {role}, or of role unified"
        )


def check_reachable(where: str, layout: LayoutSettings, spec: ClusterSpec) -> None:
    """Refuse addresses at which the hosts of a layout would not find each other."""
    proxy = layout.proxy
    used = {proxy.host, *(node.host for node in layout.nodes)}
    others = (used | set(spec.load)) - {proxy.host}
    for name in sorted(used) if others else ():
        if spec.hosts[name].on_loopback:
            raise refuse(
                f"hosts.{name}",
                f"give the address by which the other hosts of {where} reach it, "
                f"not {spec.hosts[name].public_address}",
            )
    for name in spec.load:
        if name != proxy.host and proxy.listen in ("127.0.0.1", "localhost", "::1"):
            raise refuse(
                f"{where}.proxy.listen",
                f"host {name} sends requests, and does not reach {proxy.listen} of {proxy.host}",
            )


def _check_flags(where: str, flags: Flags) -> None:
    for flag in flags:
        key = _FLAGS_BY_KEY.get(flag.replace("_", "-"))
        if key is not None:
            raise refuse(f"{where}.{flag}", f"this flag is set by {key}")


def check_environment(spec: ClusterSpec) -> None:
    """Refuse to start without a variable of ``pass_environment``.

    An empty one is as bad: a proxy whose key it should have been would serve everybody.
    """
    hosts = [spec.hosts[name] for name in spec.used_hosts(with_load=False)]
    for name in spec.pass_environment:
        if not os.environ.get(name) and not all(host.environment.get(name) for host in hosts):
            raise refuse(
                "pass_environment",
                f"{name} is not set here: set it for this command, or leave it out of the list",
            )


def check_known_flags(spec: ClusterSpec, known: Mapping[str, Collection[str]]) -> None:
    """Refuse flags that no command has.

    Args:
        known: flags without their dashes by command, ``proxy`` or the role of a node.
    """
    roles = {node.role for layout in spec.layouts.values() for node in layout.nodes}
    groups: list[tuple[str, Flags, str]] = [("flags", spec.flags, role) for role in sorted(roles)]
    for name, layout in spec.layouts.items():
        groups.append((f"layouts.{name}.proxy.flags", layout.proxy.flags, "proxy"))
        groups += [
            (f"layouts.{name}.nodes[{index}].flags", node.flags, node.role)
            for index, node in enumerate(layout.nodes)
        ]
    for where, flags, command in groups:
        for flag in flags:
            spelled = flag.replace("_", "-")
            if spelled not in known[command]:
                hint = _nearest(spelled, known[command])
                raise refuse(where, f"pd-launch {command} has no flag --{spelled}{hint}")
