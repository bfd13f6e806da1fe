"""A recorded trace on a prefill and a decode node, and on two unified nodes, on one machine.

    python benchmarks/trace_layouts.py --trace FILE --output FILE [--page FILE]

Both layouts of the embedded model are started together by `pd-launch cluster`'s file, so that the
machine is the same for both, and are asked in turn, `--rounds` times: a window of the trace, its
prompts shortened by `--length-scale` with their shared prefixes kept. The caches are flushed before
each run. Numbers are medians over the rounds in which the client was not the bottleneck; `void`
counts the others. A CPU that all processes share says who waits for whom, not how fast a GPU is.
`--page` also writes the report of the last valid round of each layout.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pd.bench.report import write_report  # noqa: E402
from pd.cluster.spec_file import load_spec  # noqa: E402
from pd.cluster.start import up  # noqa: E402
from pd.embedded import EMBEDDED_MODEL  # noqa: E402

_NODE = {"host": "here", "devices": ["cpu"]}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "split": [_NODE | {"role": "prefill"}, _NODE | {"role": "decode"}],
    "unified": [_NODE | {"role": "unified", "count": 2}],
}
_LATENCIES = ("ttft", "second_token", "itl", "tpot", "e2e")
# Exit status of a run that the client limited.
_VOID = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--window", default="900:1000", help="seconds of the trace")
    parser.add_argument("--length-scale", default="1/32")
    parser.add_argument("--output-scale", default="1/4")
    parser.add_argument("--time-scale", default="1.5", help="above 1 is slower")
    parser.add_argument("--goodput", default="ttft:1s+1ms,tpot:25")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-tokens", type=int, default=65536, help="of each node")
    parser.add_argument("--note", help="what else ran on the machine")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        runs = measure(args, Path(scratch))
        if args.page is not None:
            last = [f"{name}={found[-1]}" for name, found in valid(runs).items()]
            command = ["report", *last, "--output", str(args.page), "--title", "Trace on a CPU"]
            subprocess.run([sys.executable, "-m", "pd.bench", *command], cwd=ROOT, check=True)
        rows = [row(name, runs[name], found) for name, found in valid(runs).items()]
    write_report(
        args.output,
        shlex.join(["python", "benchmarks/trace_layouts.py", *sys.argv[1:]]),
        rows,
        measured=["pd", "benchmarks/trace_layouts.py"],
        machine={"load_average_before": round(busy, 2)},
        note=args.note,
    )
    return 0


def valid(runs: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Directories of the runs that count, by layout."""
    found = {name: [run for run in all_ if summary(run)["valid"]] for name, all_ in runs.items()}
    lacking = [name for name, kept in found.items() if not kept]
    if lacking:
        raise SystemExit(f"the client was the bottleneck in every run of {', '.join(lacking)}")
    return found


def summary(run: Path) -> dict[str, Any]:
    """What a run has written about itself."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, list[Path]]:
    """Directories of all runs, by layout."""
    proxy = {"host": "here", "port": 0}
    spec = {
        "model": str(EMBEDDED_MODEL),
        "hosts": {"here": {"local": True}},
        "flags": {"cpu-threads": 1, "kv-cache-tokens": args.kv_cache_tokens},
        "layouts": {name: {"nodes": nodes, "proxy": proxy} for name, nodes in LAYOUTS.items()},
    }
    file = scratch / "layouts.yaml"
    file.write_text(yaml.safe_dump(spec))
    found: dict[str, list[Path]] = {name: [] for name in LAYOUTS}
    with up(load_spec(file), file, report=print) as running:
        for number in range(args.rounds):
            # The layout that goes first changes from round to round.
            for name in sorted(LAYOUTS, reverse=number % 2 == 1):
                url = running.layouts[name].url
                httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
                directory = scratch / f"{name}-{number}"
                ask(url, args, directory)
                running.check()
                found[name].append(directory)
    return found


def ask(url: str, args: argparse.Namespace, directory: Path) -> None:
    """One run of the trace."""
    flags = {
        "--url": url,
        "--endpoint": "/generate",
        "--dataset-name": "trace",
        "--dataset-path": str(args.trace),
        "--trace-window": args.window,
        "--trace-length-scale": args.length_scale,
        "--trace-output-scale": args.output_scale,
        "--trace-time-scale": args.time_scale,
        "--goodput": args.goodput,
        "--output-dir": str(directory),
    }
    words = [word for pair in flags.items() for word in pair]
    command = [sys.executable, "-m", "pd.bench", "serve", *words]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status not in (0, _VOID):
        raise SystemExit(f"{shlex.join(command)} ended with status {status}")


def row(name: str, runs: list[Path], kept: list[Path]) -> dict[str, Any]:
    """Medians over the runs of a layout that are kept."""
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
        "layout": name,
        "runs": len(kept),
        "void": len(runs) - len(kept),
        "client_lag_p99_ms": max(each["client"]["send_lag_p99_ms"] for each in summaries),
        "client_cpu": max(each["client"]["cpu_share"] for each in summaries),
        "requests": measures[0]["requests"],
        "failed": max(each["failed"] for each in measures),
        "cached_share": middle("cached_share"),
        "goodput_share": middle("goodput", "share"),
    }
    for latency in _LATENCIES:
        for which in ("p50", "p90", "p99"):
            found[f"{latency}_{which}_ms"] = middle(f"{latency}_ms", which)
    return found


if __name__ == "__main__":
    sys.exit(main())
