"""Nodes on two hosts that a link connects, which can be cut."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

import httpx
from processes import Process, free_port, wait_ready

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import netns


@contextlib.contextmanager
def two_hosts(
    net: netns.Network,
    model: Path,
    logs: Path,
    cut_off: Sequence[str],
    node_flags: Sequence[str] = (),
    proxy_flags: Sequence[str] = (),
) -> Iterator[tuple[str, list[Process]]]:
    """Two prefill and two decode nodes, one of each role in ``cut_off`` on one host and the others
    on another; a proxy that reaches both. ``url`` of the proxy, and the nodes."""
    key = logs / "cluster.key"
    key.write_text(secrets.token_hex(32))
    secured = ["--cluster-key-file", str(key)]
    common = ["--model", str(model), "--kv-cache-tokens", "16384", "--cpu-threads", "1"]
    common += ["--transfer-backend", "tcp", *secured, *node_flags]
    nodes: list[Process] = []
    with contextlib.ExitStack() as stack:

        def start(name: str, *command: str, host: netns.Host | None = None) -> Process:
            prefix = () if host is None else host.prefix
            process = Process(*command, log=logs / f"{name}.log", prefix=prefix)
            stack.callback(process.stop)
            return process

        roles = ["prefill", "prefill", "decode", "decode"]
        hosts = [net.a if role in cut_off else net.b for role in roles]
        hosts[1] = hosts[3] = net.b
        for number, (role, host) in enumerate(zip(roles, hosts, strict=True)):
            place = ["--host", "0.0.0.0", "--advertise-host", host.address]
            ports = ["--port", str(30000 + number)]
            ports += ["--bootstrap-port", str(31000 + number)] if role == "prefill" else []
            nodes.append(start(f"{role}{number}", role, *place, *ports, *common, host=host))
        workers = [flag for node in nodes for flag in (f"--{node.command[0]}", node.url)]
        command = ["proxy", "--port", str(free_port()), "--policy", "round_robin", *workers]
        proxy = start("proxy", *command, *secured, *proxy_flags)
        wait_ready(proxy, nodes)
        yield proxy.url, nodes


def is_whole(url: str) -> bool:
    """Whether the proxy uses all nodes."""
    workers = httpx.get(f"{url}/workers", timeout=10).json()["workers"]
    return all(worker["ready"] for worker in workers)
