"""Reads and writes AIPerf's files ``profile_export.jsonl`` and ``profile_export_aiperf.json``.

AIPerf's ``inter_token_latency`` is our TPOT, and its ``inter_chunk_latency`` has our gaps. A record
without them only has the times of its first, second and last token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.bench.load.measures import collect_latencies, measure_duration
from pd.bench.load.records import CANCELLED, ERROR, INTERRUPTED, OK, Record
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd.bench.load.goodput import Goodput

_SCHEMA_VERSION = "1.1"
_CANCELLED_CODE = 499
_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def write_aiperf_records(path: Path, records: Sequence[Record], start_time: float) -> None:
    """Write ``profile_export.jsonl``."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(_format_record(r, start_time)) + "\n" for r in records)


def _format_record(record: Record, start_time: float) -> dict[str, Any]:
    end = record.sent if record.end is None else record.end
    stopped = record.status in (CANCELLED, INTERRUPTED)
    metadata = {
        "session_num": record.session,
        "x_request_id": record.request_id or None,
        "x_correlation_id": str(record.session),
        "conversation_id": str(record.session),
        "turn_index": record.turn,
        "credit_issued_ns": _to_ns(start_time, record.due),
        "request_start_ns": _to_ns(start_time, record.sent),
        "request_ack_ns": None if record.first is None else _to_ns(start_time, record.first),
        "request_end_ns": _to_ns(start_time, end),
        "worker_id": record.process,
        "record_processor_id": record.process,
        "benchmark_phase": "profiling",
        "was_cancelled": stopped,
        "cancellation_time_ns": _to_ns(start_time, end) if stopped else None,
    }
    if record.status == OK:
        return {"metadata": metadata, "metrics": _format_metrics(record), "error": None}
    error = {
        "code": _CANCELLED_CODE if stopped else record.http_status,
        "type": "RequestCancellationError" if stopped else record.error_kind,
        "message": record.error or record.status,
    }
    metrics = {"error_isl": {"value": record.num_prompt_tokens, "unit": "tokens"}}
    return {"metadata": metadata, "metrics": metrics, "error": error}


def _format_metrics(record: Record) -> dict[str, Any]:
    gaps = [gap * 1e3 for gap in record.gaps]
    values: dict[str, tuple[Any, str]] = {
        "input_sequence_length": (record.num_prompt_tokens, "tokens"),
        "output_sequence_length": (record.output_tokens, "tokens"),
        "output_token_count": (record.output_tokens, "tokens"),
        "time_to_first_token": (_to_ms(record.ttft), "ms"),
        "time_to_second_token": (_to_ms(record.second_token), "ms"),
        "request_latency": (_to_ms(record.e2e), "ms"),
        "inter_token_latency": (_to_ms(record.tpot), "ms"),
        "inter_chunk_latency": (gaps or None, "ms"),
    }
    if record.tpot:
        values["output_token_throughput_per_user"] = (1 / record.tpot, "tokens/sec/user")
    return {
        name: {"value": value, "unit": unit}
        for name, (value, unit) in values.items()
        if value is not None
    }


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _to_ns(start_time: float, seconds: float) -> int:
    return int((start_time + seconds) * 1e9)


def aiperf_summary(records: Sequence[Record], goodput: Goodput | None) -> dict[str, Any]:
    """Make the statistics of ``profile_export_aiperf.json``."""
    whole = [record for record in records if record.status == OK]
    seconds = measure_duration(records)
    latencies = collect_latencies(whole)
    output = sum(record.output_tokens for record in whole)
    summary: dict[str, Any] = {
        "schema_version": _SCHEMA_VERSION,
        "request_throughput": _average(len(whole) / seconds if seconds else 0, "requests/sec"),
        "output_token_throughput": _average(output / seconds if seconds else 0, "tokens/sec"),
        "request_count": _average(len(whole), "requests"),
        "error_request_count": _average(sum(r.status == ERROR for r in records), "requests"),
        "benchmark_duration": _average(seconds, "sec"),
        "total_output_tokens": _average(output, "tokens"),
        "total_isl": _average(sum(r.num_prompt_tokens for r in whole), "tokens"),
    }
    for name, metric in (
        ("time_to_first_token", "ttft"),
        ("time_to_second_token", "second_token"),
        ("inter_token_latency", "tpot"),
        ("inter_chunk_latency", "itl"),
        ("request_latency", "e2e"),
    ):
        summary[name] = _make_statistics([value * 1e3 for value in latencies[metric]], "ms")
    summary["input_sequence_length"] = _make_statistics(
        [float(record.num_prompt_tokens) for record in whole], "tokens"
    )
    summary["output_sequence_length"] = _make_statistics(
        [float(record.output_tokens) for record in whole], "tokens"
    )
    if goodput is not None and seconds:
        summary["goodput"] = _average(goodput.good / seconds, "requests/sec")
    return summary


