"""A recorded trace on a prefill and a decode node, fixed and elastic, and on two unified nodes.

    python benchmarks/trace_layouts.py --trace FILE --output FILE [--page FILE]
    python benchmarks/trace_layouts.py --trace FILE --output FILE --layouts split unified elastic \\
        --model llama-3.1-8b --device cuda --length-scale 1 --output-scale 1 \\
        --time-scales 1.5 1.2 1 --windows 900:960 1200:1260 --goodput ttft:1s+40us,itl:50 \\
        --kv-cache-tokens 60000 --node-flags load-format=dummy chunked-prefill-size=8192

The layouts are started together by `pd-launch cluster`'s file, so that the machine is the same for
all, and are asked in turn, `--rounds` times: windows of the trace, its prompts shortened by
`--length-scale` with their shared prefixes kept. With `--device cuda` each layout has a node on GPU
0 and one on GPU 1. The caches are flushed before each run. Numbers are medians over the rounds in
which the client was not the bottleneck; `void` counts the others. A CPU that all processes share
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
            last = [f"{case.layout}-{case.time_scale}={f[-1]}" for case, f in valid(runs).items()]
            command = ["report", *last, "--output", str(args.page), "--title", title]
            subprocess.run([sys.executable, "-m", "pd.bench", *command], cwd=ROOT, check=True)
        named = [part.partition(":")[0] for part in re.split(r"[,\s]+", args.goodput)]
        rows = [row(case, runs[case], found, named) for case, found in valid(runs).items()]
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


def valid(runs: dict[Case, list[Path]]) -> dict[Case, list[Path]]:
    """Directories of the runs that count."""
    found = {case: [run for run in all_ if summary(run)["valid"]] for case, all_ in runs.items()}
    lacking = [f"{case.layout} at {case.time_scale}" for case, kept in found.items() if not kept]
    if lacking:
        raise SystemExit(f"the client was the bottleneck in every run of {', '.join(lacking)}")
    return found


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


def measure(args: argparse.Namespace, scratch: Path) -> dict[Case, list[Path]]:
    """Directories of all runs."""
    file = scratch / "layouts.yaml"
    file.write_text(yaml.safe_dump(deployment(args)))
    cases = [Case(name, scale) for scale in args.time_scales for name in args.layouts]
    found: dict[Case, list[Path]] = {case: [] for case in cases}
    with up(load_spec(file), file, logs=args.logs, report=print) as running:
        for number in range(args.rounds):
            # The layout that goes first changes from round to round.
            for case in cases[:: -1 if number % 2 else 1]:
                for window in args.windows:
                    url = running.layouts[case.layout].url
                    httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
                    place = f"{case.layout}-{case.time_scale}-{window}-{number}"
                    directory = scratch / place.replace(":", "-").replace("/", "-")
                    ask(url, args, case.time_scale, window, directory)
                    running.check()
                    found[case].append(directory)
    return found


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


def row(case: Case, runs: list[Path], kept: list[Path], objectives: list[str]) -> dict[str, Any]:
    """Medians over the runs that are kept. ``objectives``: names of ``--goodput``."""
    summaries = [summary(run) for run in kept]
    measures = [each["measures"] for each in summaries]

    def middle(*keys: str) -> float:
        values = []
        for each in measures:
            value: Any = each
            for key in keys:
                value = value[key]
            values.append(float(value))
        return round(median(values), 4)

    found: dict[str, Any] = {
        "layout": case.layout,
        "time_scale": case.time_scale,
        "runs": len(kept),
        "void": len(runs) - len(kept),
        "client_lag_p99_ms": max(each["client"]["send_lag_p99_ms"] for each in summaries),
        "client_cpu": max(each["client"]["cpu_share"] for each in summaries),
        "requests": measures[0]["requests"],
        "failed": max(each["failed"] for each in measures),
        "cached_share": middle("cached_share"),
        "goodput_share": middle("goodput", "share"),
    }
    for objective in objectives:
        goodputs = [measure["goodput"] for measure in measures]
        missed = [each["missed"].get(objective, 0) / each["counted"] for each in goodputs]
        found[f"{objective}_share"] = round(1 - median(missed), 4)
    for latency in _LATENCIES:
        for which in ("p50", "p90", "p99", "p99.9"):
            found[f"{latency}_{which}_ms"] = middle(f"{latency}_ms", which)
    return found


if __name__ == "__main__":
    sys.exit(main())
