"""Plans the processes of a deployment's file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pd.cluster.orders import MAX_PROCESSES, Process, Selector
from pd.cluster.spec import HostSettings

if TYPE_CHECKING:
    from collections.abc import Collection

    from pd.cluster.spec import ClusterSpec, Flags, NodeSettings

# We stop in this order: proxies, then receivers of KV, then its senders.
STOP_ORDER = (("proxy", "load"), ("decode", "unified"), ("prefill",))


def plan_all(spec: ClusterSpec) -> list[Process]:
    """Plan all proxies and nodes of a file."""
    planned: list[Process] = []
    for name, layout in spec.layouts.items():
        place = make_place(spec, layout.proxy.host)
        place |= {"listen": layout.proxy.listen, "port": layout.proxy.port}
        flags = spell_flags(layout.proxy.flags)
        planned.append(Process(f"{name}-proxy", name, "proxy", flags, **place))
        for group in layout.nodes:
            nodes = plan_nodes(spec, name, group, group.count, [each.name for each in planned])
            no_ports = [0] * group.count
            ports, bootstrap_ports = group.ports or no_ports, group.bootstrap_ports or no_ports
            for node, port, bootstrap in zip(nodes, ports, bootstrap_ports, strict=True):
                planned.append(replace(node, port=port, bootstrap_port=bootstrap))
    return planned


def plan_nodes(
    spec: ClusterSpec, layout: str, group: NodeSettings, count: int, taken: Collection[str]
) -> list[Process]:
    """Plan nodes of a group and name them LAYOUT-ROLE-NUMBER, except for taken names."""
    model = spec.hosts[group.host].model if group.host else ""
    arguments = [f"--model={model or spec.model}"]
    if spec.transfer_backend and group.role != "unified":
        arguments.append(f"--transfer-backend={spec.transfer_backend}")
    arguments += spell_flags(spec.flags | group.flags)
    names = [f"{layout}-{group.role}-{number}" for number in range(MAX_PROCESSES)]
    free = [name for name in names if name not in taken][:count]
    place = make_place(spec, group.host) | {"gpus": group.gpus}
    return [Process(name, layout, group.role, arguments, **place) for name in free]


def make_place(spec: ClusterSpec, name: str) -> dict[str, Any]:
    """Say where processes of a host (empty: any host) run, and with which variables."""
    host = spec.hosts.get(name, HostSettings())
    passed = {name: os.environ[name] for name in spec.pass_environment if name in os.environ}
    return {
        "host": Selector(host.node, host.labels),
        "environment": passed | host.environment,
        "directory": host.directory,
    }


def spell_flags(flags: Flags) -> list[str]:
    """Spell flags for a command line: true is a switch, a list repeats a flag."""
    arguments: list[str] = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            arguments += [f"{flag}={one}" for one in value]
        elif value != "false":
            arguments.append(flag if value == "true" else f"{flag}={value}")
    return arguments
