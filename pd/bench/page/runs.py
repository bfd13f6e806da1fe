"""Reads the result files of `pd-bench serve`, `sweep` and `programs` for a report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd.bench.load.records import OK, Record, read_records
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# A larger file cannot be a summary.
_MAX_BYTES = 256 << 20


# Columns of a table of programs, by their names in result files.
PROGRAM_COLUMNS = {
    "workload": "workload",
    "layout": "layout",
    "ablation": "ablation",
    "page_size": "page size",
    "pool": "pool",
    "programs_per_s": "programs/s",
    "latency_mean_s": "mean s",
    "latency_p99_s": "p99 s",
    "hit_rate": "hit rate",
    "best_hit_rate": "best",
    "of_best": "of the best",
    "sent_order_hit_rate": "best eviction",
    "page_loss": "lost to pages",
}


@dataclass(frozen=True)
class ReportedRun:
    """One run of a load: its summary and its requests.

    Attributes:
        name: name in the report.
        records: all requests, in the order in which they were due.
    """

    name: str
    summary: dict[str, Any]
    records: list[Record]

    @property
    def whole(self) -> list[Record]:
        """Requests with a complete answer."""
        return [record for record in self.records if record.status == OK]

    @property
    def faults(self) -> list[str]:
        """Why the measures say nothing about the server; empty if they do."""
        partial = why_partial(self.summary)
        return [*(self.summary.get("complaints") or []), *([] if partial is None else [partial])]

    @property
    def measures(self) -> dict[str, Any]:
        measures: dict[str, Any] = self.summary.get("measures") or {}
        return measures

    def get_percentile(self, latency: str, which: str) -> float | None:
        """Return a percentile of a latency, such as ``("ttft", "p50")``, in milliseconds."""
        value = (self.measures.get(f"{latency}_ms") or {}).get(which)
        return None if value is None else float(value)


@dataclass(frozen=True)
class Sweep:
    """Tried rates of deployments, one row per run, and the highest rate of each."""

    command: str
    rows: list[dict[str, Any]]
    highest: dict[str, float | None]

    @property
    def deployments(self) -> list[str]:
        return list(dict.fromkeys(row["deployment"] for row in self.rows))


@dataclass(frozen=True)
class ProgramsReport:
    """One result file: where it comes from, and a row for each workload, layout and ablation."""

    name: str
    source: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def layouts(self) -> list[str]:
        return list(dict.fromkeys(row["layout"] for row in self.rows))

    def select_rows(self, layout: str, *, small_pool: bool) -> list[dict[str, Any]]:
        """Return the rows of a layout with the first page size, with either kind of pool."""
        return [
            row
            for row in self.rows
            if row["layout"] == layout
            and row["page_size"] == self.rows[0]["page_size"]
            and (row["pool"] != "ample") == small_pool
        ]


def why_partial(summary: Mapping[str, Any]) -> str | None:
    """Return why the ``summary.json`` of a run covers only a part of it; None for a whole run."""
    missing = (summary.get("notes") or {}).get("records_missing_from")
    if missing:
        return f"records of load process {', '.join(map(str, missing))} are missing"
    return "it was ended before its time" if summary.get("interrupted") else None


def read_run(directory: Path, name: str) -> ReportedRun:
    """Read a directory of `pd-bench serve --output-dir`. Raises UsageError for any other."""
    summary = _read_json(directory / "summary.json")
    if not isinstance(summary.get("measures"), dict):
        raise UsageError(f"{directory / 'summary.json'} has no 'measures'; it is of no load run")
    try:
        records = read_records(directory / "requests.jsonl")
    except OSError as error:
        raise UsageError(f"cannot read {directory / 'requests.jsonl'}: {error.strerror}") from None
    return ReportedRun(name, summary, sorted(records, key=lambda record: record.due))


def read_rows(file: Path, name: str) -> Sweep | ProgramsReport:
    """Read a file of `pd-bench sweep` or `pd-bench programs`. Raises UsageError for any other."""
    report = _read_json(file)
    rows = report.get("results")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{file} has no list of 'results'")
    if rows and all(PROGRAM_COLUMNS.keys() <= row.keys() for row in rows):
        return ProgramsReport(name, report, rows)
    if not all("deployment" in row for row in rows):
        raise UsageError(
            f"{file} is of no sweep: its 'results' must name deployments; nor is it of pd-bench "
            "programs"
        )
    return Sweep(
        str(report.get("command", "")),
        [row for row in rows if "rate" in row],
        {row["deployment"]: row["highest_rate"] for row in rows if "highest_rate" in row},
    )


def _read_json(file: Path) -> dict[str, Any]:
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
