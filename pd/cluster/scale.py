"""Adds nodes to a deployment that is up, and takes nodes away."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec

from pd.cluster import protocol, serving
from pd.cluster.claims import devices_of, machine_of
from pd.cluster.commands import NodePlan, node_process
from pd.cluster.deployment import Process, attach, connect, how_it_ended
from pd.cluster.run_directory import CLUSTER_KEY_FILE
from pd.cluster.spec import LOOPBACK, Role
from pd.cluster.spec_file import check_environment, check_reachable, check_serves
from pd.cluster.state import HostState, changing, load_state, replace_state
from pd.cluster.times import GRACE_SECONDS, WAIT_SECONDS
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.cluster.deployment import Deployment
    from pd.cluster.spec import ClusterSpec, LayoutSettings, NodeSettings
    from pd.cluster.state import ClusterState

API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "PD_API_KEY", "PD_ADMIN_API_KEY"
_ROLES: tuple[Role, ...] = get_args(Role)
_MOST_NODES = 256
_PROGRESS_SECONDS = 2.0
_ASK_SECONDS = 0.25
_ANSWER_SECONDS = 10.0


class Wanted(NamedTuple):
    """How many nodes of a role a layout is to have."""

    layout: str
    role: Role
    total: int


def parse_wanted(words: Sequence[str], spec: ClusterSpec) -> list[Wanted]:
    """Read ``ROLE=N`` and ``LAYOUT.ROLE=N``; the layout may be left out where there is one.

    Raises UsageError.
    """
    found: dict[tuple[str, Role], Wanted] = {}
    for word in words:
        match = re.fullmatch(r"(?:([^.=]*)\.)?([^.=]*)=(\d{1,4})", word)
        if match is None:
            raise UsageError(f"give ROLE=N or LAYOUT.ROLE=N such as decode=3, not {word}")
        role = next((known for known in _ROLES if known == match[2]), None)
        if role is None:
            raise UsageError(f"{word}: a node's role is {', '.join(_ROLES)}, not {match[2]}")
        layout, count = match[1], int(match[3])
        if layout is None:
            if len(spec.layouts) > 1:
                names = ", ".join(f"{name}.{role}" for name in spec.layouts)
                raise UsageError(f"{word}: say of which layout: {names}")
            layout = next(iter(spec.layouts))
        if layout not in spec.layouts:
            raise UsageError(f"{word}: there is no layout {layout}; {', '.join(spec.layouts)}")
        if count > _MOST_NODES:
            raise UsageError(f"{word}: a layout has at most {_MOST_NODES} nodes of a role")
        if (layout, role) in found:
            raise UsageError(f"{word}: {role} of {layout} is given twice")
        found[layout, role] = Wanted(layout, role, count)
    if not found:
        raise UsageError("say how many nodes there are to be, such as decode=3")
    return list(found.values())


def scale(
    spec: ClusterSpec,
    state: ClusterState,
    wanted: Sequence[Wanted],
    *,
    wait_seconds: float = WAIT_SECONDS,
    grace: float = GRACE_SECONDS,
    cancelled: threading.Event | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Deployment:
    """Start nodes and have the layouts' proxies use them, then take others away: the youngest of
    their role, whose streams move to other nodes or are finished first. Before that, nodes are
    ended that an earlier call has left when it was killed.

    Args:
        spec: what the file says now, of which new nodes have their hosts, devices and flags.
        state: of the run, which stays up.
        grace: seconds in which a node that leaves may finish what it has.
        cancelled: once it is set, no more nodes are started, and what was started is stopped.
        report: called with a line for people about what happens.

    Raises:
        UsageError: it cannot be done as the file is.
        SetupError: a host cannot be reached, or a new node is not used in time. Then the new nodes
            are stopped, and nothing was taken away.
    """
    with changing(state):
        # Another call may have added hosts until now.
        state = load_state(state.deployment) or state
        running, problems = attach(state, report)
        try:
            if problems:
                raise SetupError("; ".join(problems.values()))
            scaling = _Scaling(spec, running, wait_seconds, grace, cancelled or threading.Event())
            scaling.check(wanted)
            scaling.tidy(wanted)
            scaling.grow(wanted)
            scaling.shrink(wanted)
        except BaseException:
            running.release()
            raise
    return running


class _Scaling:
    """One change of a deployment that runs."""

    def __init__(
        self,
        spec: ClusterSpec,
        running: Deployment,
        wait_seconds: float,
        grace: float,
        cancelled: threading.Event,
    ) -> None:
        self._spec, self._running, self._grace = spec, running, grace
        self._wait_seconds, self._report = wait_seconds, running.report
        self._cancelled = cancelled

    def _nodes(self, layout: str, role: str | None = None) -> list[Process]:
        """Nodes that have not left, by their number."""
        found = self._running.layouts.get(layout)
        nodes = [] if found is None else found.nodes
        chosen = [node for node in nodes if role in (None, node.state.role)]
        return sorted(chosen, key=lambda node: _number(node.name))

    def _proxy(self, layout: str) -> Process:
        found = self._running.layouts.get(layout)
        if found is None or found.proxy is None or not found.proxy.running or not found.proxy.url:
            raise SetupError(f"the proxy of {layout} does not serve; see the status")
        return found.proxy

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Refuse what cannot be done, before anything is."""
        for layout in dict.fromkeys(each.layout for each in wanted):
            self._tell(self._proxy(layout), "GET", "/workers")
            settings = self._spec.layouts[layout]
            counts = {role: len(self._nodes(layout, role)) for role in _ROLES}
            totals = {each.role: each.total for each in wanted if each.layout == layout}
            for role, total in totals.items():
                if total > counts[role]:
                    _groups(layout, settings, role)
            counts |= totals
            left = [node for node in settings.nodes if counts[node.role]]
            known = {node.role for node in left}
            # Nodes may run whose role the file does not have any more.
            left += [
                settings.nodes[0].model_copy(update={"role": role})
                for role in _ROLES
                if counts[role] and role not in known
            ]
            remaining = settings.model_copy(update={"nodes": left})
            check_serves(f"layouts.{layout}", remaining, self._spec)
            check_reachable(f"layouts.{layout}", remaining, self._spec)

    def tidy(self, wanted: Sequence[Wanted]) -> None:
        """End what an earlier call has left, and let the proxies forget nodes that are gone."""
        roles = {each[:2] for each in wanted}
        left = [
            node
            for node in self._running.servers
            if node.state.may_end
            or (node.state.ended and (node.state.layout, node.state.role) in roles)
        ]
        for node in left:
            self._report(f"{node} {'is gone' if node.state.ended else 'was left behind'}")
        self._remove(left)

    # ---- more nodes

    def grow(self, wanted: Sequence[Wanted]) -> None:
        """Start what is missing, until the proxies use it. Raises SetupError."""
        plans: list[NodePlan] = []
        for each in wanted:
            for _ in range(each.total - len(self._nodes(each.layout, each.role))):
                plans.append(self._plan(each, plans))
        if not plans:
            return
        check_environment(self._spec)
        before = self._running.state
        started: list[Process] = []
        try:
            self._connect({plan.host for plan in plans} - self._running.hosts.keys())
            with_key = self._has_key(plans)
            for plan in plans:
                self._check_cancelled()
                started.append(self._start(plan, with_key=with_key))
                self._report(f"{started[-1]} starts")
            self._wait_used(started)
        except BaseException:
            if started:
                self._report(f"stopping {', '.join(map(str, started))}")
            self._remove(started)
            self._leave(before)
            raise
        for node in started:
            node.host.let_end(node.name, may_end=False)

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise SetupError("it was cancelled")

    def _plan(self, wanted: Wanted, planned: Sequence[NodePlan]) -> NodePlan:
        """A further node: on the host of the group that has the fewest nodes for its size, and
        room for one more. Raises UsageError if none has."""
        layout, role = wanted.layout, wanted.role
        groups = _groups(layout, self._spec.layouts[layout], role)
        hosts = [node.host.name for node in self._nodes(layout, role)]
        hosts += [plan.host for plan in planned if (plan.layout, plan.settings.role) == wanted[:2]]
        groups.sort(key=lambda group: hosts.count(group.host) / group.count)
        ever = [
            _number(process.name)
            for process in self._running.processes
            if (process.state.layout, process.state.role) == (layout, role)
        ]
        number = max(ever, default=-1) + 1
        number += sum((plan.layout, plan.settings.role) == (layout, role) for plan in planned)
        full: UsageError | None = None
        for group in groups:
            try:
                settings = self._with_place(layout, group, planned)
            except UsageError as error:
                full = full or error
            else:
                return NodePlan(f"{layout}-{role}-{number}", layout, group.host, settings, 0)
        assert full is not None
        raise full

    def _with_place(
        self, layout: str, group: NodeSettings, planned: Sequence[NodePlan]
    ) -> NodeSettings:
        """The settings of a group with one device and one port of its own for a further node.

        Raises UsageError if all of its GPUs have nodes.
        """
        hosts = self._spec.hosts
        machine, reach = machine_of(hosts[group.host]), hosts[group.host].reach
        here = {name for name, host in hosts.items() if machine_of(host) == machine}
        beside = {name for name, host in hosts.items() if host.reach == reach}
        taken: list[str] = []
        used: set[int | None] = set()
        for process in self._running.servers:
            if not process.state.ended:
                taken += process.state.devices if process.host.name in here else []
                used |= {urlsplit(process.url).port} if process.host.name in beside else set()
        for plan in planned:
            settings = plan.settings
            if plan.host in here and plan.device:
                taken += devices_of(self._spec, settings, plan.device)
            used |= set(settings.ports) if plan.host in beside else set()
        uses = {
            device: sum(taken.count(each) for each in devices_of(self._spec, group, device))
            for device in dict.fromkeys(group.devices)
        }
        free = {
            device: count
            for device, count in uses.items()
            if not count or self._spec.share_devices or not device.startswith("cuda")
        }
        if uses and not free:
            raise UsageError(
                f"layouts.{layout}: each of the devices {', '.join(uses)} of host {group.host} has "
                f"a node; name more for its {group.role} nodes, or set share_devices: true"
            )
        devices = [min(free, key=lambda device: free[device])] if free else []
        ports = [place for place, port in enumerate(group.ports) if port and port not in used]
        place = ports[0] if ports else None

        def one(given: list[int]) -> list[int]:
            return [given[place]] if place is not None and given else []

        return group.model_copy(
            update={
                "devices": devices,
                "ports": one(group.ports),
                "bootstrap_ports": one(group.bootstrap_ports),
            }
        )

    def _connect(self, names: set[str]) -> None:
        """Connect to hosts that the run did not have."""
        if not names:
            return
        state = self._running.state
        if state.controller_handle() is not None:
            raise SetupError(
                f"the command that started the deployment would not know of {', '.join(names)}; "
                "start it with --detach"
            )
        added = {name: HostState.of(self._spec.hosts[name]) for name in names}
        # Recorded first, so that whatever happens ``down`` looks there, too.
        self._record(msgspec.structs.replace(state, hosts=state.hosts | added))
        only = msgspec.structs.replace(state, hosts=added)
        found, problems = connect(only, self._running.changed, attach=True)
        self._running.hosts |= found
        if problems:
            raise SetupError("; ".join(problems.values()))

    def _leave(self, before: ClusterState) -> None:
        """Give up the hosts that the run did not have ``before``, but for those that are lost with
        a process."""
        state, hosts = self._running.state, dict(self._running.state.hosts)
        for name in state.hosts.keys() - before.hosts.keys():
            host = self._running.hosts.pop(name, None)
            if host is not None and (host.lost and host.processes):
                continue
            if host is not None:
                with contextlib.suppress(SetupError):
                    host.tell(protocol.Close(remove=True))
                host.disconnect()
            del hosts[name]
        if hosts != state.hosts:
            self._record(msgspec.structs.replace(state, hosts=hosts))

    def _record(self, state: ClusterState) -> None:
        replace_state(state)
        self._running.state = state

    def _has_key(self, plans: Sequence[NodePlan]) -> bool:
        """Have the run's key on the hosts of new nodes; whether it has one."""
        proxy = self._proxy(plans[0].layout)
        if not proxy.host.has_key:
            return False
        key = proxy.host.read(CLUSTER_KEY_FILE)
        for name in {plan.host for plan in plans}:
            self._running.hosts[name].write(CLUSTER_KEY_FILE, key)
        return True

    def _start(self, plan: NodePlan, *, with_key: bool) -> Process:
        host = self._running.hosts[plan.host]
        if not with_key and not self._spec.hosts[plan.host].on_loopback:
            raise SetupError(
                f"the deployment was started on loopback only, and {host} is beyond; stop it and "
                "start it again"
            )
        # Until it is used, its end is no failure of the deployment.
        host.start(node_process(self._spec, plan, host, with_key=with_key, may_end=True))
        return Process(host, plan.name)

    def _wait_used(self, started: Sequence[Process]) -> None:
        """Tell the proxies of new nodes, and wait until they use them."""
        began = reported = time.monotonic()
        told: set[str] = set()
        while waiting := self._not_used(started, told):
            self._check_cancelled()
            for node in started:
                if node.state.ended or node.host.lost:
                    for line in node.state.log:
                        self._report(f"  {line}")
                    why = node.host.lost or how_it_ended(node.state)
                    raise SetupError(f"{node.name} on {node.host} {why}")
            now = time.monotonic()
            what = "; ".join(f"{node}: {why}" for node, why in waiting.items())
            if now - began > self._wait_seconds:
                raise SetupError(f"not ready after {self._wait_seconds:g} s: {what}")
            if now - reported >= _PROGRESS_SECONDS:
                reported = now
                self._report(f"{now - began:3.0f} s, waiting for {what}")
            self._running.wait(_ASK_SECONDS)

    def _not_used(self, started: Sequence[Process], told: set[str]) -> dict[Process, str]:
        """Have proxies use new nodes. Returns those that are not used yet, and why."""
        waiting: dict[Process, str] = {}
        for node in started:
            if not node.url:
                waiting[node] = "starting"
                continue
            proxy = self._proxy(node.state.layout)
            if node.name not in told:
                body = json.dumps({"role": node.state.role, "url": node.url}).encode()
                self._tell(proxy, "POST", "/workers", body)
                told.add(node.name)
            if not serving.ask_workers(proxy.host, proxy.local_url).get(node.url):
                waiting[node] = "its proxy does not use it yet"
        return waiting

    def _tell(self, proxy: Process, method: str, path: str, body: bytes | None = None) -> None:
        """Send the proxy an administrator's request from its own host, where a proxy without an
        administrator's key asks for the other one only. Raises SetupError."""
        url = serving.public_url(proxy.local_url, "127.0.0.1")
        names = (ADMIN_KEY_VARIABLE, API_KEY_VARIABLE)
        key = next((os.environ[name] for name in names if os.environ.get(name)), None)
        settings = self._spec.hosts.get(proxy.host.name)
        answer = proxy.host.fetch(
            f"{url}{path}",
            _ANSWER_SECONDS,
            {} if key is None else {"Authorization": f"Bearer {key}"},
            body,
            method=method,
            # What this host sends to itself nobody reads on the way.
            verify=LOOPBACK.fullmatch(urlsplit(url).hostname or "") is None,
            authorities="" if settings is None else settings.environment.get("SSL_CERT_FILE", ""),
        )
        if answer.status != 200:
            remedy = (
                f"; if it has an administrator's key, set {ADMIN_KEY_VARIABLE} to it, or else "
                f"{API_KEY_VARIABLE} to its key"
                if answer.status in (401, 403)
                else ""
            )
            raise SetupError(f"{proxy}: {serving.message_of(answer)}{remedy}")

    # ---- fewer nodes

    def shrink(self, wanted: Sequence[Wanted]) -> None:
        """Take away what is too much, and wait until it has ended."""
        leaving: list[Process] = []
        for each in wanted:
            leaving += self._nodes(each.layout, each.role)[each.total :]
        for node in leaving:
            self._report(f"{node} leaves")
        self._remove(leaving)

    def _remove(self, nodes: Sequence[Process]) -> None:
        """End nodes: their proxies send them nothing new, and what they have moves to others or is
        finished."""
        for node in nodes:
            try:
                node.host.let_end(node.name, may_end=True)
                if node.url:
                    proxy, place = self._proxy(node.state.layout), urlsplit(node.url).netloc
                    self._tell(proxy, "DELETE", f"/workers/{place}")
            except SetupError as error:
                # Its proxy sees that the node drains, and then that it is gone.
                self._report(error.message)
        self._running.stop_group(nodes, self._grace)


def _groups(layout: str, settings: LayoutSettings, role: Role) -> list[NodeSettings]:
    groups = [node for node in settings.nodes if node.role == role]
    if not groups:
        raise UsageError(
            f"layouts.{layout}.nodes has none of role {role}, so it does not say where further "
            "ones run; add an entry"
        )
    return groups


def _number(name: str) -> int:
    """The number at the end of a node's name."""
    return int(name.rpartition("-")[2])
