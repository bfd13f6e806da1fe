"""`pd-bench compare`: is this version faster than that one?

Give two result files, or two directories with one file per run; we pair runs in the order of their
names. A run under load (`pd-bench serve --output-dir`) is its `summary.json` or the directory with
that file, and several runs are a directory of such directories. We reject a run limited by the
client. With `--against COMMIT` it measures instead: the benchmark after `--` runs on that commit
and on this tree in turn, so other work on the machine hits both.

Each measure gets a verdict from the ratios of its pairs: `faster` or `slower` if the median differs
by more than the margin and its 90 % interval (sign test) lies on that side of 1, `same` if the
interval lies within the margin, otherwise `unclear`. Numbers that are the same in every run are
`equal`. Other numbers are `changed` if their name does not say which direction is better.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd.bench.page.runs import why_partial
from pd.bench.paired import LEAST_PAIRS, compare_runs
from pd.bench.report import ROOT
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from pd.bench.paired import Comparison

_SUMMARY = "summary.json"
EXAMPLES = """\
examples:
  pd-bench compare before.json after.json
  pd-bench compare runs-before/ runs-after/
  pd-bench compare out/unified out/split     # of pd-bench serve --output-dir
  pd-bench compare --against HEAD~1 --pairs 9 -- radix --rounds 3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s BEFORE AFTER | --against COMMIT [--pairs N] -- BENCHMARK [flags]"
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("what", nargs="*", metavar="BEFORE AFTER", help="result files or directories of them")
    add("--against", metavar="COMMIT", help="measure this commit and the present tree in turn")
    add("--pairs", type=int, default=7, metavar="N", help="runs of each")
    add("--margin", type=float, default=0.02, help="a smaller difference counts as none")
    add(
        "--keep",
        type=Path,
        metavar="DIR",
        help="with --against: keep the result files in this new or empty directory",
    )
    add("--fail-on-slower", action="store_true", help="exit with status 1 if anything is slower")


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    if not 0 <= args.margin < 1:
        raise UsageError(f"--margin must be at least 0 and below 1, not {args.margin:g}")
    if args.against is None:
        if len(args.what) != 2:
            raise UsageError(
                f"give BEFORE and AFTER, or --against; {len(args.what)} names were given"
            )
        before, after = (read_runs(Path(name)) for name in args.what)
    else:
        before, after = _measure_trees(args)
    if len(before) != len(after):
        raise UsageError(
            f"runs are compared in pairs, but there are {len(before)} before and {len(after)} after"
        )
    comparisons = compare_runs(before, after, args.margin)
    if not comparisons:
        raise UsageError("the results have no measure in common: they are of different benchmarks")
    show_comparisons(comparisons)
    if len(before) < LEAST_PAIRS:
        print(f"{len(before)} pairs prove nothing; give {LEAST_PAIRS} or more for verdicts")
    is_slower = any(each.verdict == "slower" for each in comparisons)
    return 1 if is_slower and args.fail_on_slower else 0


