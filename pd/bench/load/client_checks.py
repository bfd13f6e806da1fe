"""Checks that the client did not limit a run, because its results would not be the server's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.bench.load.records import CLIENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.client_load import ProcessLoad
    from pd.bench.load.processes import Run


@dataclass(frozen=True)
class ClientLimits:
    """Limits within which the client did not distort the results.

    Attributes:
        lag: seconds by which requests may be sent late and by which a process's event loop may be
            late, each as 99th percentile.
        cpu_share: share of one processor per process.
        clock_error: seconds by which the clock of another host may be wrong.
    """

    lag: float = 0.01
    cpu_share: float = 0.85
    clock_error: float = 0.005


def client_facts(run: Run) -> dict[str, Any]:
    """Collect facts about the client: the worst value over all load processes of each measured
    fact, the number of connections for which a host had no ports, descriptors or memory, and the
    failures by process."""
    lags = np.array([record.lag for record in run.records] or [0.0])
    facts: dict[str, Any] = {
        "processes": len(run.loads),
        "connections_without_resources": sum(r.error_kind == CLIENT for r in run.records),
        "send_lag_p99_ms": _round_ms(float(np.percentile(lags, 99))),
        "send_lag_max_ms": _round_ms(float(lags.max())),
        "loop_lag_p99_ms": _round_ms(_find_worst(run.loads, "loop_lag_p99")),
        "loop_lag_max_ms": _round_ms(_find_worst(run.loads, "loop_lag_max")),
        "cpu_share": round(_find_worst(run.loads, "cpu_share"), 3),
        "waiting_share": round(_find_worst(run.loads, "waiting_share"), 3),
    }
    if run.clock_errors:
        facts["clock_error_ms"] = _round_ms(max(run.clock_errors.values()))
    failures = {load.process: load.failure for load in run.loads if load.failure is not None}
    if failures:
        facts["failures"] = failures
    return facts


def client_complaints(facts: dict[str, Any], limits: ClientLimits) -> list[str]:
    """Return why a run does not count; empty if it does."""
    checks = [
        ("connections_without_resources", 0, "a host of load was full", "a higher ulimit -n"),
        ("send_lag_p99_ms", limits.lag * 1e3, "requests were sent late", "--max-client-lag-ms"),
        ("loop_lag_p99_ms", limits.lag * 1e3, "the event loop was late", "--max-client-lag-ms"),
        ("cpu_share", limits.cpu_share, "a load process was busy", "--max-client-cpu"),
        ("clock_error_ms", limits.clock_error * 1e3, "clocks differ", "a nearer load host"),
    ]
    failures = facts.get("failures", {}).items()
    return [f"load process {name} ended the run: {why}" for name, why in failures] + [
        f"{what}: {name} is {facts[name]:g}, the limit is {limit:g}; use more --processes or "
        f"hosts, less load, or {remedy}"
        for name, limit, what, remedy in checks
        if name in facts and facts[name] > limit
    ]


def _find_worst(loads: Sequence[ProcessLoad], name: str) -> float:
    return max((float(getattr(load, name)) for load in loads), default=0.0)


def _round_ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
