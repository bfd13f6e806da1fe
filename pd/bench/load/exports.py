"""Results under the keys of scripts for `vllm bench serve` and SGLang's bench_serving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pd.bench.load.measures import collect_latencies, measure_duration
from pd.bench.load.records import ERROR, OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.goodput import Goodput
    from pd.bench.load.records import Record

_PERCENTILES = (50, 90, 95, 99, 99.9)
# vLLM: a label, a tokenizer, and the speed relative to a recording. SGLang: a tag, the answers'
# length in a data set, the server's own description, and its acceptance length under speculation.
_WITHOUT_MEANING: dict[str, Any] = {
    "label": None,
    "tokenizer_id": None,
    "rtfx": 0.0,
    "tag": None,
    "sharegpt_output_len": None,
    "server_info": None,
    "accept_length": None,
}


def bench_keys(
    records: Sequence[Record], settings: dict[str, Any], goodput: Goodput | None
) -> dict[str, Any]:
    """Make both harnesses' keys in one flat object.

    If the two have different names for a thing, we write both (``e2el`` is vLLM's, ``e2e_latency``
    SGLang's). Keys without a meaning here have their value for a text model without the feature. We
    have no tokenizer, so "retokenized" counts are the counted ones.
    """
    whole = [record for record in records if record.status == OK]
    seconds = measure_duration(records)
    per_second = 1 / seconds if seconds else 0.0
    prompt = sum(record.num_prompt_tokens for record in whole)
    output = sum(record.output_tokens for record in whole)
    latencies = collect_latencies(whole)
    keys: dict[str, Any] = {
        **settings,
        "duration": seconds,
        "completed": len(whole),
        "failed": sum(record.status == ERROR for record in records),
        "total_input_tokens": prompt,
        "total_input_text_tokens": prompt,
        "total_input_vision_tokens": 0,
        "total_output_tokens": output,
        "total_output_tokens_retokenized": output,
        "request_throughput": len(whole) * per_second,
        "request_goodput": None if goodput is None else goodput.good * per_second,
        "input_throughput": prompt * per_second,
        "output_throughput": output * per_second,
        "total_token_throughput": (prompt + output) * per_second,
        "total_throughput": (prompt + output) * per_second,
        "concurrency": sum(latencies["e2e"]) * per_second,
        "max_output_tokens_per_s": peak_tokens_per_second(whole),
        "max_concurrent_requests": peak_concurrency(whole),
        **_WITHOUT_MEANING,
    }
    for name, metric in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2el", "e2e")):
        keys |= _make_statistics(name, latencies[metric])
    keys |= _make_statistics("e2e_latency", latencies["e2e"])
    if settings.get("max_concurrency") is not None:
        keys |= _make_statistics("client_queue_time", [queue_time(record) for record in whole])
    keys["max_itl_ms"] = max(latencies["itl"], default=0.0) * 1e3
    return keys


def bench_details(records: Sequence[Record]) -> dict[str, Any]:
    """Make the lists that ``--save-detailed`` adds to the file, with an entry for each request
    except cancelled ones."""
    kept = [record for record in records if record.status in (OK, ERROR)]
    return {
        "input_lens": [record.num_prompt_tokens for record in kept],
        "output_lens": [record.output_tokens for record in kept],
        "ttfts": [record.ttft or 0.0 for record in kept],
        "itls": [record.gaps for record in kept],
        "latencies": [record.e2e or 0.0 for record in kept],
        "start_times": [record.sent for record in kept],
        "queue_times": [queue_time(record) for record in kept],
        "generated_texts": [record.text or "" for record in kept],
        "errors": [record.error or "" for record in kept],
    }


def queue_time(record: Record) -> float:
    """Return how long a request waited for one of ``--max-concurrency`` places, in seconds.

    Sessions of a closed loop follow each other and do not wait.
    """
    return 0.0 if record.scheduled is None else max(0.0, record.due - record.scheduled)


def _make_statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds or [0.0]) * 1e3
    statistics = {
        f"mean_{name}_ms": values.mean(),
        f"median_{name}_ms": np.median(values),
        f"std_{name}_ms": values.std(),
    }
    for percent in _PERCENTILES:
        statistics[f"p{percent:g}_{name}_ms"] = np.percentile(values, percent)
    return {key: float(value) for key, value in statistics.items()}


def peak_tokens_per_second(whole: Sequence[Record]) -> float:
    """Return the most output tokens within one second of the run."""
    buckets: dict[int, int] = {}
    for record in whole:
        for at, count in zip(record.times, record.tokens or [1] * len(record.times), strict=True):
            buckets[int(at)] = buckets.get(int(at), 0) + count
    return float(max(buckets.values(), default=0))


def peak_concurrency(whole: Sequence[Record]) -> int:
    """Return the most simultaneous requests. Like ``vllm bench serve``, count only whole
    answers."""
    changes = [(r.sent, 1) for r in whole] + [(r.end, -1) for r in whole if r.end is not None]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
