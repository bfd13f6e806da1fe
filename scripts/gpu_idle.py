"""Show how long a GPU was idle between steps, and which kernels took the rest, from a trace.

    pd-bench engine --model llama-3.1-8b --work decode:64 --profile trace.json
    python scripts/gpu_idle.py trace.json

To trace other steps, use ``--profile-work``. The trace is torch.profiler's. The GPU is idle while
no kernel, copy or fill runs on it, between the first and the last of them. A step ends with the
copy of its tokens to the host.

Tracing every kernel of a CUDA graph takes time between kernels. We therefore also print the idle
share that follows from the same busy time and the step's time without tracing. The exit status is 1
if the trace's idle share exceeds --limit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import statistics
import sys
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LONG_GAP_US = 5.0


@dataclass(frozen=True)
class Span:
    """Something that ran on a GPU, from ``begin`` to ``end`` in microseconds."""

    name: str
    begin: float
    end: float


def read_trace(path: Path) -> tuple[list[Span], dict[str, Any]]:
    """Read spans, ordered by their start, and the notes of ``pd-bench engine`` about the steps.

    The notes are empty for traces of other programs. Ends the program if the trace has no GPU work,
    or that of several GPUs.
    """
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    events = [e for e in trace["traceEvents"] if e.get("cat") in CATEGORIES and "dur" in e]
    devices = {event.get("args", {}).get("device", 0) for event in events}
    if len(devices) != 1:
        raise SystemExit(f"{path} holds work of {len(devices)} GPUs, not of one")
    spans = [Span(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events]
    return sorted(spans, key=lambda span: span.begin), trace.get("pd_steps", {})


def gaps(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return idle intervals between the first start and the last end, in microseconds."""
    found = []
    reached: float | None = None
    for span in spans:
        if reached is not None and span.begin > reached:
            found.append((reached, span.begin))
        reached = span.end if reached is None else max(reached, span.end)
    return found


def step_ends(spans: list[Span], steps: int | None) -> list[float]:
    """Return the ends of the copies of tokens to the host; empty unless there is one per step. (A
    trace ends a few steps later than requested.)"""
    ends = sorted(span.end for span in spans if span.name.startswith("Memcpy DtoH"))
    if steps is not None and not steps - 2 <= len(ends) <= 1.5 * steps:
        return []
    return ends


def idle_by_step(idle: list[tuple[float, float]], ends: list[float]) -> list[float]:
    """Return the idle share of each whole step."""
    lost = [0.0] * (len(ends) + 1)
    for begin, end in idle:
        lost[bisect_right(ends, begin)] += end - begin
    lengths = [after - before for before, after in pairwise(ends)]
    return [gap / length for gap, length in zip(lost[1:-1], lengths, strict=True) if length > 0]


def summarize(spans: list[Span], facts: dict[str, Any]) -> dict[str, Any]:
    """Return milliseconds and shares."""
    idle = gaps(spans)
    lengths = [end - begin for begin, end in idle]
    span_us = max(span.end for span in spans) - spans[0].begin
    busy_us = span_us - sum(lengths)
    summary: dict[str, Any] = {
        **facts,
        "traced_ms": round(span_us / 1e3, 3),
        "idle_ms": round(sum(lengths) / 1e3, 3),
        "idle_share": round(sum(lengths) / span_us, 4),
        "idle_share_in_long_gaps": round(sum(g for g in lengths if g > LONG_GAP_US) / span_us, 4),
        "longest_gap_us": round(max(lengths, default=0.0), 1),
    }
    ends = step_ends(spans, facts.get("steps"))
    if len(ends) > 2:
        shares = idle_by_step(idle, ends)
        summary["steps_seen"] = len(shares)
        summary["idle_share_of_median_step"] = round(statistics.median(shares), 4)
        summary["idle_share_of_worst_step"] = round(max(shares), 4)
        step_us = (ends[-1] - ends[0]) / (len(ends) - 1)
        if "step_ms" in facts:
            busy_step = step_us * busy_us / span_us / 1e3
            summary["idle_share_without_tracing"] = round(1 - busy_step / facts["step_ms"], 4)
    return summary


def by_name(spans: list[Span], count: int) -> list[dict[str, Any]]:
    """Return the names of the spans that took most of the time."""
    times: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[span.name].append(span.end - span.begin)
    whole = sum(sum(values) for values in times.values())
    order = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        {
            "kernel": name if len(name) <= 90 else name[:87] + "...",
            "launches": len(values),
            "median_us": round(statistics.median(values), 2),
            "total_ms": round(sum(values) / 1e3, 3),
            "share_of_busy_rate": sum(values) / whole,
        }
        for name, values in order[:count]
    ]


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--top", type=int, default=20, help="kernels to show (default: 20)")
    parser.add_argument("--limit", type=float, default=0.03, help="bar (default: 0.03)")
    parser.add_argument("--output", type=Path, help="result file (JSON)")
    args = parser.parse_args(given)
    spans, facts = read_trace(args.trace)
    summary = summarize(spans, facts)
    rows = by_name(spans, args.top)
    for row in rows:
        print(
            f"{row['total_ms']:9.3f} ms {row['share_of_busy_rate']:6.1%} {row['launches']:6} x "
            f"{row['median_us']:8.2f} us  {row['kernel']}"
        )
    print(", ".join(f"{name} {value}" for name, value in summary.items()))
    met = summary["idle_share"] <= args.limit
    print(f"idle {summary['idle_share']:.2%}, at most {args.limit:.2%}: {'yes' if met else 'NO'}")
    if args.output is not None:
        from pd.bench.report import write_report

        command = shlex.join(["python", "scripts/gpu_idle.py", *given])
        write_report(args.output, command, rows, measured=["pd", "scripts"], settings=summary)
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
