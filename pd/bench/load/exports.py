"""Results under the keys that scripts for `vllm bench serve` and SGLang's bench_serving read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pd.bench.load.measures import duration, latencies
from pd.bench.load.records import ERROR, OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.goodput import Goodput
    from pd.bench.load.records import Record

_PERCENTILES = (50, 90, 95, 99, 99.9)
# vLLM: a label, a tokenizer, and speed against a recording's length. SGLang: a tag, the length of a
# data set's answers, the server about itself, and its acceptance length under speculation.
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
    """Both harnesses' keys in one flat object.

    Where the two have different names for a thing both are there (``e2el`` is vLLM's,
    ``e2e_latency`` SGLang's). What has no meaning here has the value that it has there for a text
    model without it: there is no tokenizer, so "retokenized" counts are the counted ones.
    """
    whole = [record for record in records if record.status == OK]
    seconds = duration(records)
    per_second = 1 / seconds if seconds else 0.0
    prompt = sum(record.num_prompt_tokens for record in whole)
    output = sum(record.output_tokens for record in whole)
    found = latencies(whole)
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
        "concurrency": sum(found["e2e"]) * per_second,
        "max_output_tokens_per_s": peak_tokens_per_second(whole),
        "max_concurrent_requests": peak_concurrency(whole),
        **_WITHOUT_MEANING,
    }
    for name, metric in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2el", "e2e")):
        keys |= _statistics(name, found[metric])
    keys |= _statistics("e2e_latency", found["e2e"])
    if settings.get("max_concurrency") is not None:
        keys |= _statistics("client_queue_time", [queue_time(record) for record in whole])
    keys["max_itl_ms"] = max(found["itl"], default=0.0) * 1e3
    return keys


def bench_details(records: Sequence[Record]) -> dict[str, Any]:
    """Lists by request, which ``--save-detailed`` adds to the file: an entry for each request that
    was not cancelled."""
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
    """Seconds for which a request waited for one of ``--max-concurrency`` places.

    A session of a closed loop follows another and does not wait.
    """
    return 0.0 if record.scheduled is None else max(0.0, record.due - record.scheduled)


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds or [0.0]) * 1e3
    found = {
        f"mean_{name}_ms": values.mean(),
        f"median_{name}_ms": np.median(values),
        f"std_{name}_ms": values.std(),
    }
    for percent in _PERCENTILES:
        found[f"p{percent:g}_{name}_ms"] = np.percentile(values, percent)
    return {key: float(value) for key, value in found.items()}


def peak_tokens_per_second(whole: Sequence[Record]) -> float:
    """Most output tokens within one second of the run."""
    buckets: dict[int, int] = {}
    for record in whole:
        for at, count in zip(record.times, record.tokens or [1] * len(record.times), strict=True):
            buckets[int(at)] = buckets.get(int(at), 0) + count
    return float(max(buckets.values(), default=0))


def peak_concurrency(whole: Sequence[Record]) -> int:
    """Most requests that ran at one time. Only whole answers count, as in ``vllm bench serve``."""
    changes = [(r.sent, 1) for r in whole] + [(r.end, -1) for r in whole if r.end is not None]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
