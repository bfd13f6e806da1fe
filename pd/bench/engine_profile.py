"""A trace of what a GPU does during some decode steps, for ``scripts/gpu_idle.py``."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pd.bench.engine_work import Bench

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


def profile_decode(bench: Bench, batch: int, context: int, path: Path) -> str:
    """Write a Chrome trace of about 20 steps of ``batch`` sequences; returns what it holds.

    Its metadata ``pd_decode`` has the batch, the steps traced, and the median step with and without
    tracing in milliseconds (tracing every kernel of a CUDA graph costs time between them).

    Raises SetupError if the steps cannot be reached.
    """
    bench.start_afresh()
    bench.start_decode(batch, context, _PLAIN + _TRACED + _SPARE)
    _wait(bench, batch, _PLAIN)
    tracer = profile(activities=[ProfilerActivity.CUDA])
    tracer.start()
    before = len(bench.log.intervals(batch))
    _wait(bench, batch, before + _TRACED)
    intervals = bench.log.intervals(batch)
    plain, traced = intervals[:_PLAIN], intervals[before : before + _TRACED]
    facts = {
        "batch": batch,
        "steps": len(traced),
        "step_ms": statistics.median(i.seconds for i in plain) * 1e3,
        "traced_step_ms": statistics.median(i.seconds for i in traced) * 1e3,
    }
    # NOTE: the profiler takes this only while it traces.
    tracer.add_metadata_json("pd_decode", json.dumps(facts))
    tracer.stop()
    bench.finish()
    tracer.export_chrome_trace(str(path))
    return f"{len(traced)} steps of batch {batch}"


def _wait(bench: Bench, batch: int, count: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while len(bench.log.intervals(batch)) < count:
        if time.monotonic() > deadline or (bench.log.steps and bench.idle):
            raise SetupError(f"the sequences ended before step {count} of batch {batch}")
        time.sleep(0.01)
