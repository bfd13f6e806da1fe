"""The state of a deployment as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.cluster import serving

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pd.cluster.deployment import Deployment, Layout, Process

READY = "ready"


class StatusRow(NamedTuple):
    """A process, or a host that cannot be reached."""

    layout: str
    name: str
    role: str
    host: str
    url: str
    pid: str
    state: str


def rows_of(running: Deployment, problems: Mapping[str, str]) -> list[StatusRow]:
    """A row for each process, by layout, and for each host that was not reached."""
    rows: list[StatusRow] = []
    for layout in running.layouts.values():
        rows += _layout_rows(layout)
    for host, problem in problems.items():
        rows.append(StatusRow("", "", "", host, "", "", f"unreachable: {problem}"))
    return rows


def _layout_rows(layout: Layout) -> Iterable[StatusRow]:
    workers: dict[str, bool] = {}
    proxy = layout.proxy
    if proxy is not None:
        state = _own_state(proxy)
        if state == READY:
            readiness = serving.ask_readiness(proxy.host, proxy.local_url)
            workers = serving.ask_workers(proxy.host, proxy.local_url)
            state = READY if readiness.ready else f"not serving: {readiness.reason}"
        yield _row(proxy, state)
    for node in layout.nodes:
        state = _own_state(node)
        if state == READY and not workers.get(node.url):
            state = "not used by its proxy"
        yield _row(node, state)


def _own_state(process: Process) -> str:
    if process.host.lost:
        return f"host lost: {process.host.lost}"
    if process.state.ended:
        return "gone"
    return READY if process.url else "starting"


def _row(process: Process, state: str) -> StatusRow:
    known = process.state
    pid = str(known.pid)
    return StatusRow(
        known.layout, process.name, known.role, process.host.name, process.url, pid, state
    )


def table(rows: list[StatusRow]) -> str:
    """The rows under their titles, in columns."""
    lines = [tuple(title.upper() for title in StatusRow._fields), *rows]
    widths = [
        max(len(line[column]) for line in lines) for column in range(len(StatusRow._fields) - 1)
    ]
    return "\n".join(
        "  ".join(
            [*(f"{cell:{width}}" for cell, width in zip(line, widths, strict=False)), line[-1]]
        )
        for line in lines
    )
