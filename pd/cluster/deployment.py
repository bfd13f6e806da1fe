"""A deployment that runs: its hosts, processes and layouts, and how it is stopped."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd.cluster import protocol, serving
from pd.cluster.collect import collect_logs, collect_snapshots
from pd.cluster.host import Host
from pd.cluster.state import forget_state
from pd.cluster.times import GRACE_SECONDS
from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pd.cluster.protocol import ProcessState
    from pd.cluster.state import ClusterState

_KILL_SECONDS = 5.0
# When a host dies, its processes and its agent do not end at the very same moment.
_SAME_DEATH_SECONDS = 2.0


class Process:
    """A process of the deployment. Its state is what the host knew last."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name = host, name

    def __str__(self) -> str:
        return f"{self.name} on host {self.host.name}"

    @property
    def state(self) -> ProcessState:
        return self.host.processes[self.name]

    @property
    def running(self) -> bool:
        """Whether it runs, as far as this machine can know."""
        return not self.state.ended and not self.host.lost

    @property
    def has_left(self) -> bool:
        """Whether it has ended as it may."""
        return self.state.ended and self.state.may_end

    @property
    def local_url(self) -> str:
        """The URL that it announced, which works on its own host."""
        return self.state.ready.url if self.state.ready is not None else ""

    @property
    def url(self) -> str:
        """URL of the process for other hosts; empty while the process is starting."""
        return serving.public_url(self.local_url, self.host.address) if self.local_url else ""


class Layout(NamedTuple):
    """Nodes behind one proxy."""

    nodes: list[Process]
    proxy: Process | None

    @property
    def url(self) -> str:
        """URL to which clients send requests; empty while there is none."""
        return "" if self.proxy is None else self.proxy.url


