"""Replay a trace on a prefill and a decode node, fixed and elastic, and on two unified nodes.

    python benchmarks/trace_layouts.py --trace FILE --output FILE [--page FILE]
    python benchmarks/trace_layouts.py --trace FILE --output FILE --layouts split unified elastic \\
        --model llama-3.1-8b --device cuda --length-scale 1 --output-scale 1 \\
        --time-scales 1.5 1.2 1 --windows 900:960 1200:1260 --goodput ttft:1s+40us,itl:50 \\
        --kv-cache-tokens 60000 --node-flags load-format=dummy chunked-prefill-size=8192

`pd-launch cluster` starts all layouts together, so that the machine is the same for all, and they
are asked in turn, `--rounds` times. `--length-scale` shortens prompts and keeps their shared
prefixes. With `--device cuda` each layout has a node on GPU 0 and one on GPU 1. Caches are flushed
before each window of the trace.

Percentiles and shares of a round cover the requests of all its windows. Numbers are medians over
`runs` rounds in which the client was never the bottleneck; `void` counts the others. A failed
request meets no objective. On a CPU shared by all processes, figures show who waits for whom rather
than the speed of a GPU. `--page` also writes the report of the last valid round of each layout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from local_layouts import start_layouts  # noqa: E402

from pd.bench.load.goodput import Objectives, count_good  # noqa: E402
from pd.bench.load.measures import summarize_records  # noqa: E402
from pd.bench.load.records import read_records  # noqa: E402
from pd.bench.report import write_report  # noqa: E402
from pd.bench.shapes import model_directory  # noqa: E402

# Roles of the two nodes of each layout, and their own flags.
LAYOUTS: dict[str, tuple[tuple[str, str], dict[str, str]]] = {
    "split": (("prefill", "decode"), {}),
    "unified": (("unified", "unified"), {}),
    "unified-1024": (("unified", "unified"), {"chunked-prefill-size": "1024"}),
    "elastic": (("prefill", "decode"), {"elastic": "auto"}),
}
_LATENCIES = ("ttft", "second_token", "itl", "tpot", "e2e")
# Exit status of a run that the client limited.
_VOID = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--model", default="embedded", help="a directory or a name of pd-bench")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--node-flags", nargs="*", default=[], metavar="FLAG=VALUE")
    parser.add_argument("--proxy-flags", nargs="*", default=[], metavar="FLAG=VALUE")
    parser.add_argument("--windows", nargs="+", default=["900:1000"], help="seconds of the trace")
    parser.add_argument("--length-scale", default="1/32")
    parser.add_argument("--output-scale", default="1/4")
    parser.add_argument("--time-scales", nargs="+", default=["1.5"], help="above 1 is slower")
    parser.add_argument("--goodput", default="ttft:1s+1ms,tpot:25")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-tokens", type=int, default=65536, help="of each node")
    parser.add_argument("--logs", type=Path, help="keep logs and metrics of all processes here")
    parser.add_argument("--note", help="what else ran on the machine")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        runs = measure(args, Path(scratch))
        if args.page is not None:
            title = f"Trace on {'GPUs' if args.device == 'cuda' else 'a CPU'}"
            last = [
                f"{case.layout}-{case.time_scale}{window}={run}"
                for case, rounds in valid(runs).items()
                for window, run in zip(suffixes(args.windows), rounds[-1], strict=True)
            ]
            command = ["report", *last, "--output", str(args.page), "--title", title]
            subprocess.run([sys.executable, "-m", "pd.bench", *command], cwd=ROOT, check=True)
        rows = [row(case, runs[case], found, args.goodput) for case, found in valid(runs).items()]
    write_report(
        args.output,
        shlex.join(["python", "benchmarks/trace_layouts.py", *sys.argv[1:]]),
        rows,
        measured=["pd", "benchmarks/trace_layouts.py"],
        machine={"load_average_before": round(busy, 2)},
        note=args.note,
    )
    return 0


class Case(NamedTuple):
    """A layout under a load."""

    layout: str
    time_scale: str


# The directories of one round's windows.
Round = list[Path]


def valid(runs: dict[Case, list[Round]]) -> dict[Case, list[Round]]:
    """Keep the rounds in which the client was the bottleneck in no window."""
    found = {
        case: [each for each in rounds if all(summary(run)["valid"] for run in each)]
        for case, rounds in runs.items()
    }
    lacking = [f"{case.layout} at {case.time_scale}" for case, kept in found.items() if not kept]
    if lacking:
        raise SystemExit(f"the client was the bottleneck in every round of {', '.join(lacking)}")
    return found


def suffixes(windows: list[str]) -> list[str]:
    """Name the windows of a layout on the page; empty if there is only one."""
    return [f"-{window}" for window in windows] if len(windows) > 1 else [""]


def summary(run: Path) -> dict[str, Any]:
    """Read a run's summary."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def plan_layouts(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of every node, and the layouts, each with a node on each of two devices."""
    devices = ["cpu"] * 2 if args.device == "cpu" else ["cuda:0", "cuda:1"]
    layouts = {}
    for name in args.layouts:
        roles, own = LAYOUTS[name]
        nodes = [
            {"role": role, "device": device, "flags": own}
            for role, device in zip(roles, devices, strict=True)
        ]
        layouts[name] = {"nodes": nodes, "proxy": flags_of(args.proxy_flags)}
    shared = {"kv-cache-tokens": args.kv_cache_tokens} | flags_of(args.node_flags)
    if args.device == "cpu":
        shared["cpu-threads"] = 1
    return shared, layouts


