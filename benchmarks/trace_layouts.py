"""A recorded trace on a prefill and a decode node, and on two unified nodes, on one machine.

    python benchmarks/trace_layouts.py --trace FILE --output FILE [--page FILE]

Both layouts of the embedded model are started together by `pd-launch cluster`'s file, so that the
machine is the same for both, and are asked in turn, `--rounds` times: a window of the trace, its
prompts shortened by `--length-scale` with their shared prefixes kept. The caches are flushed before
each run. Numbers are medians over the rounds. A CPU that all processes share says who waits for
whom, not how fast a GPU is. `--page` also writes the report of the last round.
"""

from __future__ import annotations

import argparse
import json
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--window", default="120:170", help="seconds of the trace")
    parser.add_argument("--length-scale", default="1/32")
    parser.add_argument("--output-scale", default="1/4")
    parser.add_argument("--time-scale", default="1.5", help="above 1 is slower")
    parser.add_argument("--goodput", default="ttft:1s+1ms,tpot:25")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measures = measure(args, Path(scratch))
        if args.page is not None:
            last = [f"{name}={scratch}/{name}-{args.rounds - 1}" for name in LAYOUTS]
            command = ["report", *last, "--output", str(args.page), "--title", "Trace on a CPU"]
            subprocess.run([sys.executable, "-m", "pd.bench", *command], cwd=ROOT, check=True)
    rows = [row(name, found) for name, found in measures.items()]
    command = shlex.join(["python", "benchmarks/trace_layouts.py", *sys.argv[1:]])
    write_report(args.output, command, rows, measured=["pd", "benchmarks/trace_layouts.py"])
    return 0


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, list[dict[str, Any]]]:
    """Measures of each run, by layout."""
    proxy = {"host": "here", "port": 0}
    spec = {
        "model": str(EMBEDDED_MODEL),
        "hosts": {"here": {"local": True}},
        "flags": {"cpu-threads": 1, "kv-cache-tokens": 32768},
        "layouts": {name: {"nodes": nodes, "proxy": proxy} for name, nodes in LAYOUTS.items()},
    }
    file = scratch / "layouts.yaml"
    file.write_text(yaml.safe_dump(spec))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}
    with up(load_spec(file), file, report=print) as running:
        for number in range(args.rounds):
            # The layout that goes first changes from round to round.
            for name in sorted(LAYOUTS, reverse=number % 2 == 1):
                url = running.layouts[name].url
                httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
                directory = scratch / f"{name}-{number}"
                ask(url, args, directory)
                running.check()
                summary = json.loads((directory / "summary.json").read_text())
                found[name].append(summary["measures"])
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
    subprocess.run([sys.executable, "-m", "pd.bench", "serve", *words], cwd=ROOT, check=True)


def row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of a layout."""

    def middle(*ways: str) -> float:
        values = []
        for run in runs:
            value: Any = run
            for step in ways:
                value = value[step]
            values.append(float(value))
        return round(median(values), 4)

    found: dict[str, Any] = {
        "layout": name,
        "requests": runs[0]["requests"],
        "failed": max(run["failed"] for run in runs),
        "cached_share": middle("cached_share"),
        "goodput_share": middle("goodput", "share"),
    }
    for latency in _LATENCIES:
        for which in ("p50", "p90", "p99"):
            found[f"{latency}_{which}_ms"] = middle(f"{latency}_ms", which)
    return found


if __name__ == "__main__":
    sys.exit(main())
