"""A recorded trace on a prefill and a decode node, fixed and elastic, and on two unified nodes.

    python benchmarks/trace_layouts.py --trace FILE --output FILE [--page FILE]
    python benchmarks/trace_layouts.py --trace FILE --output FILE --layouts split unified elastic \\
        --model llama-3.1-8b --device cuda --length-scale 1 --output-scale 1 \\
        --time-scales 1.5 1.2 1 --windows 900:960 1200:1260 --goodput ttft:1s+40us,itl:50 \\
        --kv-cache-tokens 60000 --node-flags load-format=dummy chunked-prefill-size=8192

The layouts are started together by `pd-launch cluster`'s file, so that the machine is the same for
all, and are asked in turn, `--rounds` times: windows of the trace, its prompts shortened by
`--length-scale` with their shared prefixes kept. With `--device cuda` each layout has a node on GPU
0 and one on GPU 1. The caches are flushed before each window. The windows of a round are pooled:
its percentiles and shares are those of the requests of all its windows together. Numbers are
medians over the rounds, `runs` of them, in which the client was not the bottleneck in any window;
`void` counts the others. A request that failed met no objective. A CPU that all processes share
says who waits for whom, not how fast a GPU is. `--page` also writes the report of the last valid
round of each layout.
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
sys.path[:0] = [str(ROOT)]

from pd.bench.load.goodput import Objectives, count_good  # noqa: E402
from pd.bench.load.measures import summarize  # noqa: E402
from pd.bench.load.records import read_records  # noqa: E402
from pd.bench.report import write_report  # noqa: E402
from pd.bench.shapes import model_directory  # noqa: E402
from pd.cluster.spec_file import load_spec  # noqa: E402
from pd.cluster.start import up  # noqa: E402

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
    """Rounds that count: those in which the client was the bottleneck in no window."""
    found = {
        case: [each for each in rounds if all(summary(run)["valid"] for run in each)]
        for case, rounds in runs.items()
    }
    lacking = [f"{case.layout} at {case.time_scale}" for case, kept in found.items() if not kept]
    if lacking:
        raise SystemExit(f"the client was the bottleneck in every round of {', '.join(lacking)}")
    return found


def suffixes(windows: list[str]) -> list[str]:
    """What tells the windows of a layout apart on the page; nothing if there is one."""
    return [f"-{window}" for window in windows] if len(windows) > 1 else [""]


def summary(run: Path) -> dict[str, Any]:
    """What a run has written about itself."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def deployment(args: argparse.Namespace) -> dict[str, Any]:
    """The file of the deployment: every layout has a node on each of two devices."""
    devices = ["cpu"] * 2 if args.device == "cpu" else ["cuda:0", "cuda:1"]
    layouts = {}
    for name in args.layouts:
        roles, own = LAYOUTS[name]
        nodes = [
            {"host": "here", "role": role, "devices": [device], "flags": own}
            for role, device in zip(roles, devices, strict=True)
        ]
        proxy = {"host": "here", "port": 0, "flags": flags_of(args.proxy_flags)}
        layouts[name] = {"nodes": nodes, "proxy": proxy}
    shared = {"kv-cache-tokens": args.kv_cache_tokens} | flags_of(args.node_flags)
    if args.device == "cpu":
        shared["cpu-threads"] = 1
    return {
        "model": str(model_directory(args.model)),
        "hosts": {"here": {"local": True}},
        "share_devices": True,
        "flags": shared,
        "layouts": layouts,
    }


def flags_of(given: list[str]) -> dict[str, Any]:
    """Flags given as NAME=VALUE."""
    return {name: yaml.safe_load(value) for name, _, value in (f.partition("=") for f in given)}


def measure(args: argparse.Namespace, scratch: Path) -> dict[Case, list[Round]]:
    """All rounds of every case. After an interrupt: those of the time scales at which every layout
    has one."""
    file = scratch / "layouts.yaml"
    file.write_text(yaml.safe_dump(deployment(args)))
    cases = [Case(name, scale) for scale in args.time_scales for name in args.layouts]
    found: dict[Case, list[Round]] = {case: [] for case in cases}
    with up(load_spec(file), file, logs=args.logs, report=print) as running:
        try:
            for number in range(args.rounds):
                # The layout that goes first changes from round to round.
                for case in cases[:: -1 if number % 2 else 1]:
                    windows = []
                    for window in args.windows:
                        url = running.layouts[case.layout].url
                        httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
                        place = f"{case.layout}-{case.time_scale}-{window}-{number}"
                        directory = scratch / place.replace(":", "-").replace("/", "-")
                        ask(url, args, case.time_scale, window, directory)
                        running.check()
                        windows.append(directory)
                    found[case].append(windows)
        except KeyboardInterrupt:
            found = complete(found)
            if not found:
                raise
            print(f"interrupted; complete: {', '.join(map(str, found))}", file=sys.stderr)
    return found


def complete(found: dict[Case, list[Round]]) -> dict[Case, list[Round]]:
    """The cases with a time scale at which none lacks a round."""
    lacking = {case.time_scale for case, rounds in found.items() if not rounds}
    return {case: rounds for case, rounds in found.items() if case.time_scale not in lacking}


def ask(url: str, args: argparse.Namespace, time_scale: str, window: str, directory: Path) -> None:
    """One run of the trace."""
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
    """Measures of the requests of all windows together.

    Rates and the duration are left out: each window has a clock of its own.
    """
    records = [record for window in windows for record in read_records(window / "requests.jsonl")]
    found = summarize(records, count_good(records, objectives))
    kept = ("requests", "failed", "cached_share", "goodput", *(f"{name}_ms" for name in _LATENCIES))
    return {name: found[name] for name in kept}


def row(case: Case, rounds: list[Round], kept: list[Round], goodput: str) -> dict[str, Any]:
    """Medians over the rounds that are kept. ``goodput``: objectives, as of ``--goodput``."""
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
    """Share of the requests that met one objective. Those that failed did not."""
    missed = goodput["missed"].get(objective, 0) + goodput["missed"].get("error", 0)
    return 1 - missed / goodput["counted"] if goodput["counted"] else 0.0


if __name__ == "__main__":
    sys.exit(main())