def _average(value: float, unit: str) -> dict[str, Any]:
    return {"unit": unit, "avg": value}


def _make_statistics(values: Sequence[float], unit: str) -> dict[str, Any]:
    if not values:
        return {"unit": unit}
    array = np.asarray(values)
    percentiles = np.percentile(array, _PERCENTILES)
    return {
        "unit": unit,
        "avg": float(array.mean()),
        **{f"p{p}": float(value) for p, value in zip(_PERCENTILES, percentiles, strict=True)},
        "min": float(array.min()),
        "max": float(array.max()),
        "std": float(array.std(ddof=1)) if len(values) > 1 else 0.0,
        "count": len(values),
        "sum": float(array.sum()),
    }


# ---- reading


def read_aiperf_records(path: Path) -> tuple[float, list[Record]]:
    """Read the start (Unix time) and the records of ``profile_export.jsonl``. Raises UsageError."""
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                rows.append(_parse_line(f"{path}:{number}", line))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--import-aiperf {path} cannot be read: {error}") from None
    measured = [row for row in rows if row["metadata"].get("benchmark_phase") != "warmup"]
    if not measured:
        raise UsageError(f"--import-aiperf {path} has no record")
    start = min(row["metadata"]["request_start_ns"] for row in measured)
    try:
        return start / 1e9, [_parse_record(row, start) for row in measured]
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(f"--import-aiperf {path} has a value of a wrong type: {error}") from None


def _parse_line(where: str, line: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        metadata, metrics = row["metadata"], row["metrics"]
        numbers = [
            metadata["session_num"],
            metadata["request_start_ns"],
            metadata["request_end_ns"],
        ]
        valid = all(type(number) is int for number in numbers)
        valid = valid and all(isinstance(metric, dict) for metric in metrics.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise UsageError(f"{where} is no record of AIPerf's profile_export.jsonl: {line[:80]}")
    return row


def _parse_record(row: dict[str, Any], start: int) -> Record:
    metadata, error = row["metadata"], row.get("error")
    sent = (metadata["request_start_ns"] - start) / 1e9
    record = Record(
        session=metadata["session_num"],
        turn=int(metadata.get("turn_index") or 0),
        request_id=str(metadata.get("x_request_id") or ""),
        process=str(metadata.get("worker_id") or ""),
        sent=sent,
        due=sent,
        end=(metadata["request_end_ns"] - start) / 1e9,
        counted_by="aiperf",
    )
    length = _read_number(row, "input_sequence_length") or _read_number(row, "error_isl")
    record.planned_prompt_tokens = int(length or 0)
    if metadata.get("was_cancelled"):
        record.status = CANCELLED
    elif error:
        code = error.get("code")
        record.status, record.error = ERROR, str(error.get("message"))[:300]
        record.error_kind = f"http {code}" if code else str(error.get("type"))
        record.http_status = code
    else:
        _add_times(record, row)
    return record


def _add_times(record: Record, row: dict[str, Any]) -> None:
    record.output_tokens = int(_read_number(row, "output_sequence_length") or 0)
    ttft, latency = _read_number(row, "time_to_first_token"), _read_number(row, "request_latency")
    if latency is not None:
        record.last = record.sent + latency / 1e3
    if ttft is None:  # an answer that was not streamed
        return
    gaps = row["metrics"].get("inter_chunk_latency", {}).get("value") or []
    times = [record.sent + ttft / 1e3]
    for gap in gaps if isinstance(gaps, list) else []:
        times.append(times[-1] + float(gap) / 1e3)
    record.times, record.first = times, times[0]
    to_second = _read_number(row, "time_to_second_token")
    if to_second is not None:
        record.second = record.first + to_second / 1e3
    elif len(times) > 1:
        record.second = times[1]
    if latency is None:
        record.last = times[-1]


def _read_number(row: dict[str, Any], name: str) -> float | None:
    value = row["metrics"].get(name, {}).get("value")
    return float(value) if isinstance(value, int | float) else None
