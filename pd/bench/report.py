"""Result files: measurements and where they came from."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
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

# One line of a report. Values are JSON.
Row = dict[str, object]

ROOT = Path(__file__).resolve().parents[2]


def add_output(parser: argparse._ActionsContainer) -> None:
    """Add the flag that names a report's file."""
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the results to this JSON file"
    )


def check_output(path: Path | None, flag: str = "--output") -> None:
    """Raise UsageError for an unwritable file, before we measure anything."""
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
        command: command to repeat the measurement.
        results: the rows.
        measured: paths in the repository; uncommitted changes there mark the commit "-dirty".
        machine: facts in addition to :func:`describe_machine`.
        settings: settings in addition to the command.
        note: remark for readers, such as other work on the machine.
    """
    report: dict[str, object] = {
        "command": without_absolute_paths(command),
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


# An absolute path, but no part of a URL, and no endpoint such as /generate.
_ABSOLUTE_PATH = re.compile(r"(?<![\w:./-])/(?:[\w.@+-]+/)+[\w.@+-]+")


def without_absolute_paths(command: str) -> str:
    """Make the paths of a command relative, because those of the machine that measured help nobody.

    Paths below the working directory become relative to it, others their last component.
    """

    def shorten(found: re.Match[str]) -> str:
        path = Path(found[0])
        return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name)

    return _ABSOLUTE_PATH.sub(shorten, command)


def format_command(words: Sequence[str]) -> str:
    """Format a command line of ``pd-bench`` without the API key."""
    shown = ["pd-bench", *words]
    for number, word in enumerate(shown):
        if word.startswith("--api-key="):
            shown[number] = "--api-key=KEY"
        elif word == "--api-key" and number + 1 < len(shown):
            shown[number + 1] = "KEY"
    return shlex.join(shown)


def describe_commit(measured: Sequence[str]) -> str:
    """Return the commit of this code, marked if the measured files differ from it; else "unknown".

    A copy without our history names its commit in the environment variable ``PD_COMMIT``.
    """
    if "PD_COMMIT" in os.environ:
        return os.environ["PD_COMMIT"]
    head = _run_git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = _run_git("status", "--porcelain", "--", *measured)
    return f"{head}{'-dirty' if changed else ''}"


def _run_git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def describe_machine() -> dict[str, object]:
    """Describe the processor, the cores and the versions; with GPUs also the GPUs and their
    libraries (torch's version ends in CUDA's)."""
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
