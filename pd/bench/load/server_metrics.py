"""Metrics of pd's proxy over a run: their values after it less those before."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.bench.load.client import Fetch

_LINE = re.compile(r'^(pd_proxy_\w+)(?:\{stage="([a-z_]+)"\})? ([0-9.eE+-]+)$', re.MULTILINE)
_STAGES = "pd_proxy_stage_seconds"
_TOTALS = {
    "prompt_tokens": "pd_proxy_prompt_tokens_total",
    "cached_tokens": "pd_proxy_cached_tokens_total",
    "output_tokens": "pd_proxy_output_tokens_total",
}
_TIMEOUT = 10.0
Samples = dict[tuple[str, str], float]


def read_metrics(fetch: Fetch, base_url: str) -> Samples:
    """Sums, counts and totals of a proxy by name and stage; empty for another server."""
    try:
        status, text = fetch(f"{base_url}/metrics", timeout=_TIMEOUT)
    except SetupError:
        return {}  # a run's own figures count without the server's
    return parse_metrics(text) if status == 200 else {}


def parse_metrics(text: str) -> Samples:
    return {(name, stage): float(value) for name, stage, value in _LINE.findall(text)}


def metrics_between(before: Mapping[Any, float], after: Mapping[Any, float]) -> dict[str, Any]:
    """Tokens, and mean time of each stage, between two readings; empty without any."""
    growth = {key: value - before.get(key, 0.0) for key, value in after.items()}
    found: dict[str, Any] = {
        name: growth[metric, ""] for name, metric in _TOTALS.items() if (metric, "") in growth
    }
    stages = {}
    for (name, stage), count in growth.items():
        if name == f"{_STAGES}_count" and count > 0:
            stages[stage] = round(growth.get((f"{_STAGES}_sum", stage), 0.0) / count * 1e3, 3)
    return found | ({"stages_mean_ms": stages} if stages else {})
