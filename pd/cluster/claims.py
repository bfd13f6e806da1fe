"""Ports and GPUs that deployments take for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.cluster.spec import refuse, spelled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.cluster.spec import ClusterSpec, HostSettings, NodeSettings


class Claim(NamedTuple):
    """A port or a GPU that a file names.

    Attributes:
        where: the place in the file.
        host: name of the host in the file.
        scope: what the thing belongs to: a machine's GPU, or the port of one network namespace.
        thing: such as "port 8000" or "device cuda:1".
    """

    where: str
    host: str
    scope: str
    thing: str

    @property
    def is_device(self) -> bool:
        return self.thing.startswith("device")


def claims_of(spec: ClusterSpec) -> list[Claim]:
    """Everything that a file takes; what a node picks by itself is not known before."""
    found: list[Claim] = []
    for name, layout in spec.layouts.items():
        proxy = layout.proxy
        if proxy.port:
            found.append(_port(spec, f"layouts.{name}.proxy.port", proxy.host, proxy.port))
        for index, node in enumerate(layout.nodes):
            found += _node_claims(spec, f"layouts.{name}.nodes[{index}]", node)
    return found


def gpus_of(spec: ClusterSpec, layout: str) -> int | None:
    """Number of GPUs that a layout has, each counted once; None if a node picks its own device."""
    nodes = spec.layouts[layout].nodes
    if any("auto" in (node.devices[: node.count] or ["auto"]) for node in nodes):
        return None
    claims = [claim for node in nodes for claim in _node_claims(spec, layout, node)]
    return len({(claim.scope, claim.thing) for claim in claims if claim.is_device})


def _node_claims(spec: ClusterSpec, where: str, node: NodeSettings) -> Iterator[Claim]:
    for key in ("ports", "bootstrap_ports"):
        for number, port in enumerate(getattr(node, key)):
            if port:
                yield _port(spec, f"{where}.{key}[{number}]", node.host, port)
    for number in range(node.count if node.devices else 0):
        device = node.devices[number % len(node.devices)]
        if device.startswith("cuda"):
            machine = machine_of(spec.hosts[node.host])
            for gpu in devices_of(spec, node, device):
                yield Claim(f"{where} (node {number})", node.host, machine, f"device {gpu}")


def devices_of(spec: ClusterSpec, node: NodeSettings, device: str) -> list[str]:
    """Return the devices that a node with these settings and this ``--device`` takes: with several
    ranks, several GPUs."""
    if not device.startswith("cuda"):
        return [device]
    first = int(device.partition(":")[2] or 0)
    return [f"cuda:{gpu}" for gpu in range(first, first + _ranks(spec, node))]


def _ranks(spec: ClusterSpec, node: NodeSettings) -> int:
    """GPUs of one node, which are consecutive; 1 for a value that the node will refuse."""
    value = str((spelled(spec.flags) | spelled(node.flags)).get("tp-size"))
    return int(value) if value.isdecimal() else 1


def _port(spec: ClusterSpec, where: str, host: str, port: int) -> Claim:
    return Claim(where, host, str(spec.hosts[host].reach), f"port {port}")


def machine_of(host: HostSettings) -> str:
    """A name of the machine. Network namespaces of this machine share its GPUs."""
    return "this machine" if host.ssh is None else host.ssh.rpartition("@")[2]


def check_collisions(spec: ClusterSpec) -> None:
    """Refuse a port or, unless the file allows it, a GPU that is given twice on one host."""
    seen: dict[tuple[str, str], str] = {}
    for claim in claims_of(spec):
        if claim.is_device and spec.share_devices:
            continue
        other = seen.setdefault((claim.scope, claim.thing), claim.where)
        if other != claim.where:
            remedy = "; share_devices: true allows it" if claim.is_device else ""
            raise refuse(
                claim.where, f"{other} has {claim.thing} of host {claim.host} already{remedy}"
            )


def both_claim(one: ClusterSpec, other: ClusterSpec) -> str | None:
    """A port or a GPU for which two deployments cannot be up together; None if there is none."""
    share = one.share_devices and other.share_devices
    taken = {(claim.scope, claim.thing) for claim in claims_of(one)}
    for claim in claims_of(other):
        if (claim.scope, claim.thing) in taken and not (claim.is_device and share):
            return f"{claim.thing} of {claim.scope}"
    return None