def flags_of(given: list[str]) -> dict[str, Any]:
    """Parse flags given as NAME=VALUE."""
    return {name: yaml.safe_load(value) for name, _, value in (f.partition("=") for f in given)}


def measure(args: argparse.Namespace, scratch: Path) -> dict[Case, list[Round]]:
    """Run all rounds of every case. After an interrupt, return only time scales at which every
    layout has a round."""
    shared, layouts = plan_layouts(args)
    model, logs = str(model_directory(args.model)), args.logs or scratch / "logs"
    cases = [Case(name, scale) for scale in args.time_scales for name in args.layouts]
    found: dict[Case, list[Round]] = {case: [] for case in cases}
    with start_layouts(model, shared, layouts, logs) as running:
        try:
            for number in range(args.rounds):
                # The layout that goes first changes from round to round.
                for case in cases[:: -1 if number % 2 else 1]:
                    windows = []
                    for window in args.windows:
                        url = running.layouts[case.layout].proxy.url
                        httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
                        place = f"{case.layout}-{case.time_scale}-{window}-{number}"
                        directory = scratch / place.replace(":", "-").replace("/", "-")
                        ask(url, args, case.time_scale, window, directory)
                        running.children.check_alive()
                        windows.append(directory)
                    found[case].append(windows)
        except KeyboardInterrupt:
            found = complete(found)
            if not found:
                raise
            print(f"interrupted; complete: {', '.join(map(str, found))}", file=sys.stderr)
    return found


def complete(found: dict[Case, list[Round]]) -> dict[Case, list[Round]]:
    """Keep the cases of time scales at which none lacks a round."""
    lacking = {case.time_scale for case, rounds in found.items() if not rounds}
    return {case: rounds for case, rounds in found.items() if case.time_scale not in lacking}


def ask(url: str, args: argparse.Namespace, time_scale: str, window: str, directory: Path) -> None:
    """Run the trace once."""
    flags = {
        "--url": url,
        "--endpoint": "/generate",
        "--dataset-name": "trace",
        "--dataset-path": str(args.trace),
        "--trace-window": window,
        "--trace-length-scale": args.length_scale,
        "--trace-output-scale": args.output_scale,
        "--trace-time-scale": time_scale,
        "--goodput": args.goodput,
        "--output-dir": str(directory),
    }
    words = [word for pair in flags.items() for word in pair]
    command = [sys.executable, "-m", "pd.bench", "serve", *words]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status not in (0, _VOID):
        raise SystemExit(f"{shlex.join(command)} ended with status {status}")


def pooled(windows: Round, objectives: Objectives) -> dict[str, Any]:
    """Pool the measures of all windows.

    Rates and the duration are left out, because each window has its own clock.
    """
    records = [record for window in windows for record in read_records(window / "requests.jsonl")]
    found = summarize_records(records, count_good(records, objectives))
    kept = ("requests", "failed", "cached_share", "goodput", *(f"{name}_ms" for name in _LATENCIES))
    return {name: found[name] for name in kept}


def row(case: Case, rounds: list[Round], kept: list[Round], goodput: str) -> dict[str, Any]:
    """Make a row of medians over the kept rounds.

    Args:
        goodput: objectives, as for ``--goodput``.
    """
    summaries = [summary(window) for windows in kept for window in windows]
    measures = [pooled(windows, Objectives.parse(goodput)) for windows in kept]

    def middle(*keys: str) -> float | None:
        values = []
        for each in measures:
            value: Any = each
            for key in keys:
                value = value[key]
            values.append(value)
        return None if None in values else round(float(median(values)), 4)

    found: dict[str, Any] = {
        "layout": case.layout,
        "time_scale": case.time_scale,
        "runs": len(kept),
        "void": len(rounds) - len(kept),
        "client_lag_p99_ms": max(each["client"]["send_lag_p99_ms"] for each in summaries),
        "client_cpu": max(each["client"]["cpu_share"] for each in summaries),
        "requests": measures[0]["requests"],
        "failed": max(each["failed"] for each in measures),
        "cached_share": middle("cached_share"),
        "goodput_share": middle("goodput", "share"),
    }
    for name in (part.partition(":")[0] for part in re.split(r"[,\s]+", goodput) if part):
        shares = [share_that_met(name, measure["goodput"]) for measure in measures]
        found[f"{name}_share"] = round(median(shares), 4)
    for latency in _LATENCIES:
        for which in ("p50", "p90", "p99", "p99.9"):
            found[f"{latency}_{which}_ms"] = middle(f"{latency}_ms", which)
    return found


def share_that_met(objective: str, goodput: dict[str, Any]) -> float:
    """Return the share of requests that met one objective. Failed ones did not."""
    missed = goodput["missed"].get(objective, 0) + goodput["missed"].get("error", 0)
    return 1 - missed / goodput["counted"] if goodput["counted"] else 0.0


if __name__ == "__main__":
    sys.exit(main())
