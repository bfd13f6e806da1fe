"""The ``pd-launch`` command lines of a deployment's processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.cluster.claims import devices_of
from pd.cluster.protocol import StartProcess
from pd.cluster.run_directory import CLUSTER_KEY_FILE
from pd.cluster.spec import spelled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd.cluster.host import Host
    from pd.cluster.spec import ClusterSpec, Flags, NodeSettings

# Processes of a higher number stop first: proxies, then what receives KV, then what sends it.
STOP_ORDER = {"proxy": 2, "decode": 1, "unified": 1, "prefill": 0}


class NodePlan(NamedTuple):
    """A node that has to be started. ``number`` is its place among those with these settings."""

    name: str
    layout: str
    host: str
    settings: NodeSettings
    number: int

    @property
    def device(self) -> str:
        """The device of the node; empty if the node picks one itself."""
        devices = self.settings.devices
        return devices[self.number % len(devices)] if devices else ""


def plan_nodes(spec: ClusterSpec) -> list[NodePlan]:
    """All nodes of the file; their names are LAYOUT-ROLE-NUMBER."""
    plans: list[NodePlan] = []
    for layout, settings in spec.layouts.items():
        counts: dict[str, int] = {}
        for node in settings.nodes:
            for number in range(node.count):
                name = f"{layout}-{node.role}-{counts.get(node.role, 0)}"
                counts[node.role] = counts.get(node.role, 0) + 1
                plans.append(NodePlan(name, layout, node.host, node, number))
    return plans


def node_process(
    spec: ClusterSpec, plan: NodePlan, host: Host, *, with_key: bool, may_end: bool = False
) -> StartProcess:
    """The message that starts a node on its host."""
    role = plan.settings.role
    return StartProcess(
        plan.name,
        node_command(spec, plan, host, with_key=with_key),
        spec.environment_of(plan.host),
        layout=plan.layout,
        role=role,
        devices=devices_of(spec, plan.settings, plan.device) if plan.device else [],
        stop_order=STOP_ORDER[role],
        announces=True,
        may_end=may_end,
    )


def node_command(spec: ClusterSpec, plan: NodePlan, host: Host, *, with_key: bool) -> list[str]:
    """The command of a node, with the cluster key in the host's run directory."""
    node, where = plan.settings, spec.hosts[plan.host]
    command = [where.interpreter, "-m", "pd.cli", node.role, f"--model={where.model or spec.model}"]
    if where.on_loopback:
        command += [f"--host={where.public_address}"]
    else:
        anywhere = "::" if ":" in where.public_address else "0.0.0.0"
        command += [f"--host={anywhere}", f"--advertise-host={where.public_address}"]
    command += [f"--port={node.ports[plan.number] if node.ports else 0}"]
    if node.role == "prefill":
        ports = node.bootstrap_ports
        command += [f"--bootstrap-port={ports[plan.number] if ports else 0}"]
    if plan.device:
        command += [f"--device={plan.device}"]
    if spec.transfer_backend is not None and node.role != "unified":
        command += [f"--transfer-backend={spec.transfer_backend}"]
    command += _key_flag(host, with_key)
    return [*command, *arguments(spelled(spec.flags) | spelled(node.flags))]


def proxy_command(
    spec: ClusterSpec,
    layout: str,
    urls: Mapping[str, Sequence[str]],
    host: Host,
    *,
    with_key: bool,
) -> list[str]:
    """The command of a layout's proxy; ``urls`` are those of its nodes by role."""
    proxy = spec.layouts[layout].proxy
    command = [spec.hosts[proxy.host].interpreter, "-m", "pd.cli", "proxy"]
    command += [f"--host={proxy.listen}", f"--port={proxy.port}"]
    command += [f"--{role}={url}" for role, given in urls.items() for url in given]
    command += _key_flag(host, with_key)
    return [*command, *arguments(spelled(proxy.flags))]


def _key_flag(host: Host, with_key: bool) -> list[str]:
    return [f"--cluster-key-file={host.run_directory}/{CLUSTER_KEY_FILE}"] if with_key else []


def arguments(flags: Flags) -> list[str]:
    """Flags as a command line has them: true is a switch, a list a repeated flag, null nothing."""
    found: list[str] = []
    for name, value in flags.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None and value is not False:
            values = value if isinstance(value, list) else [value]
            found += [f"--{name}={one}" for one in values]
    return found
