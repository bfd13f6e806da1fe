"""A trace of what a GPU does during some steps, for ``scripts/gpu_idle.py``."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pd.bench.engine_work import Bench, Workload

# Steps before the trace begins, those in it, and those that may pass while it starts and stops.
_PLAIN, _TRACED, _SPARE = 40, 20, 400
_SECONDS = 60.0


def prime() -> None:
    """Load the profiling library, before any CUDA graph is captured and outside every measurement.

    Raises UsageError without a GPU.
    """
    if not torch.cuda.is_available():
        raise UsageError("--profile traces GPU work; torch sees no CUDA device here")
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def profile_steps(bench: Bench, work: Workload, path: Path, command: str) -> str:
    """Write a Chrome trace of about 20 steps; returns what it holds.

    Its metadata ``pd_steps`` has the command, the work, the steps traced, and the median step with
    and without tracing in milliseconds (tracing every kernel of a CUDA graph costs time between
    them).

    Args:
        work: ``decode``, ``spec``, ``verify`` or ``mixed``.
        command: makes the trace again.

    Raises SetupError if the steps cannot be reached, and UsageError if the node drafts less.
    """
    bench.start_afresh()
    tracer = profile(activities=[ProfilerActivity.CUDA])
    if work.kind in ("verify", "mixed"):
        facts = _trace_steps(bench, work, tracer, command)
    else:
        with bench.drafting(work):
            facts = _trace_node(bench, work, tracer, command)
            bench.finish()
    tracer.export_chrome_trace(str(path))
    return f"{facts['steps']} steps of {work}"


def _trace_steps(bench: Bench, work: Workload, tracer: profile, command: str) -> dict[str, Any]:
    """Trace steps that are launched here."""
    run = bench.run_steps(work)
    run(_PLAIN)
    plain = run(_PLAIN)
    tracer.start()
    traced = run(_TRACED)
    return _stop(tracer, command, work, _TRACED, plain, traced)


def _trace_node(bench: Bench, work: Workload, tracer: profile, command: str) -> dict[str, Any]:
    """Trace steps of the node while it serves."""
    batch = work.count
    bench.start_decode(batch, work.num_in, _PLAIN + _TRACED + _SPARE, sampling=work.sampling)
    _wait(bench, batch, _PLAIN)
    tracer.start()
    before = len(bench.log.intervals(batch))
    _wait(bench, batch, before + _TRACED)
    intervals = [interval.seconds for interval in bench.log.intervals(batch)]
    untraced, during = intervals[:_PLAIN], intervals[before : before + _TRACED]
    plain, traced = statistics.median(untraced), statistics.median(during)
    return _stop(tracer, command, work, len(during), plain, traced)


def _stop(
    tracer: profile, command: str, work: Workload, steps: int, plain: float, traced: float
) -> dict[str, Any]:
    """End a trace of steps that took so many seconds before it and in it."""
    facts = {
        "command": command,
        "work": str(work),
        "steps": steps,
        "step_ms": plain * 1e3,
        "traced_step_ms": traced * 1e3,
    }
    # NOTE: the profiler takes this only while it traces.
    tracer.add_metadata_json("pd_steps", json.dumps(facts))
    tracer.stop()
    return facts


def _wait(bench: Bench, batch: int, count: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while len(bench.log.intervals(batch)) < count:
        if time.monotonic() > deadline or (bench.log.steps and bench.idle):
            raise SetupError(f"the sequences ended before step {count} of batch {batch}")
        time.sleep(0.01)
