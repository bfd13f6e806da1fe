"""Starts deployments of ``pd-launch cluster`` files for a benchmark and stops them afterwards."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pd.bench.load.client import LoadClient
from pd.bench.load.command import make_local_client
from pd.bench.load.load_process import MODULE, LoadPlace
from pd.bench.load.settings import load_settings
from pd.cluster.deployment import GRACE_SECONDS, WAIT_SECONDS
from pd.cluster.orders import Process
from pd.cluster.plans import make_place
from pd.commands.cluster import load_file, print_note, start_deployment
from pd.commands.processes import ENDING, ignore_signals, interrupt_on
from pd.core.errors import SetupError, UsageError
from pd.util.children import module_command

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from pd.bench.load.client import Fetch
    from pd.cluster.deployment import Deployment
    from pd.cluster.spec import ClusterSpec


@dataclass(frozen=True)
class ServedLayout:
    """A serving layout and its load client.

    Attributes:
        name: name of the layout, after the name of its file if there are several files.
        hosts: hosts of the load processes; empty if they run on this machine.
        gpus: number of GPUs of its nodes; None if unknown.
    """

    name: str
    url: str
    hosts: tuple[str, ...]
    client: LoadClient
    gpus: int | None = None


@dataclass(frozen=True)
class DeploymentFile:
    """A deployment file. ``prefix`` precedes the names of its layouts."""

    path: Path
    spec: ClusterSpec
    prefix: str

    @property
    def names(self) -> list[str]:
        """Names of the layouts, as results use them."""
        return [f"{self.prefix}{layout}" for layout in self.spec.layouts]


def measure_layouts(
    args: argparse.Namespace, measure: Callable[[ServedLayout], object], taken: Collection[str] = ()
) -> None:
    """Start the deployments of ``--cluster``, call ``measure`` with each layout, then stop them.

    Args:
        taken: names already in use.

    Raises:
        UsageError: a file cannot be used.
        SetupError: see :func:`start_layouts`.
    """
    files = _read_files(args)
    selected = _select_layouts(args, files, taken)
    for file in files:
        with start_layouts(file, args) as layouts:
            for layout in layouts:
                if layout.name in selected:
                    measure(layout)


def _read_files(args: argparse.Namespace) -> list[DeploymentFile]:
    paths: list[Path] = args.cluster
    stems = [path.stem for path in paths]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UsageError(f"--cluster: two files are called {stem}, which names their results")
    files = [
        DeploymentFile(path, load_file(path), f"{path.stem}-" if len(paths) > 1 else "")
        for path in paths
    ]
    for file in files:
        # Check the settings of every file now, because the last one may start in an hour.
        load_settings(args, "http://127.0.0.1", file.spec.load)
    return files


def _select_layouts(
    args: argparse.Namespace, files: Sequence[DeploymentFile], taken: Collection[str]
) -> set[str]:
    """Return the names of the layouts to measure."""
    names = [name for file in files for name in file.names]
    for name in names:
        if names.count(name) > 1 or name in taken:
            raise UsageError(f"--cluster: two layouts would be called {name}")
    for name in args.layout or ():
        if name not in names:
            raise UsageError(f"--layout {name}: the layouts are {', '.join(names)}")
    return set(args.layout or names)


@contextlib.contextmanager
def start_layouts(file: DeploymentFile, args: argparse.Namespace) -> Iterator[list[ServedLayout]]:
    """Start a deployment, yield its layouts, and stop it at the end.

    Logs, metrics and descriptions go to ``FILE.hosts`` in ``--output-dir``.

    Raises:
        SetupError: it did not start, or a process or a host died; the message names it.
    """
    settings = argparse.Namespace(
        address="", trust_network=False, wait=WAIT_SECONDS, grace=GRACE_SECONDS
    )

    def stop() -> None:
        with ignore_signals(*ENDING):
            running.stop_all(GRACE_SECONDS, print_note)

    with interrupt_on(*ENDING), contextlib.ExitStack() as stack:
        running = start_deployment(file.spec, file.path, settings)
        if args.output_dir is not None:
            running.logs = args.output_dir / f"{file.path.stem}.hosts"
        stack.callback(stop)
        try:
            urls, hosts = running.read_urls(), tuple(file.spec.load)
            client = _make_client(file.spec, running, args, stack)
            yield [
                ServedLayout(name, urls[layout], hosts, client, count_gpus(file.spec, layout))
                for layout, name in zip(file.spec.layouts, file.names, strict=True)
            ]
        except SetupError:
            # Name the dead process or host, not the first symptom of its death.
            running.check_processes()
            raise


def count_gpus(spec: ClusterSpec, layout: str) -> int | None:
    """Count the GPUs of a layout; None if Ray gives its nodes none."""
    total = sum(node.count * node.gpus for node in spec.layouts[layout].nodes)
    return round(total) or None


def _make_client(
    spec: ClusterSpec, running: Deployment, args: argparse.Namespace, stack: contextlib.ExitStack
) -> LoadClient:
    """Start load on the hosts of ``load:``, or on this machine if there are none."""
    if not spec.load:
        return LoadClient(make_local_client(args).places, watch=running.check_processes)
    running.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    places = [
        _place(spec, running, name, number, MODULE)
        for name in spec.load
        for number in range(args.processes)
    ]
    fetcher = _place(spec, running, spec.load[0], args.processes, "pd.bench.load.client")
    fetch = stack.enter_context(_open_fetch(fetcher))
    return LoadClient(tuple(places), fetch, running.check_processes)


def _place(
    spec: ClusterSpec, running: Deployment, name: str, number: int, module: str
) -> LoadPlace:
    """Describe a load process on a host of the deployment. It ends with the deployment."""
    order = Process(f"load-{name}-{number}", "", "load", [module], **make_place(spec, name))
    return LoadPlace(
        f"{name}/{number}",
        tuple(module_command("pd.bench.relay", running.name)),
        first_line=msgspec.json.encode(order) + b"\n",
        shares_clock=False,
        log=running.logs / f"{name}-load-{number}.log",
    )


@contextlib.contextmanager
def _open_fetch(place: LoadPlace) -> Iterator[Fetch]:
    """Send the harness's own requests from a host of a deployment, see :class:`Fetch`."""
    with subprocess.Popen(
        place.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        stdin.write(place.first_line)
        stdin.flush()

        def read_answer() -> dict[str, str]:
            line = stdout.readline()
            if not line:
                raise SetupError(f"{place.name} has ended")
            answer: dict[str, str] = json.loads(line)
            return answer

        def fetch(
            url: str,
            *,
            headers: Mapping[str, str] | None = None,
            body: bytes | None = None,
            timeout: float = 30.0,
        ) -> tuple[int, str]:
            text = None if body is None else body.decode()
            request = {"url": url, "headers": dict(headers or {}), "body": text, "timeout": timeout}
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            answer = read_answer()
            if "error" in answer:
                raise SetupError(answer["error"])
            return int(answer["status"]), answer["text"]

        read_answer()
        try:
            yield fetch
        finally:
            stdin.close()
