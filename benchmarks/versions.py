"""Compare the speed of commits: `pd-bench` of several checkouts, in turns.

    git worktree add /tmp/before d99c377
    python benchmarks/versions.py --version before=/tmp/before --version now=. --devices cuda:0 \\
        --engine "--model llama-3.1-8b --work decode:1,64 prefill:8192" --output FILE
    python benchmarks/versions.py --version before=/tmp/before --version now=. \\
        --transfer "--backend nvlink --device cuda:0,cuda:1 --tokens 8192"

Each version runs in its own processes, with its checkout first on `PYTHONPATH` and the installed
packages of this interpreter. In every round each version runs once on every device. Each round
starts with another version, so drift hits all of them. With several devices versions run at the
same time, one on each; transfers run alone. A row has each version's median over all rounds, the
spread of the middle half of its runs, and the ratio of the last version's median to each other's.
Times are in milliseconds, transfers in GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pd.bench.report import write_report  # noqa: E402

# Seconds after which a run is ended.
_LIMIT = 300
# (name of a figure, name of a version) -> its value in each run.
Runs = dict[tuple[str, str], list[float]]


def run(checkout: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Return the rows of one run of a checkout's ``pd-bench``.

    Raises:
        RuntimeError: it failed; the message has its last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pd.bench", *arguments, "--output", str(report)]
        search = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": search}
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=_LIMIT
        )
        if done.returncode:
            last = "\n".join(done.stderr.splitlines()[-5:])
            raise RuntimeError(f"{checkout}: {shlex.join(command)} failed:\n{last}")
        rows: list[dict[str, Any]] = json.loads(report.read_text())["results"]
        return rows


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return a run's figures by name. Transfers sent in portions once had no name."""
    found = {}
    for row in rows:
        if "work" in row:
            found[row["work"]] = row["median_ms"]
        else:
            name = f"{row['backend']} {row['model']} {row.get('pattern', 'groups')}"
            found[f"{name} GB/s"] = row["gb_s"]
            found[f"{name} share of {row['ceiling']}"] = row["share_of_ceiling_rate"]
    return found


def rotated(versions: dict[str, Path], by: int) -> list[str]:
    """Return the versions' names, starting with another one in each round."""
    names = list(versions)
    by %= len(names)
    return names[by:] + names[:by]


def measure_engines(
    versions: dict[str, Path], arguments: list[str], devices: list[str], rounds: int, runs: Runs
) -> None:
    """Add every round of every version on every device to ``runs``."""

    ended = threading.Event()

    def lane(index: int) -> None:
        for turn in range(rounds):
            for name in rotated(versions, turn + index):
                if ended.is_set():
                    return
                rows = run(versions[name], ["engine", *arguments, "--device", devices[index]])
                found = figures(rows)
                for figure, value in found.items():
                    runs[figure, name].append(value)
                print(f"{devices[index]}, round {turn + 1}, {name}: {found}", flush=True)

    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            list(pool.map(lane, range(len(devices))))
        finally:
            ended.set()  # an interrupt comes here; the other lanes need not finish


def measure_transfers(
    versions: dict[str, Path], arguments: list[str], rounds: int, runs: Runs
) -> None:
    """Add every round of every version, one after the other, to ``runs``."""
    for turn in range(rounds):
        for name in rotated(versions, turn):
            found = figures(run(versions[name], ["transfer", *arguments]))
            for figure, value in found.items():
                runs[figure, name].append(value)
            print(f"round {turn + 1}, {name}: {found}", flush=True)


def summarize(runs: Runs, versions: list[str]) -> list[dict[str, Any]]:
    """Make a row for each figure of all versions."""
    rows = []
    for figure in dict.fromkeys(figure for figure, _ in runs):
        values = {name: runs[figure, name] for name in versions if (figure, name) in runs}
        if len(values) < len(versions):
            continue
        row: dict[str, Any] = {"figure": figure, "runs": len(values[versions[-1]])}
        medians = {name: statistics.median(each) for name, each in values.items()}
        for name, each in values.items():
            quarters = statistics.quantiles(each, n=4) if len(each) > 1 else [0.0, 0.0, 0.0]
            row[name] = medians[name]
            row[f"{name}_spread_rate"] = (quarters[2] - quarters[0]) / medians[name]
        for name in versions[:-1]:
            row[f"{versions[-1]}_by_{name}"] = medians[versions[-1]] / medians[name]
        rows.append(row)
    return rows


def main() -> None:
    """Measure the versions in turns, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--version", action="append", required=True, metavar="NAME=DIR", help="repeat it"
    )
    parser.add_argument("--engine", metavar="FLAGS", help="of pd-bench engine, without --device")
    parser.add_argument("--transfer", metavar="FLAGS", help="of pd-bench transfer")
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="of the engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    versions = {}
    for each in args.version:
        name, equals, folder = each.partition("=")
        if not equals or not (Path(folder) / "pd").is_dir():
            parser.error(f"--version {each}: NAME=DIR, and DIR has the folder pd")
        versions[name] = Path(folder).resolve()
    runs: Runs = defaultdict(list)
    note = None
    try:
        if args.engine is not None:
            measure_engines(versions, shlex.split(args.engine), args.devices, args.rounds, runs)
        if args.transfer is not None:
            measure_transfers(versions, shlex.split(args.transfer), args.rounds, runs)
    except KeyboardInterrupt:
        note = "interrupted, so that the last round is not complete"
    rows = summarize(runs, list(versions))
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if args.output is not None:
        command = shlex.join(["python", "benchmarks/versions.py", *sys.argv[1:]])
        write_report(args.output, command, rows, measured=["pd"], note=note)


if __name__ == "__main__":
    main()
