"""Start layouts of nodes on this machine for benchmarks.

Benchmarks of GPU machines use this, because Ray is not installed there. Nodes of different layouts
may share a device.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.commands.processes import Children, LaunchedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class LocalLayout(NamedTuple):
    """A proxy and its nodes, by role."""

    proxy: LaunchedProcess
    nodes: list[tuple[str, LaunchedProcess]]


class LocalLayouts(NamedTuple):
    """Layouts that run, by name."""

    layouts: dict[str, LocalLayout]
    children: Children


@contextlib.contextmanager
def start_layouts(
    model: str, flags: Mapping[str, Any], layouts: Mapping[str, Any], logs: Path
) -> Iterator[LocalLayouts]:
    """Start all nodes at once, then the proxies; stop everything at the end.

    Args:
        flags: of every node, as on the command line; true is a switch.
        layouts: by name: ``nodes`` with ``role``, ``device`` and ``flags``, and ``proxy`` flags.
        logs: directory for a log of each process.

    Raises:
        SetupError: a process ends or is not ready in time.
    """
    logs.mkdir(parents=True, exist_ok=True)
    children = Children(logs)
    started: dict[str, LocalLayout] = {}
    try:
        nodes = {
            name: [
                (
                    node["role"],
                    children.start(
                        f"{name}-{node['role']}-{number}",
                        node["role"],
                        *(f"--model={model}", "--port=0", f"--device={node['device']}"),
                        *(["--bootstrap-port=0"] if node["role"] == "prefill" else []),
                        *spell_flags({**flags, **node["flags"]}),
                    ),
                )
                for number, node in enumerate(layout["nodes"])
            ]
            for name, layout in layouts.items()
        }
        every_node = [node for group in nodes.values() for _, node in group]
        children.wait_ready(every_node, lambda seconds: None)
        for name, layout in layouts.items():
            urls = [f"--{role}={node.url}" for role, node in nodes[name]]
            settings = spell_flags(layout["proxy"])
            proxy = children.start(f"{name}-proxy", "proxy", "--port=0", *urls, *settings)
            started[name] = LocalLayout(proxy, nodes[name])
        children.wait_ready([layout.proxy for layout in started.values()], lambda seconds: None)
        yield LocalLayouts(started, children)
    finally:
        children.stop()


def spell_flags(flags: Mapping[str, Any]) -> list[str]:
    """Spell flags as a command line has them."""
    found = []
    for name, value in flags.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None and value is not False:
            found += [f"--{name}={one}" for one in (value if isinstance(value, list) else [value])]
    return found
