"""``pd-launch cluster``: a deployment over the hosts of a Ray cluster, from one YAML file."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pd.commands import parser as types
from pd.commands.processes import ENDING, ignore_signals, interrupt_on
from pd.core.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from pd.cluster.deployment import Deployment
    from pd.cluster.orders import ProcessState
    from pd.cluster.spec import ClusterSpec

TEXT = "start, show, change or stop a deployment over several hosts"
ACTIONS = ("up", "status", "scale", "down")
_EXAMPLES = """\
examples:
  pd-launch cluster up configs/two-hosts/cluster.yaml
  pd-launch cluster status configs/two-hosts/cluster.yaml
  pd-launch cluster scale configs/two-hosts/cluster.yaml decode=2
  pd-launch cluster down configs/two-hosts/cluster.yaml

docs/cluster.md explains the file and how to form a Ray cluster. Without one, "up" starts Ray on
this machine.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    from pd.cluster.deployment import GRACE_SECONDS, WAIT_SECONDS

    parser.usage = "%(prog)s ACTION FILE [[LAYOUT.]ROLE=N ...] [flags]"
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    add("file", type=Path, metavar="FILE", help="YAML file of the deployment")
    text = "scale: how many nodes of a role there are to be, such as decode=3"
    add("nodes", nargs="*", metavar="[LAYOUT.]ROLE=N", help=text)
    text = "up: Ray's dashboard (default: the file's ray.address, or a local Ray that it starts)"
    add("--address", default="", metavar="HOST:PORT", help=text)
    text = "up: use a Ray cluster without a token, or send it over the network in the clear"
    add("--trust-network", action="store_true", help=text)
    text, kind = "up, scale: how long everything may take to be ready", types.parse_seconds
    add("--wait", type=kind, default=WAIT_SECONDS, metavar="SECONDS", help=text)
    text = "how long each process may drain before it is killed; 0: at once"
    kind = types.parse_seconds_or_zero
    add("--grace", type=kind, default=GRACE_SECONDS, metavar="SECONDS", help=text)
    text = "scale, down: this host is gone for good, so do not wait for its processes"
    add("--lost", action="append", default=[], metavar="ADDRESS", help=text)


def run(args: argparse.Namespace) -> int:
    """Carry out the action. Raises UsageError or SetupError."""
    from pd.cluster.deployment import find_deployment, find_unready, make_deployment_id

    if args.nodes and args.action != "scale":
        raise UsageError(f"only scale takes numbers of nodes, not {args.action}: {args.nodes[0]}")
    spec = load_file(args.file)
    if args.action == "up":
        deployment = start_deployment(spec, args.file, args)
        line = {"event": "ready", "name": deployment.name, "layouts": deployment.read_urls()}
        print(json.dumps(line), flush=True)
        return 0
    found = find_deployment(make_deployment_id(args.file))
    if found is None:
        print_note(f"{args.file} is not up")
        return 0 if args.action == "down" else 1
    if args.action == "down":
        found.stop_all(args.grace, print_note, args.lost)
        return 0
    if args.action == "scale":
        _scale_nodes(found, spec, args)
    states = found.read_states()
    unready = find_unready(states)
    print(_format_table(states, unready))
    return 1 if unready else 0


def print_note(line: str) -> None:
    """Print a line for people, if they are still there to read it."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def load_file(file: Path) -> ClusterSpec:
    """Read a file and check its flags against our commands. Raises UsageError."""
    from pd.cluster.spec import load_spec
    from pd.commands.servers import list_server_flags

    return load_spec(file, list_server_flags())


def start_deployment(spec: ClusterSpec, file: Path, args: argparse.Namespace) -> Deployment:
    """Start everything of a file; leave nothing running if that fails.

    Args:
        args: with ``address``, ``trust_network``, ``wait`` and ``grace``.

    Raises UsageError if it is up already, SetupError if it does not become ready.
    """
    from pd.cluster.deployment import find_deployment, make_deployment_id, open_deployment
    from pd.cluster.plans import plan_all

    name = make_deployment_id(file)
    if find_deployment(name) is not None:
        raise UsageError(f"{file} is up already; stop it: pd-launch cluster down {file}")
    ray = replace(spec.ray, address=args.address or spec.ray.address)
    with interrupt_on(*ENDING):
        opened = open_deployment(name, ray, args.trust_network, print_note)
        try:
            key = Path(spec.cluster_key_file).read_text() if spec.cluster_key_file else ""
            key = key.strip() or secrets.token_hex(32)
            opened.start_processes(plan_all(spec), key, args.wait, print_note)
        except BaseException:
            # An impatient second Ctrl-C must not orphan processes.
            with ignore_signals(*ENDING):
                opened.stop_all(args.grace, print_note)
            raise
    return opened


def _scale_nodes(found: Deployment, spec: ClusterSpec, args: argparse.Namespace) -> None:
    """Start missing nodes, then drain superfluous ones. Raises UsageError or SetupError."""
    from pd.cluster import orders
    from pd.cluster.plans import plan_nodes
    from pd.cluster.spec import check_halves

    wanted = [_parse_count(word, spec) for word in args.nodes]
    for layout, role, total in wanted:
        if total == 0:
            check_halves(f"{layout}.{role}=0", spec.layouts[layout], spec.flags, absent=role)
    for address in args.lost:
        found.client.send_request(orders.DeclareLost(address))
    leaving: list[str] = []
    for layout, role, total in wanted:
        names = [state.name for state in found.read_states()]
        # By number: the youngest leave first.
        nodes = [name for name in names if name.startswith(f"{layout}-{role}-")]
        nodes.sort(key=lambda name: int(name.rpartition("-")[2]))
        leaving += nodes[total:]
        if total > len(nodes):
            group = next(node for node in spec.layouts[layout].nodes if node.role == role)
            planned = plan_nodes(spec, layout, group, total - len(nodes), names)
            try:
                found.start_processes(planned, "", args.wait, print_note)
            except BaseException:
                with ignore_signals(*ENDING):
                    found.remove_processes([process.name for process in planned], args.grace)
                raise
    if leaving:
        print_note(f"draining {', '.join(leaving)}")
        found.remove_processes(leaving, args.grace)


def _parse_count(word: str, spec: ClusterSpec) -> tuple[str, str, int]:
    """Read ``ROLE=N`` or ``LAYOUT.ROLE=N``. Raises UsageError."""
    match = re.fullmatch(r"(?:([^.=]*)\.)?(prefill|decode|unified)=(\d{1,3})", word)
    if match is None:
        raise UsageError(f"{word}: give [LAYOUT.]ROLE=N, such as decode=3")
    layout, role, total = match.groups()
    if layout is None and len(spec.layouts) == 1:
        (layout,) = spec.layouts
    if layout not in spec.layouts:
        raise UsageError(f"{word}: name one of the layouts {', '.join(spec.layouts)}")
    if all(node.role != role for node in spec.layouts[layout].nodes):
        raise UsageError(f"{word}: layouts.{layout}.nodes has no {role} node; add an entry")
    return layout, role, int(total)


def _format_table(states: Sequence[ProcessState], unready: Mapping[str, str]) -> str:
    from pd.util.printable import escape_text, format_columns

    rows = [("LAYOUT", "NAME", "ROLE", "HOST", "URL", "PID", "RESTARTS", "STATE")]
    for s in states:
        where = (escape_text(s.layout), s.name, s.role, escape_text(s.address), escape_text(s.url))
        state = unready.get(s.name, ": ready").partition(": ")[2]
        rows.append((*where, str(s.pid or ""), str(s.restarts), state))
    return format_columns(rows)
