"""``pd-launch cluster``: a deployment over several hosts, from one YAML file."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd.commands import parser as types
from pd.commands.processes import ENDING, handled, ignored, interrupted_by
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from pd.cluster.deployment import Deployment
    from pd.cluster.spec import ClusterSpec
    from pd.cluster.state import ClusterState

TEXT = "start, show, change or stop a deployment over several hosts"
ACTIONS = ("up", "status", "scale", "down")
_CHECK_SECONDS = 1.0
# Beyond the grace time of three groups of processes, for collecting logs.
_COLLECT_SECONDS = 60.0

_EXAMPLES = """\
examples:
  pd-launch cluster up configs/two-hosts/cluster.yaml            # until Ctrl-C
  pd-launch cluster up configs/two-hosts/cluster.yaml --detach
  pd-launch cluster status configs/two-hosts/cluster.yaml
  pd-launch cluster scale configs/two-hosts/cluster.yaml decode=2
  pd-launch cluster down configs/two-hosts/cluster.yaml

docs/cluster.md explains the file. Logs and metrics of all hosts are collected when it stops.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    from pd.cluster.times import GRACE_SECONDS, WAIT_SECONDS

    parser.usage = "%(prog)s ACTION FILE [[LAYOUT.]ROLE=N ...] [flags]"
    parser.epilog = _EXAMPLES
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML file of the deployment")
    parser.add_argument(
        "nodes",
        nargs="*",
        metavar="[LAYOUT.]ROLE=N",
        help="scale: how many nodes of a role there are to be, such as decode=3",
    )
    parser.add_argument(
        "--wait",
        type=types.seconds,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="up, scale: how long everything may take to be ready",
    )
    parser.add_argument(
        "--grace",
        type=types.seconds_or_zero,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help="how long each process may take to end before it is killed; 0: at once",
    )
    parser.add_argument(
        "--detach", action="store_true", help="up: return when everything serves, and leave it"
    )
    parser.add_argument(
        "--forget",
        action="store_true",
        help="down: do not wait for hosts that cannot be reached any more",
    )


def run(args: argparse.Namespace) -> int:
    """Do what was asked. Raises UsageError or SetupError."""
    from pd.cluster.state import deployment_id, load_state

    if args.nodes and args.action != "scale":
        raise UsageError(f"only scale takes numbers of nodes, not {args.action}: {args.nodes[0]}")
    if args.action == "up":
        return _up(args)
    state = load_state(deployment_id(args.file))
    if state is None:
        if not args.file.exists():
            raise UsageError(f"cannot read {args.file}: no such file")
        report(f"{args.file} is not up")
        return 0 if args.action == "down" else 1
    if args.action == "scale":
        return _scale(args, state)
    return _status(state) if args.action == "status" else _down(args, state)


def report(line: str) -> None:
    """Print a line for people, if they are still there to read it.

    A terminal or a pipe that is gone keeps nothing from being stopped.
    """
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


# ---- up


def _up(args: argparse.Namespace) -> int:
    from pd.cluster.spec_file import load_spec

    with interrupted_by(*ENDING):
        running = start_deployment(load_spec(args.file), args.file, wait_seconds=args.wait)
        if args.detach:
            try:
                _detach(running)
            except BaseException:
                # Its hosts may have been told to keep it, without a record of that.
                stop_deployment(running, args.grace)
                raise
            _print_urls(running)
            return 0
        try:
            _print_urls(running)
            report("until Ctrl-C")
            while True:
                running.check()
                running.wait(_CHECK_SECONDS)
        except KeyboardInterrupt:
            return 0
        finally:
            stop_deployment(running, args.grace)


def start_deployment(spec: ClusterSpec, file: Path, **settings: Any) -> Deployment:
    """Start a deployment for this command, and remove what an earlier run has left.

    Args:
        settings: of :func:`pd.cluster.start.up`.

    Raises:
        UsageError: a flag of the file is none, a variable that it passes on is not set, or the
            deployment is up already.
        SetupError: it cannot be started.
    """
    from pd.cluster.spec_file import check_environment, check_known_flags
    from pd.cluster.start import up
    from pd.cluster.state import deployment_id, load_state
    from pd.commands.servers import server_flags

    check_known_flags(spec, server_flags())
    check_environment(spec)
    state = load_state(deployment_id(file))
    if state is not None:
        _clean_up(file, state)
    return up(spec, file, report=report, **settings)