def read_runs(path: Path) -> list[list[dict[str, Any]]]:
    """Read the rows of each result file. Raises UsageError."""
    files = [path]
    if path.is_dir():
        # The other files next to a summary repeat its numbers.
        files = [path / _SUMMARY] if (path / _SUMMARY).is_file() else sorted(path.glob("*.json"))
        files = files or sorted(path.glob(f"*/{_SUMMARY}"))
    if not files:
        raise UsageError(f"{path} has no result files (*.json, or {_SUMMARY} of directories)")
    return [_read_rows(file) for file in files]


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        content = None
    if isinstance(content, dict) and isinstance(content.get("measures"), dict):
        if not content.get("valid", True):
            raise UsageError(f"{path}: the client limited this run, so it says nothing of a server")
        partial = why_partial(content)
        if partial is not None:
            raise UsageError(f"{path} is of a part of a run: {partial}")
        return [load_row(content)]
    if not isinstance(content, dict) or "results" not in content:
        raise UsageError(
            f"{path} is no result file: it needs 'results', a list of rows, or 'measures' as "
            f"{_SUMMARY} of pd-bench serve has them"
        )
    rows = content["results"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: 'results' must be a list of objects")
    return rows


def load_row(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Make one row from the ``summary.json`` of a run under load.

    The dataset names the row. All counts are measures, even if they never differ.
    """
    dataset = (summary.get("settings") or {}).get("dataset") or {}
    row: dict[str, Any] = {"work": dataset.get("name", "imported")}
    measures: Mapping[str, Any] = summary["measures"]
    for name, value in measures.items():
        if isinstance(value, (int, float)):
            row[name] = float(value)
        elif name == "goodput":
            row |= {f"goodput_{key}": float(value[key]) for key in ("requests_per_s", "share")}
        elif name == "stages_ms":
            for stage, times in value.items():
                row |= _distribution_measures(f"stage_{stage}", times)
        elif name.endswith("_ms"):
            row |= _distribution_measures(name.removesuffix("_ms"), value)
    return row


def _distribution_measures(name: str, times: Mapping[str, float | None]) -> dict[str, float]:
    """Name the statistics of a distribution, such as ``ttft_p50_ms``; drop empty ones."""
    kept = {key: value for key, value in times.items() if key not in ("count", "std")}
    return {f"{name}_{key}_ms": value for key, value in kept.items() if value is not None}


def show_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Print a table."""
    width = max(len(each.measure.label) for each in comparisons)
    names = max(len(each.measure.name) for each in comparisons)
    head = f"{'before':>12} {'after':>12} {'ratio':>7} {'interval':>15}"
    print(f"{'row':{width}}  {'measure':{names}} {head}  verdict")
    for each in comparisons:
        interval = "" if each.low is None else f"{each.low:.3f} … {each.high:.3f}"
        print(
            f"{each.measure.label:{width}}  {each.measure.name:{names}} {each.before:12.6g} "
            f"{each.after:12.6g} {each.ratio:7.3f} {interval:>15}  {each.verdict}"
        )


# ---- two trees in turn


def _measure_trees(args: argparse.Namespace) -> tuple[list[list[dict[str, Any]]], ...]:
    """Measure the other commit and this tree in turn."""
    if not args.what:
        raise UsageError("--against needs a benchmark after --, such as -- radix")
    if args.pairs < 1:
        raise UsageError(f"--pairs must be at least 1, not {args.pairs}")
    try:
        # Existing files would count as results.
        entry = None if args.keep is None else next(args.keep.iterdir(), None)
    except FileNotFoundError:
        entry = None
    except OSError as error:
        raise UsageError(f"--keep {args.keep}: {error.strerror}") from None
    if entry is not None:
        raise UsageError(f"--keep {args.keep}: the directory is not empty, it has {entry.name}")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-compare-")))
        other = stack.enter_context(_check_out(args.against, scratch / "tree"))
        results = scratch if args.keep is None else args.keep
        trees = {"before": other, "after": ROOT}
        for name in trees:
            (results / name).mkdir(parents=True, exist_ok=True)
        for number in range(args.pairs):
            # The trees take turns at going first.
            for name in sorted(trees, reverse=number % 2 == 0):
                print(f"pair {number + 1} of {args.pairs}: {name}", file=sys.stderr, flush=True)
                _run_benchmark(args.what, trees[name], results / name / f"{number:03}.json")
        return tuple(read_runs(results / name) for name in trees)


@contextlib.contextmanager
def _check_out(commit: str, tree: Path) -> Iterator[Path]:
    """Check out another commit as a work tree. Raises UsageError for an unknown commit."""
    add = ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), commit]
    done = subprocess.run(add, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["git failed"])[-1]
        raise UsageError(f"--against {commit}: {reason}")
    try:
        yield tree
    finally:
        remove = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
        subprocess.run(remove, capture_output=True, check=False)


def _run_benchmark(arguments: Sequence[str], tree: Path, output: Path) -> None:
    """Run a benchmark of a tree. Raises SetupError if it fails or writes nothing."""
    command = [sys.executable, "-m", "pd.bench", *arguments, "--output", str(output.resolve())]
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not output.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SetupError(f"pd-bench {' '.join(arguments)} failed in {tree}: {last}")
