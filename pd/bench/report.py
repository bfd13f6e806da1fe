"""Result files: where a measurement came from, beside what it found."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

# One line of a report. Values are of JSON.
Row = dict[str, object]

ROOT = Path(__file__).resolve().parents[2]


def add_output(parser: argparse._ActionsContainer) -> None:
    """Add the flag that names a report's file."""
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the results to this JSON file"
    )


def check_output(path: Path | None, flag: str = "--output") -> None:
    """Raise UsageError, before anything is measured, for a file that could not be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no directory {path.absolute().parent}")
    if path is not None and path.is_dir():
        raise UsageError(f"{flag} {path} is a directory; name a file")


def write_report(
    path: Path,
    command: str,
    results: Sequence[Mapping[str, object]],
    *,
    measured: Sequence[str],
    machine: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    note: str | None = None,
) -> None:
    """Write one result file.

    Args:
        command: what a reader types to measure again.
        results: the rows.
        measured: paths below the repository whose uncommitted changes make the commit "-dirty".
        machine: facts beyond those of :func:`describe_machine`.
        settings: what the command does not say.
        note: for readers, such as what else ran on the machine.
    """
    report: dict[str, object] = {
        "command": command,
        "commit": describe_commit(measured),
        "machine": describe_machine() | dict(machine or {}),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if settings:
        report["settings"] = settings
    if note:
        report["note"] = note
    report["results"] = list(results)
    path.write_text(json.dumps(report, indent=1) + "\n")


def describe_commit(measured: Sequence[str]) -> str:
    """The commit of this code, marked if the measured files differ from it; else "unknown".

    A copy whose history is not its own says what it is in the environment: ``PD_COMMIT``.
    """
    if "PD_COMMIT" in os.environ:
        return os.environ["PD_COMMIT"]
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = _git("status", "--porcelain", "--", *measured)
    return f"{head}{'-dirty' if changed else ''}"


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def describe_machine() -> dict[str, object]:
    """Processor, cores and versions; where there are GPUs also theirs (torch's version ends in
    CUDA's)."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **_describe_gpus(),
    }


def _describe_gpus() -> dict[str, object]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    gpus = [line.rpartition(", ") for line in listed.strip().splitlines()]
    if not gpus:
        return {}
    facts: dict[str, object] = {"gpu": ", ".join(name for name, _, _ in gpus), "driver": gpus[0][2]}
    for package in ("torch", "triton", "flashinfer-python", "nixl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts
