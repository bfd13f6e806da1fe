"""Metrics of pd's proxy and its nodes over a run: their growth from before it to after it."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.bench.load.client import Fetch

_LINE = re.compile(
    r'^(pd_(?:proxy|transfer)_\w+)(?:\{(?:stage|backend)="([a-z_-]+)"\})? ([0-9.eE+-]+)$',
    re.MULTILINE,
)
_WORKER = re.compile(r'^pd_proxy_worker_up\{[^}]*url="(https?://[^"\s]+)"\} ', re.MULTILINE)
_MOST_WORKERS = 64
_STAGES = "pd_proxy_stage_seconds"
_TOTALS = {
    "prompt_tokens": "pd_proxy_prompt_tokens_total",
    "cached_tokens": "pd_proxy_cached_tokens_total",
    "output_tokens": "pd_proxy_output_tokens_total",
}
# Mean times of a transfer, by the nodes' names for them.
_TRANSFER_MEANS = ("reservation_wait", "wire", "exposed")
_TIMEOUT = 10.0
Samples = dict[tuple[str, str], float]
# Key for the number of nodes in a reading; no metric has this name.
_NODES_READ = ("", "")


def read_metrics(fetch: Fetch, base_url: str) -> Samples:
    """Read sums, counts and totals of a proxy by name and stage, and those of the transfers between
    its nodes by name and backend, if we reach all nodes. Return nothing for another server."""
    text = _fetch_metrics(fetch, base_url)
    if text is None:
        return {}  # the run's own measures are valid without the server's
    samples = parse_metrics(text)
    workers = list(dict.fromkeys(_WORKER.findall(text)))
    if len(workers) > _MOST_WORKERS:
        return samples
    total = Counter[tuple[str, str]]()
    for url in workers:
        text = _fetch_metrics(fetch, url)
        if text is None:
            return samples  # the sum over a part of the nodes would be wrong
        total.update(parse_metrics(text))
    samples[_NODES_READ] = len(workers)
    # Both ends of a transfer count it.
    return samples | {key: value / 2 for key, value in total.items()}


def _fetch_metrics(fetch: Fetch, url: str) -> str | None:
    try:
        status, text = fetch(f"{url}/metrics", timeout=_TIMEOUT)
    except SetupError:
        return None
    return text if status == 200 else None


def parse_metrics(text: str) -> Samples:
    return {(name, label): float(value) for name, label, value in _LINE.findall(text)}


def metrics_between(before: Mapping[Any, float], after: Mapping[Any, float]) -> dict[str, Any]:
    """Return tokens, mean time of each stage, and transfers by backend between two readings; empty
    without any of them."""
    growth = {key: value - before.get(key, 0.0) for key, value in after.items()}
    facts: dict[str, Any] = {
        name: growth[metric, ""] for name, metric in _TOTALS.items() if (metric, "") in growth
    }
    stages = {}
    for (name, stage), count in growth.items():
        if name == f"{_STAGES}_count" and count > 0:
            stages[stage] = round(growth.get((f"{_STAGES}_sum", stage), 0.0) / count * 1e3, 3)
    if stages:
        facts["stages_mean_ms"] = stages
    backends = []
    if before.get(_NODES_READ) == after.get(_NODES_READ):
        backends = [label for name, label in growth if name == "pd_transfer_bytes_total"]
    transfers = {backend: _describe_transfers(growth, backend) for backend in backends}
    if any(transfers.values()):
        facts["transfers"] = {backend: row for backend, row in transfers.items() if row}
    return facts


def _describe_transfers(growth: Mapping[Any, float], backend: str) -> dict[str, float]:
    """Describe the transfers over a backend; empty if there were none."""

    def grown(name: str) -> float:
        return growth.get((f"pd_transfer_{name}", backend), 0.0)

    count, num_bytes, wire = (
        grown(name) for name in ("wire_seconds_count", "bytes_total", "wire_seconds_sum")
    )
    if count <= 0:
        return {}
    row = {"count": count, "gigabytes": round(num_bytes / 1e9, 6)}
    if wire > 0:
        row["gigabytes_per_s"] = round(num_bytes / wire / 1e9, 6)
    for name in _TRANSFER_MEANS:
        if waits := grown(f"{name}_seconds_count"):
            row[f"{name}_mean_ms"] = round(grown(f"{name}_seconds_sum") / waits * 1e3, 3)
    return row