class Deployment:
    """A run of a deployment. It is made by :func:`pd.cluster.start.up` or :func:`attach`.

    As a context manager, it stops everything at the end.

    Attributes:
        hosts: by name; those that could not be reached are missing.
        report: called with a line for people about what happens.
    """

    def __init__(
        self,
        state: ClusterState,
        changed: threading.Condition,
        hosts: dict[str, Host],
        report: Callable[[str], None],
    ) -> None:
        self.state, self.changed, self.hosts, self.report = state, changed, hosts, report
        self._stopped = False

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- what runs

    @property
    def processes(self) -> list[Process]:
        """All processes that have been started, by host."""
        with self.changed:
            return [Process(host, name) for host in self.hosts.values() for name in host.processes]

    @property
    def servers(self) -> list[Process]:
        """Nodes and proxies, less those that have left."""
        return [p for p in self.processes if p.state.layout and not p.has_left]

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layouts of which a process has been started, by name."""
        found: dict[str, Layout] = {}
        for process in self.servers:
            layout = found.setdefault(process.state.layout, Layout([], None))
            if process.state.role == "proxy":
                found[process.state.layout] = layout._replace(proxy=process)
            else:
                layout.nodes.append(process)
        return found

    @property
    def urls(self) -> dict[str, str]:
        """URLs to which clients send requests, by layout."""
        return {name: layout.url for name, layout in self.layouts.items()}

    def check(self) -> None:
        """Raises SetupError if a node or a proxy has ended or a host is lost, and names it."""
        ended = next((p for p in self.servers if p.state.ended), None)
        if ended is not None:
            self.wait_for_loss()
        for host in self.hosts.values():
            if host.lost:
                ran = [p.name for p in self.servers if p.host is host]
                raise SetupError(
                    f"{host} is lost: {host.lost}; it ran {', '.join(ran) or 'nothing'}"
                )
        if ended is not None:
            for line in ended.state.log:
                self.report(f"  {line}")
            raise SetupError(
                f"{ended.name} on {ended.host} {how_it_ended(ended.state)}; its log is "
                f"{ended.host.run_directory}/{ended.name}.log"
            )

    def wait_for_loss(self) -> None:
        """Wait a moment for a host to be lost, which would explain the end of a process."""
        with self.changed:
            self.changed.wait_for(
                lambda: any(host.lost for host in self.hosts.values()), _SAME_DEATH_SECONDS
            )

    def wait(self, seconds: float) -> None:
        """Wait until something changes, and no longer than this."""
        with self.changed:
            self.changed.wait(seconds)

    # ---- the end

    def keep(self) -> None:
        """Leave everything running when this process ends."""
        for host in self.hosts.values():
            host.tell(protocol.Keep())

    def release(self) -> None:
        """End the connections only."""
        for host in self.hosts.values():
            host.disconnect()

    def stop(self, grace: float = GRACE_SECONDS) -> bool:
        """Collect metrics, stop all processes in order, collect logs, and clean up on all hosts.

        Returns False if a host was lost, so that what ran there may still run. Then the run is not
        forgotten, so that ``down`` can be tried again.
        """
        if self._stopped:
            return True
        self._reconnect()
        collect_snapshots(self.servers, self.logs, self.report)
        orders = {process.state.stop_order for process in self.processes}
        for order in sorted(orders, reverse=True):
            self.stop_group([p for p in self.processes if p.state.stop_order == order], grace)
        collect_logs(self.processes, self.logs, self.report)
        with ThreadPoolExecutor(max(1, len(self.hosts))) as pool:
            closed = list(pool.map(self._close, self.hosts.values()))
        if all(closed) and self.hosts.keys() == self.state.hosts.keys():
            forget_state(self.state)
            self._stopped = True
            return True
        return False

    @property
    def logs(self) -> Path:
        """The directory here into which logs and metrics are collected."""
        return self.state.logs

    def _reconnect(self) -> None:
        """Connect again to hosts that were lost: maybe only the connection was, or the agent."""
        lost = [host.name for host in self.hosts.values() if host.lost]
        if not lost:
            return
        for name in lost:
            self.hosts[name].disconnect()  # an agent that still lives stops its processes
        known = {name: self.state.hosts[name] for name in lost}
        state = msgspec.structs.replace(self.state, hosts=known)
        found, problems = connect(state, self.changed, attach=True)
        self.hosts |= found
        for problem in problems.values():
            self.report(problem)

    def stop_group(self, group: Sequence[Process], grace: float) -> None:
        """Stop these processes, and kill those that have not ended after ``grace`` seconds."""
        self._signal(group, signal.SIGTERM)
        if not self._wait_ended(group, grace):
            late = [str(process) for process in group if process.running]
            self.report(f"not ended within {grace:g} s, so killed: {', '.join(late)}")
            self._signal(group, signal.SIGKILL)
            self._wait_ended(group, _KILL_SECONDS)

    def _signal(self, group: Sequence[Process], number: int) -> None:
        for process in group:
            if process.running:
                try:
                    process.host.signal(process.name, number)
                except SetupError as error:
                    self.report(error.message)

    def _wait_ended(self, group: Sequence[Process], seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: not any(p.running for p in group), seconds)

    def _close(self, host: Host) -> bool:
        try:
            host.tell(protocol.Close(remove=True))
        except SetupError as error:
            self.report(f"{error.message}; what ran there may still run")
            return False
        finally:
            host.disconnect()
        return True


def how_it_ended(state: ProcessState) -> str:
    """The end of a process in words."""
    if state.status is None:
        return "has ended"
    if state.status < 0:
        return f"was killed by {signal.Signals(-state.status).name}"
    return f"ended with status {state.status}"


def connect(
    state: ClusterState,
    changed: threading.Condition,
    *,
    attach: bool = False,
) -> tuple[dict[str, Host], dict[str, str]]:
    """Connect to all hosts at once.

    Returns the hosts that were reached, and why others were not, by name.
    """

    def open_host(name: str) -> Host:
        known = state.hosts[name]
        host = Host(name, known.reach, known.python, known.address, changed)
        try:
            host.open(
                protocol.OpenRun(
                    state.run_on(name),
                    state.token_on(name),
                    attach=attach,
                    directory=known.directory,
                )
            )
        except BaseException:
            host.disconnect()
            raise
        return host

    hosts: dict[str, Host] = {}
    problems: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, len(state.hosts))) as pool:
        opening = {name: pool.submit(open_host, name) for name in state.hosts}
        for name, future in opening.items():
            try:
                hosts[name] = future.result()
            except SetupError as error:
                problems[name] = error.message
    return hosts, problems


def attach(
    state: ClusterState, report: Callable[[str], None] = lambda line: None
) -> tuple[Deployment, dict[str, str]]:
    """A deployment that another process has started, and why hosts could not be reached."""
    changed = threading.Condition()
    hosts, problems = connect(state, changed, attach=True)
    return Deployment(state, changed, hosts, report), problems
