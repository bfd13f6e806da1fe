"""Collects logs, metrics and descriptions of all processes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pd.cluster.deployment import Process

# Bytes of each log that are kept, at its end.
MAX_LOG_BYTES = 64 << 20
_FETCH_SECONDS = 5.0


def collect_snapshots(
    servers: Sequence[Process], directory: Path, report: Callable[[str], None]
) -> None:
    """Save ``/metrics`` and ``/server_info`` of what runs, as HOST-NAME.metrics and .json."""
    for process in servers:
        if not process.running or not process.local_url:
            continue
        pages = [("metrics", "metrics")]
        if process.state.role != "proxy":
            pages.append(("server_info", "json"))
        for page, suffix in pages:
            try:
                answer = process.host.read_own(f"{process.local_url}/{page}", _FETCH_SECONDS)
            except SetupError as error:
                report(f"no {page} of {process}: {error.message}")
                continue
            if answer.status == 200:
                path = directory / f"{process.host.name}-{process.name}.{suffix}"
                _save(path, answer.body, report)


def collect_logs(
    processes: Sequence[Process], directory: Path, report: Callable[[str], None]
) -> None:
    """Save the logs of all processes as HOST-NAME.log."""
    for process in processes:
        if process.host.lost:
            report(f"the log of {process} stays there: {process.host.run_directory}")
            continue
        try:
            content = process.host.read(f"{process.name}.log", MAX_LOG_BYTES)
        except SetupError as error:
            report(f"no log of {process}: {error.message}")
        else:
            _save(directory / f"{process.host.name}-{process.name}.log", content, report)


def _save(path: Path, content: bytes, report: Callable[[str], None]) -> None:
    """Write a file, or report why it cannot be: a full disk keeps no deployment from stopping."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        report(f"cannot write {path}: {error.strerror}")
