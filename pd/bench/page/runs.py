"""Result files of `pd-bench serve` and `pd-bench sweep`, as a report needs them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd.bench.load.records import OK, Record, read_records
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Larger files are no summaries.
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class ReportedRun:
    """One run of a load: its summary and its requests.

    Attributes:
        name: as the report calls it.
        records: of all requests, in the order in which they were due.
    """

    name: str
    summary: dict[str, Any]
    records: list[Record]

    @property
    def whole(self) -> list[Record]:
        """Requests that were answered to their end."""
        return [record for record in self.records if record.status == OK]

    @property
    def faults(self) -> list[str]:
        """Why its measures say nothing of the server; empty if they do."""
        partial = why_partial(self.summary)
        return [*(self.summary.get("complaints") or []), *([] if partial is None else [partial])]

    @property
    def measures(self) -> dict[str, Any]:
        found: dict[str, Any] = self.summary.get("measures") or {}
        return found

    def percentile(self, latency: str, which: str) -> float | None:
        """A percentile of a latency in milliseconds, such as ``("ttft", "p50")``; or None."""
        value = (self.measures.get(f"{latency}_ms") or {}).get(which)
        return None if value is None else float(value)


@dataclass(frozen=True)
class Sweep:
    """Rates that were tried on deployments, one row a run, and the highest rate of each."""

    command: str
    rows: list[dict[str, Any]]
    highest: dict[str, float | None]

    @property
    def deployments(self) -> list[str]:
        return list(dict.fromkeys(row["deployment"] for row in self.rows))


def why_partial(summary: Mapping[str, Any]) -> str | None:
    """Why the ``summary.json`` of a run under load is of a part of it; None for a whole run."""
    missing = (summary.get("notes") or {}).get("records_missing_from")
    if missing:
        return f"records of load process {', '.join(map(str, missing))} are missing"
    return "it was ended before its time" if summary.get("interrupted") else None


def read_run(directory: Path, name: str) -> ReportedRun:
    """A directory that `pd-bench serve --output-dir` wrote. Raises UsageError for another."""
    summary = _read(directory / "summary.json")
    if not isinstance(summary.get("measures"), dict):
        raise UsageError(f"{directory / 'summary.json'} has no 'measures'; it is of no load run")
    try:
        records = read_records(directory / "requests.jsonl")
    except OSError as error:
        raise UsageError(f"cannot read {directory / 'requests.jsonl'}: {error.strerror}") from None
    return ReportedRun(name, summary, sorted(records, key=lambda record: record.due))


def read_sweep(file: Path) -> Sweep:
    """A file that `pd-bench sweep --output` wrote. Raises UsageError for another."""
    report = _read(file)
    rows = report.get("results")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and "deployment" in row for row in rows
    ):
        raise UsageError(f"{file} is of no sweep: its 'results' must name deployments")
    return Sweep(
        str(report.get("command", "")),
        [row for row in rows if "rate" in row],
        {row["deployment"]: row["highest_rate"] for row in rows if "highest_rate" in row},
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{file} has more than {_MAX_BYTES >> 20} MiB; it is no summary")
        value = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file} must hold an object of JSON")
    return value
