"""Writes the result files of a run, and prints its measures.

A directory gets:

=============================  ==================================================================
``requests.jsonl``             a :class:`~pd.bench.load.records.Record` per line
``summary.json``               command, commit, machine, settings, ``valid``, ``complaints``,
                               ``client``, ``measures``, ``notes``, ``server``
``bench.json``                 keys of ``vllm bench serve`` and of SGLang's bench_serving
``profile_export.jsonl``       AIPerf's records
``profile_export_aiperf.json`` AIPerf's statistics
=============================  ==================================================================
"""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd.bench.load.aiperf import aiperf_summary, write_aiperf_records
from pd.bench.load.exports import bench_details, bench_keys
from pd.bench.load.measures import LATENCIES
from pd.bench.load.records import write_records
from pd.bench.report import describe_commit, describe_machine
from pd.util.printable import escape_text

if TYPE_CHECKING:
    from pd.bench.load.measure import LoadResult
    from pd.bench.load.settings import LoadSettings

SCHEMA_VERSION = 1
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


def make_summary(result: LoadResult, settings: dict[str, Any], command: str) -> dict[str, Any]:
    """Make the contents of ``summary.json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "commit": describe_commit(["pd"]),
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "start_time": result.start_time,
        "settings": settings,
        "valid": not result.complaints,
        "complaints": result.complaints,
        "interrupted": result.interrupted,
        "client": result.client,
        "measures": result.measures,
        "notes": result.notes,
        "server": result.server,
    }


def settings_to_json(settings: LoadSettings) -> dict[str, Any]:
    """Return the settings as JSON without secrets; ``inf`` becomes a string."""
    fields = dataclasses.asdict(settings)
    del fields["target"]
    return {name: _to_plain(value) for name, value in fields.items()}


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_to_plain(each) for each in value]
    if isinstance(value, Path) or value in (float("inf"), float("-inf")):
        return str(value)
    return value


def write_results(
    directory: Path, result: LoadResult, settings: dict[str, Any], command: str
) -> None:
    """Write all files, and replace those of an earlier run."""
    directory.mkdir(parents=True, exist_ok=True)
    write_records(directory / "requests.jsonl", result.records)
    _write_json(directory / "summary.json", make_summary(result, settings, command))
    write_bench_file(directory / "bench.json", result, settings, detailed=False)
    write_aiperf_records(directory / "profile_export.jsonl", result.records, result.start_time)
    statistics = aiperf_summary(result.records, result.goodput)
    _write_json(directory / "profile_export_aiperf.json", statistics)


def write_bench_file(
    path: Path, result: LoadResult, settings: dict[str, Any], *, detailed: bool
) -> None:
    """Write the keys of vLLM's and SGLang's harness; if ``detailed``, also lists by request."""
    arrivals, dataset = settings.get("arrivals") or {}, settings.get("dataset") or {}
    facts = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "endpoint_type": settings.get("endpoint"),
        "model_id": result.notes.get("model"),
        "dataset_name": dataset.get("name"),
        "num_prompts": len(result.records),
        "request_rate": arrivals.get("rate", "inf"),
        "burstiness": arrivals.get("burstiness", 1.0),
        "max_concurrency": settings.get("max_concurrency"),
        "random_input_len": dataset.get("input_len"),
        "random_output_len": dataset.get("output_len"),
        "random_range_ratio": dataset.get("range_ratio"),
        "valid": not result.complaints,
    }
    if arrivals.get("ramp") is not None:
        facts |= {
            "ramp_up_strategy": arrivals["ramp"],
            "ramp_up_start_rps": arrivals["ramp_start"],
            "ramp_up_end_rps": arrivals["ramp_end"],
        }
    keys = bench_keys(result.records, facts, result.goodput)
    _write_json(path, keys | (bench_details(result.records) if detailed else {}))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def print_result(result: LoadResult) -> None:
    """Print the measures as a table, and complaints about the client last."""
    measures = result.measures
    print(f"{'milliseconds':14} {'count':>9} {' '.join(f'{name:>9}' for name in _COLUMNS)}")
    for name in LATENCIES:
        row = measures[f"{name}_ms"]
        values = [row[column] for column in _COLUMNS]
        cells = " ".join(f"{'' if value is None else f'{value:.2f}':>9}" for value in values)
        print(f"{name:14} {row['count']:9} {cells}")
    print(
        f"{measures['completed']} of {measures['requests']} requests in "
        f"{measures['duration_s']:.2f} s: {measures['requests_per_s']:.2f} requests/s, "
        f"{measures['output_tokens_per_s']:.1f} output tokens/s, "
        f"{measures['tokens_per_s']:.1f} tokens/s"
    )
    for name in ("failed", "cancelled", "interrupted", "errors", "cached_share", "goodput"):
        if measures.get(name):
            print(f"{name}: {escape_text(str(measures[name]))}")
    for name, value in result.notes.items():
        print(f"{name}: {escape_text(str(value))}")
    print(f"client: {', '.join(f'{name} {value}' for name, value in result.client.items())}")
    for complaint in result.complaints:
        print(f"RESULT VOID, the client was the bottleneck: {escape_text(complaint)}", flush=True)
