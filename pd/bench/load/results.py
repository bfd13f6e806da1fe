"""Writes the result files of a run, and prints its measures.

A directory gets:

=============================  ==================================================================
``requests.jsonl``             a :class:`~pd.bench.load.records.Record` a line
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
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd.bench.load.aiperf import aiperf_summary, write_aiperf_records
from pd.bench.load.exports import bench_details, bench_keys
from pd.bench.load.measures import LATENCIES
from pd.bench.load.records import write_records
from pd.bench.report import describe_commit, describe_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.measure import LoadResult
    from pd.bench.load.settings import LoadSettings

SCHEMA_VERSION = 1
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


def summary(result: LoadResult, settings: dict[str, Any], command: str) -> dict[str, Any]:
    """Contents of ``summary.json``."""
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


def shown_settings(settings: LoadSettings) -> dict[str, Any]:
    """Settings as JSON, without secrets; ``inf`` is a string there."""
    shown = dataclasses.asdict(settings)
    del shown["target"]
    return {name: _plain(value) for name, value in shown.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Path) or value in (float("inf"), float("-inf")):
        return str(value)
    return value


def shown_command(words: Sequence[str]) -> str:
    """A command line of ``pd-bench`` without the API key."""
    shown = ["pd-bench", *words]
    for number, word in enumerate(shown):
        if word.startswith("--api-key="):
            shown[number] = "--api-key=KEY"
        elif word == "--api-key" and number + 1 < len(shown):
            shown[number + 1] = "KEY"
    return shlex.join(shown)


def write_results(
    directory: Path, result: LoadResult, settings: dict[str, Any], command: str
) -> None:
    """Write all files. Those of an earlier run are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    write_records(directory / "requests.jsonl", result.records)
    _write(directory / "summary.json", summary(result, settings, command))
    write_bench_file(directory / "bench.json", result, settings, detailed=False)
    write_aiperf_records(directory / "profile_export.jsonl", result.records, result.start_time)
    statistics = aiperf_summary(result.records, result.goodput)
    _write(directory / "profile_export_aiperf.json", statistics)


def write_bench_file(
    path: Path, result: LoadResult, settings: dict[str, Any], *, detailed: bool
) -> None:
    """Write the keys of vLLM's and SGLang's harness, with lists by request if ``detailed``."""
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
    _write(path, keys | (bench_details(result.records) if detailed else {}))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def print_result(result: LoadResult) -> None:
    """Print the measures as a table, and loudly what makes them void."""
    found = result.measures
    print(f"{'milliseconds':14} {'count':>9} {' '.join(f'{name:>9}' for name in _COLUMNS)}")
    for name in LATENCIES:
        row = found[f"{name}_ms"]
        cells = " ".join(f"{_cell(row[column]):>9}" for column in _COLUMNS)
        print(f"{name:14} {row['count']:9} {cells}")
    print(
        f"{found['completed']} of {found['requests']} requests in {found['duration_s']:.2f} s: "
        f"{found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:.1f} output "
        f"tokens/s, {found['tokens_per_s']:.1f} tokens/s"
    )
    for name in ("failed", "cancelled", "interrupted", "errors", "cached_share", "goodput"):
        if found.get(name):
            print(f"{name}: {found[name]}")
    for name, value in result.notes.items():
        print(f"{name}: {value}")
    print(f"client: {', '.join(f'{name} {value}' for name, value in result.client.items())}")
    for complaint in result.complaints:
        print(f"RESULT VOID, the client was the bottleneck: {complaint}", flush=True)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
