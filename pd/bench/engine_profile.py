"""Traces GPU work during some steps, for ``scripts/gpu_idle.py``."""

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

# Steps before the trace, steps in the trace, and spare ones while it starts and stops.
_PLAIN, _TRACED, _SPARE = 40, 20, 400
_SECONDS = 60.0


def load_profiler() -> None:
    """Load the profiling library outside every measurement.

    Call it before any CUDA graph is captured. Raises UsageError without a GPU.
    """
    if not torch.cuda.is_available():
        raise UsageError("--profile traces GPU work; torch sees no CUDA device here")
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def profile_steps(bench: Bench, work: Workload, path: Path, command: str) -> str:
    """Write a Chrome trace of about 20 steps; return a description of it.

    The metadata ``pd_steps`` hold the command, the work, the number of steps, and the median step
    in milliseconds with and without tracing. We give both, because tracing each kernel of a CUDA
    graph costs time between them.

    Args:
        work: ``decode``, ``spec``, ``verify`` or ``mixed``.
        command: command to repeat the trace.

    Raises SetupError if the node does not reach the steps, and UsageError if it drafts less.
    """
    bench.start_afresh()
    tracer = profile(activities=[ProfilerActivity.CUDA])
    if work.kind in ("verify", "mixed"):
        run = bench.run_steps(work)
        run(_PLAIN)
        plain = run(_PLAIN)
        tracer.start()
        traced = run(_TRACED)
        facts = _stop_trace(tracer, command, work, _TRACED, plain, traced)
    else:
        with bench.limit_drafts(work):
            facts = _trace_node(bench, work, tracer, command)
            bench.wait_results()
    tracer.export_chrome_trace(str(path))
    return f"{facts['steps']} steps of {work}"


def _trace_node(bench: Bench, work: Workload, tracer: profile, command: str) -> dict[str, Any]:
    """Trace steps of the node while it serves requests."""
    batch = work.count
    bench.start_decode(batch, work.num_in, _PLAIN + _TRACED + _SPARE, sampling=work.sampling)
    _wait_for_steps(bench, batch, _PLAIN)
    tracer.start()
    before = len(bench.log.find_intervals(batch))
    _wait_for_steps(bench, batch, before + _TRACED)
    intervals = [interval.seconds for interval in bench.log.find_intervals(batch)]
    untraced, during = intervals[:_PLAIN], intervals[before : before + _TRACED]
    plain, traced = statistics.median(untraced), statistics.median(during)
    return _stop_trace(tracer, command, work, len(during), plain, traced)


def _stop_trace(
    tracer: profile, command: str, work: Workload, steps: int, plain: float, traced: float
) -> dict[str, Any]:
    """Stop the trace. ``plain`` and ``traced`` are the seconds of a step before it and in it."""
    facts = {
        "command": command,
        "work": str(work),
        "steps": steps,
        "step_ms": plain * 1e3,
        "traced_step_ms": traced * 1e3,
    }
    # NOTE: the profiler accepts metadata only while it traces.
    tracer.add_metadata_json("pd_steps", json.dumps(facts))
    tracer.stop()
    return facts


def _wait_for_steps(bench: Bench, batch: int, count: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while len(bench.log.find_intervals(batch)) < count:
        if time.monotonic() > deadline or (bench.log.steps and bench.is_idle):
            raise SetupError(f"the sequences ended before step {count} of batch {batch}")
        time.sleep(0.01)
