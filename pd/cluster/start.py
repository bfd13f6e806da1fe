"""Starts a deployment: all nodes of all layouts at once, then each layout's proxy."""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import TYPE_CHECKING

from pd.cluster import protocol, serving
from pd.cluster.commands import STOP_ORDER, node_process, plan_nodes, proxy_command
from pd.cluster.deployment import Deployment, connect
from pd.cluster.host_processes import identity_of
from pd.cluster.run_directory import CLUSTER_KEY_FILE, new_run_id
from pd.cluster.state import ClusterState, HostState, create_state, deployment_id, forget_state
from pd.cluster.times import WAIT_SECONDS
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd.cluster.commands import NodePlan
    from pd.cluster.deployment import Layout
    from pd.cluster.spec import ClusterSpec

_PROGRESS_SECONDS = 2.0
_ASK_SECONDS = 0.25


def up(
    spec: ClusterSpec,
    path: Path,
    *,
    wait_seconds: float = WAIT_SECONDS,
    with_load: bool = False,
    logs: Path | None = None,
    cancelled: threading.Event | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Deployment:
    """Start a deployment and wait until all its layouts serve with all their nodes.

    Args:
        path: the file that ``spec`` comes from; it can be up once.
        with_load: also connect to the hosts that send requests.
        logs: directory here for logs and metrics of all hosts; default: one below this user's
            state directory.
        cancelled: once it is set, the start is given up.
        report: called with a line for people about what happens.

    Raises:
        SetupError: a host cannot be reached, a process ends or is not ready in time. The message
            names it, and what had been started is stopped.
    """
    names = spec.used_hosts(with_load=with_load)
    state = ClusterState(
        deployment_id(path),
        new_run_id(),
        {name: HostState.of(host) for name, host in spec.hosts.items() if name in names},
        identity_of(os.getpid()),
        None if logs is None else str(logs.absolute()),
    )
    create_state(state)
    try:
        starter = _Starter(spec, state, report)
    except BaseException:
        forget_state(state)
        raise
    try:
        starter.start(wait_seconds, cancelled or threading.Event())
    except BaseException:
        report("stopping")
        starter.deployment.stop()
        report(f"logs are in {state.logs}")
        raise
    return starter.deployment


class _Starter:
    """One start of a deployment, whose hosts are connected when it has been made."""

    def __init__(
        self, spec: ClusterSpec, state: ClusterState, report: Callable[[str], None]
    ) -> None:
        self._spec, self._report = spec, report
        changed = threading.Condition()
        hosts, problems = connect(state, changed)
        self.deployment = Deployment(state, changed, hosts, report)
        if problems:
            self.deployment.stop()
            raise SetupError("; ".join(problems.values()))
        self._key = self._cluster_key()
        self._serving: set[str] = set()
        self._waiting_for: dict[str, str] = {}

    def _cluster_key(self) -> bytes | None:
        """The key of this run: the file's, or a new one if nodes can be reached over a network."""
        if self._spec.cluster_key_file is not None:
            return self._spec.cluster_key_file.read_bytes()
        return None if self._spec.is_on_loopback() else secrets.token_hex(32).encode()

    def start(self, wait_seconds: float, cancelled: threading.Event) -> None:
        """Start everything; returns when all layouts serve. Raises SetupError."""
        hosts = self.deployment.hosts
        if self._key is not None:
            for host in hosts.values():
                host.write(CLUSTER_KEY_FILE, self._key)
        plans = plan_nodes(self._spec)
        for plan in plans:
            host = hosts[plan.host]
            host.start(node_process(self._spec, plan, host, with_key=self._key is not None))
        began = reported = time.monotonic()
        while not self._all_serve(plans):
            self.deployment.check()
            if cancelled.is_set():
                raise SetupError("the start was cancelled")
            now = time.monotonic()
            waiting = "; ".join(f"{name}: {why}" for name, why in self._waiting_for.items())
            if now - began > wait_seconds:
                raise SetupError(f"not ready after {wait_seconds:g} s: {waiting}")
            if now - reported >= _PROGRESS_SECONDS:
                reported = now
                self._report(f"{now - began:3.0f} s, waiting for {waiting}")
            self.deployment.wait(_ASK_SECONDS)

    def _all_serve(self, plans: list[NodePlan]) -> bool:
        """Take each layout one step further; True once all of them serve."""
        self._waiting_for = {}
        layouts = self.deployment.layouts
        for name in self._spec.layouts:
            if name not in self._serving and self._serves(name, layouts[name], plans):
                self._serving.add(name)
                self._report(f"{name} serves at {self.deployment.layouts[name].url}")
        return len(self._serving) == len(self._spec.layouts)

    def _serves(self, name: str, layout: Layout, plans: list[NodePlan]) -> bool:
        starting = [node for node in layout.nodes if not node.url]
        for node in starting:
            self._waiting_for[str(node)] = "starting"
        if starting:
            return False
        if layout.proxy is None:
            self._start_proxy(name, layout, [plan.name for plan in plans])
            return False
        if not layout.proxy.url:
            self._waiting_for[str(layout.proxy)] = "starting"
            return False
        proxy, url = layout.proxy, layout.proxy.local_url
        readiness = serving.ask_readiness(proxy.host, url)
        if not readiness.ready:
            self._waiting_for[str(proxy)] = readiness.reason
            return False
        workers = serving.ask_workers(proxy.host, url)
        unused = [node for node in layout.nodes if not workers.get(node.url)]
        for node in unused:
            self._waiting_for[str(node)] = "its proxy does not use it yet"
        return not unused

    def _start_proxy(self, name: str, layout: Layout, order: list[str]) -> None:
        urls: dict[str, list[str]] = {}
        for node in sorted(layout.nodes, key=lambda node: order.index(node.name)):
            urls.setdefault(node.state.role, []).append(node.url)
        where = self._spec.layouts[name].proxy.host
        host = self.deployment.hosts[where]
        command = proxy_command(self._spec, name, urls, host, with_key=self._key is not None)
        host.start(
            protocol.StartProcess(
                f"{name}-proxy",
                command,
                self._spec.environment_of(where),
                layout=name,
                role="proxy",
                stop_order=STOP_ORDER["proxy"],
                announces=True,
            )
        )
        self._waiting_for[f"{name}-proxy on host {where}"] = "starting"