def stop_deployment(running: Deployment, grace: float) -> None:
    """Stop everything, and say where its logs are."""
    # NOTE: an impatient second Ctrl-C must not leave processes behind.
    with ignored(*ENDING):
        report("stopping")
        running.stop(grace)
        report(f"logs and metrics are in {running.logs}")


def _print_urls(running: Deployment) -> None:
    line = {"event": "ready", "name": running.state.deployment, "layouts": running.urls}
    print(json.dumps(line), flush=True)


def _detach(running: Deployment) -> None:
    import msgspec

    from pd.cluster.state import replace_state

    running.keep()
    replace_state(msgspec.structs.replace(running.state, controller=None))
    running.release()


def _clean_up(file: Path, state: ClusterState) -> None:
    """Remove what a run that ended by itself has left. Raises UsageError if it is up."""
    from pd.cluster.deployment import attach

    remedy = f"stop it with: pd-launch cluster down {file}"
    if state.controller_handle() is not None:
        raise UsageError(f"{file} is up already; {remedy}")
    running, problems = attach(state, report)
    if any(process.running for process in running.processes):
        running.release()
        raise UsageError(f"{file} is up already; {remedy}")
    if not running.stop():
        raise SetupError(
            f"an earlier run cannot be cleaned up: {'; '.join(problems.values())}; if the host is "
            f"gone: pd-launch cluster down {file} --forget"
        )


# ---- scale, status and down


def _scale(args: argparse.Namespace, state: ClusterState) -> int:
    """Change the number of nodes, and print the table of all."""
    from pd.cluster.scale import parse_wanted, scale
    from pd.cluster.spec_file import check_known_flags, load_spec
    from pd.commands.servers import server_flags

    spec = load_spec(args.file)
    wanted = parse_wanted(args.nodes, spec)
    check_known_flags(spec, server_flags())
    cancelled = threading.Event()
    with handled(lambda *_: cancelled.set(), *ENDING):
        running = scale(
            spec,
            state,
            wanted,
            wait_seconds=args.wait,
            grace=args.grace,
            cancelled=cancelled,
            report=report,
        )
    return _print_status(running, {})


def _status(state: ClusterState) -> int:
    """Print a table; exit status 0 if everything is ready."""
    from pd.cluster.deployment import attach

    return _print_status(*attach(state))


def _print_status(running: Deployment, problems: Mapping[str, str]) -> int:
    """Print the table of what runs, and end the connection."""
    from pd.cluster.status import rows_of, table

    try:
        rows = rows_of(running, problems)
    finally:
        running.release()
    print(table(rows))
    return 0 if all(row.state == "ready" for row in rows) else 1


def _down(args: argparse.Namespace, state: ClusterState) -> int:
    from pd.cluster.deployment import attach
    from pd.cluster.state import forget_state, load_state

    _stop_controller(args, state)
    state_left = load_state(state.deployment)
    if state_left is None or state_left.run != state.run:
        return 0  # the process that had started it has stopped everything
    running, problems = attach(state, report)
    for problem in problems.values():
        report(problem)
    stopped = running.stop(args.grace)
    report(f"logs and metrics are in {running.logs}")
    if stopped:
        return 0
    if args.forget:
        forget_state(state)
        return 0
    raise SetupError(
        "not everything could be stopped; try again, or give --forget if the hosts are gone"
    )


def _stop_controller(args: argparse.Namespace, state: ClusterState) -> None:
    """Ask the command that started the run, if it is still there, to stop it."""
    controller = state.controller_handle()
    if controller is None:
        return
    controller.send(signal.SIGTERM)
    deadline = time.monotonic() + 3 * args.grace + _COLLECT_SECONDS
    while not controller.ended:
        if time.monotonic() > deadline:
            raise SetupError(f"process {state.controller} that started the run does not end")
        time.sleep(0.05)
    controller.close()
