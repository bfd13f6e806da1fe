"""Measures of a run, from its records.

ITL counts every gap between two events with tokens, because a reader waits for each of them. A
server that sends several tokens per event has fewer and longer gaps; ``tokens_per_event`` shows it.
TPOT counts tokens, ``(last - first) / (n - 1)``, so it is the same either way.

Latencies are those of whole answers. Throughput counts them from the first request sent to the last
byte received.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.bench.load.records import CANCELLED, ERROR, INTERRUPTED, OK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd.bench.load.goodput import Goodput
    from pd.bench.load.records import Record

PERCENTILES = (50, 90, 95, 99, 99.9)
LATENCIES = ("ttft", "second_token", "itl", "tpot", "e2e")


def summarize_records(
    records: Sequence[Record], goodput: Goodput | None = None, gpus: int | None = None
) -> dict[str, Any]:
    """Compute all measures, as ``summary.json`` has them under ``measures``."""
    whole = [record for record in records if record.status == OK]
    seconds = measure_duration(records)
    latencies = collect_latencies(whole)
    counts = [count for r in whole for count in r.tokens or ()]
    measures: dict[str, Any] = {
        "requests": len(records),
        "completed": len(whole),
        "failed": sum(record.status == ERROR for record in records),
        "cancelled": sum(record.status == CANCELLED for record in records),
        "interrupted": sum(record.status == INTERRUPTED for record in records),
        "errors": dict(Counter(r.error_kind or "?" for r in records if r.status == ERROR)),
        "duration_s": round(seconds, 6),
        **_measure_throughput(whole, seconds, gpus),
        **{f"{name}_ms": describe_distribution(values) for name, values in latencies.items()},
        "cached_share": None,
        "tokens_per_event": round(sum(counts) / len(counts), 4) if counts else None,
        "counted_by": dict(Counter(record.counted_by for record in whole)),
    }
    cached = [r for r in whole if r.cached_tokens is not None]
    if cached:
        tokens = sum(r.cached_tokens or 0 for r in cached)
        prompt = sum(record.num_prompt_tokens for record in cached)
        measures["cached_share"] = round(_divide(tokens, prompt), 6)
    stages = dict.fromkeys(name for record in whole for name in record.stages or ())
    if stages:
        measures["stages_ms"] = {
            name: describe_distribution(
                [r.stages[name] for r in whole if r.stages and name in r.stages]
            )
            for name in stages
        }
    checked = [r.valid_output for r in whole if r.valid_output is not None]
    if checked:
        measures["structured"] = {"answers": len(checked), "valid_json": sum(checked)}
    if goodput is not None:
        measures["goodput"] = {
            "requests_per_s": _divide(goodput.good, seconds),
            "share": round(goodput.share, 6),
            "good": goodput.good,
            "counted": goodput.counted,
            "missed": goodput.missed,
        }
    return measures


def measure_duration(records: Iterable[Record]) -> float:
    """Return the seconds from the first request to the last byte."""
    ends = [(r.sent, r.sent if r.end is None else r.end) for r in records]
    return max(end for _, end in ends) - min(sent for sent, _ in ends) if ends else 0.0


def collect_latencies(whole: Sequence[Record]) -> dict[str, list[float]]:
    """Collect seconds by measure: for ITL one value per gap, otherwise one per request."""
    return {
        "ttft": [r.ttft for r in whole if r.ttft is not None],
        "second_token": [r.second_token for r in whole if r.second_token is not None],
        "itl": [gap for r in whole for gap in r.gaps],
        "tpot": [r.tpot for r in whole if r.tpot is not None],
        "e2e": [r.e2e for r in whole if r.e2e is not None],
    }


def describe_distribution(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Return count, mean, percentiles and maximum in milliseconds; null without any value."""
    names = ["mean", "std", *(f"p{p:g}" for p in PERCENTILES), "max"]
    if not seconds:
        return {"count": 0, **dict.fromkeys(names)}
    values = np.asarray(seconds) * 1e3
    numbers = [values.mean(), values.std(), *np.percentile(values, PERCENTILES), values.max()]
    return {"count": len(seconds)} | {
        name: round(float(number), 4) for name, number in zip(names, numbers, strict=True)
    }


def _measure_throughput(
    whole: Sequence[Record], seconds: float, gpus: int | None
) -> dict[str, Any]:
    prompt = sum(record.num_prompt_tokens for record in whole)
    output = sum(record.output_tokens for record in whole)
    rates = {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": _divide(len(whole), seconds),
        "prompt_tokens_per_s": _divide(prompt, seconds),
        "output_tokens_per_s": _divide(output, seconds),
        "tokens_per_s": _divide(prompt + output, seconds),
        "mean_concurrency": _divide(sum(r.e2e or 0.0 for r in whole), seconds),
    }
    if gpus:
        for name in ("requests_per_s", "output_tokens_per_s", "tokens_per_s"):
            rates[f"{name}_per_gpu"] = round(rates[name] / gpus, 4)
    return rates


def _divide(number: float, whole: float) -> float:
    return round(number / whole, 6) if whole else 0.0
