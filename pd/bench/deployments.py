"""Deployments of ``pd-launch cluster``'s files, started for a benchmark and stopped after it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.bench.load.client import LoadClient
from pd.bench.load.command import client_of
from pd.bench.load.load_process import MODULE, LoadPlace
from pd.bench.load.settings import load_settings
from pd.cluster.claims import both_claim, gpus_of
from pd.cluster.enter import Surroundings
from pd.cluster.host_processes import TOKEN_VARIABLE
from pd.cluster.spec_file import check_environment, load_spec
from pd.cluster.times import GRACE_SECONDS
from pd.commands.cluster import report, start_deployment, stop_deployment
from pd.commands.processes import ENDING, interrupted_by
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from pd.bench.load.client import Fetch
    from pd.cluster.deployment import Deployment
    from pd.cluster.host import Host
    from pd.cluster.spec import ClusterSpec


@dataclass(frozen=True)
class ServedLayout:
    """A layout that serves, and from where it is asked.

    Attributes:
        name: of the layout; with several files the file's name stands before it.
        hosts: names of the hosts with load processes; empty if they run here.
        gpus: of its nodes; None for unknown.
    """

    name: str
    url: str
    hosts: tuple[str, ...]
    client: LoadClient
    gpus: int | None = None


@dataclass(frozen=True)
class DeploymentFile:
    """A file that was read. ``prefix`` stands before the names of its layouts."""

    path: Path
    spec: ClusterSpec
    prefix: str

    @property
    def names(self) -> list[str]:
        """The names of its layouts in results."""
        return [f"{self.prefix}{layout}" for layout in self.spec.layouts]


def measure_layouts(
    args: argparse.Namespace, measure: Callable[[ServedLayout], object], taken: Collection[str] = ()
) -> None:
    """Start the deployments of ``--cluster``, call ``measure`` with each layout, and stop them.

    Args:
        taken: names that a layout must not have.

    Raises:
        UsageError: a file cannot be used.
        SetupError: see :func:`served`.
    """
    files = _read_files(args)
    wanted = _wanted(args, files, taken)
    for group in groups_of(files):
        with served(group, args) as layouts:
            for layout in layouts:
                if layout.name in wanted:
                    measure(layout)


def _read_files(args: argparse.Namespace) -> list[DeploymentFile]:
    paths: list[Path] = args.cluster
    if args.load_host:
        raise UsageError("--load-host does not go with --cluster: name the hosts in its load: list")
    stems = [path.stem for path in paths]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UsageError(f"--cluster: two files are called {stem}, which names their results")
    files = [
        DeploymentFile(path, load_spec(path), f"{path.stem}-" if len(paths) > 1 else "")
        for path in paths
    ]
    for file in files:
        # What cannot be is refused before anything is started, the last file's as well.
        check_environment(file.spec)
        load_settings(args, "http://127.0.0.1", file.spec.load)
    return files


def _wanted(
    args: argparse.Namespace, files: Sequence[DeploymentFile], taken: Collection[str]
) -> set[str]:
    """Names of the layouts that are measured."""
    names = [name for file in files for name in file.names]
    for name in names:
        if names.count(name) > 1 or name in taken:
            raise UsageError(f"--cluster: two layouts would be called {name}")
    for name in args.layout or ():
        if name not in names:
            raise UsageError(f"--layout {name}: the layouts are {', '.join(names)}")
    return set(args.layout or names)


def groups_of(files: Sequence[DeploymentFile]) -> list[list[DeploymentFile]]:
    """Files that are up together: all, unless two of them need the same port or GPU."""
    for number, one in enumerate(files):
        for other in files[:number]:
            thing = both_claim(other.spec, one.spec)
            if thing is not None:
                report(f"one after another: {other.path} and {one.path} both need {thing}")
                return [[file] for file in files]
    return [list(files)]


@contextlib.contextmanager
def served(
    files: Sequence[DeploymentFile], args: argparse.Namespace
) -> Iterator[list[ServedLayout]]:
    """Start deployments together, and stop them at the end.

    Logs, metrics and descriptions of all hosts are collected in ``FILE.hosts`` of ``--output-dir``.

    Raises:
        SetupError: a deployment cannot be started, or a process or a host of one has died; the
            message names it.
    """
    with interrupted_by(*ENDING), contextlib.ExitStack() as stack:
        started = _start_all(files, args)
        for running in started:
            stack.callback(stop_deployment, running, GRACE_SECONDS)
        try:
            yield [
                layout
                for file, running in zip(files, started, strict=True)
                for layout in _layouts(file, running, args)
            ]
        except SetupError:
            # A process or a host that died says more than what was noticed of it first.
            for running in started:
                running.wait_for_loss()
                running.check()
            raise


def _start_all(files: Sequence[DeploymentFile], args: argparse.Namespace) -> list[Deployment]:
    """Start deployments at the same time; none of them stays if one cannot be started."""
    cancelled = threading.Event()
    started: dict[Path, Deployment] = {}

    def start(file: DeploymentFile) -> None:
        logs = None
        if args.output_dir is not None:
            logs = args.output_dir / f"{file.path.stem}.hosts"
        started[file.path] = start_deployment(
            file.spec, file.path, with_load=True, logs=logs, cancelled=cancelled
        )

    with ThreadPoolExecutor(len(files)) as pool:
        starting = [pool.submit(start, file) for file in files]
        try:
            for each in starting:
                each.result()
        except BaseException:
            cancelled.set()
            pool.shutdown()
            for running in started.values():
                stop_deployment(running, GRACE_SECONDS)
            raise
    return [started[file.path] for file in files]


def _layouts(
    file: DeploymentFile, running: Deployment, args: argparse.Namespace
) -> Iterator[ServedLayout]:
    spec = file.spec
    for layout, name in zip(spec.layouts, file.names, strict=True):
        client = _client(spec, running, args)
        url, gpus = running.layouts[layout].url, gpus_of(spec, layout)
        yield ServedLayout(name, url, tuple(spec.load), client, gpus)


def _client(spec: ClusterSpec, running: Deployment, args: argparse.Namespace) -> LoadClient:
    """Load processes on the hosts of ``load:``, or on this machine if there are none."""
    if not spec.load:
        return LoadClient(client_of(args).places, watch=running.check)
    running.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    places = [
        _place(spec, running, name, number)
        for name in spec.load
        for number in range(args.processes)
    ]
    first = spec.load[0]
    fetch = _fetch_from(running.hosts[first], spec.environment_of(first).get("SSL_CERT_FILE", ""))
    return LoadClient(tuple(places), fetch, running.check)


def _place(spec: ClusterSpec, running: Deployment, name: str, number: int) -> LoadPlace:
    """A load process on a host. The host's agent ends it if this command cannot."""
    environment = spec.environment_of(name) | {TOKEN_VARIABLE: running.state.token_on(name)}
    return LoadPlace(
        f"{name}/{number}",
        tuple(running.hosts[name].module_command(MODULE)),
        first_line=Surroundings(spec.hosts[name].directory, environment).line(),
        shares_clock=spec.hosts[name].ssh is None,
        log=running.logs / f"{name}-load-{number}.log",
    )


def _fetch_from(host: Host, authorities: str) -> Fetch:
    """Requests of the harness itself from a host of a deployment, see :class:`Fetch`.

    ``authorities`` is the file of certificates that load processes of the host trust; empty for the
    host's own.
    """

    def fetch(
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float = 30.0,
    ) -> tuple[int, str]:
        answer = host.fetch(url, timeout, dict(headers or {}), body, authorities=authorities)
        return answer.status, answer.body.decode(errors="replace")

    return fetch
