"""`pd-bench compare`: is this version faster than that one?

With two result files, or two directories with a file for each run, it compares what they hold; runs
are paired in the order of their names. A run under load (`pd-bench serve --output-dir`) is its
`summary.json`, or the directory that has it; several are a directory of such directories. A run
that the client limited is refused. With `--against COMMIT` it measures: the benchmark behind `--`
runs on that commit and on this tree in turn, so that whatever else the machine does hits both.

Each measure gets a verdict from the ratios of its pairs: `faster` or `slower` if the median differs
by more than the margin and its 90 % interval (sign test) lies on that side of 1, `same` if the
interval lies within the margin, else `unclear`. Numbers that are the same in every run are `equal`;
others whose name does not say which way is better are `changed`.
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
    add("what", nargs="*", metavar="BEFORE AFTER", help="result files, or directories of them")
    add("--against", metavar="COMMIT", help="measure this commit and the present tree in turn")
    add("--pairs", type=int, default=7, metavar="N", help="runs of each")
    add("--margin", type=float, default=0.02, help="a smaller difference counts as none")
    add(
        "--keep",
        type=Path,
        metavar="DIR",
        help="with --against: keep the result files here, in an empty directory or a new one",
    )
    add("--fail-on-slower", action="store_true", help="exit with status 1 if anything is slower")


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    if not 0 <= args.margin < 1:
        raise UsageError(f"--margin is a share of at least 0 and below 1, not {args.margin:g}")
    if args.against is None:
        if len(args.what) != 2:
            raise UsageError(
                f"BEFORE and AFTER are needed, or --against; {len(args.what)} names were given"
            )
        before, after = (read_runs(Path(name)) for name in args.what)
    else:
        before, after = _measure(args)
    if len(before) != len(after):
        raise UsageError(
            f"runs are compared in pairs, but there are {len(before)} before and {len(after)} after"
        )
    found = compare_runs(before, after, args.margin)
    if not found:
        raise UsageError("the results have no measure in common: they are of different benchmarks")
    show(found)
    if len(before) < LEAST_PAIRS:
        print(f"{len(before)} pairs prove nothing; give {LEAST_PAIRS} or more for verdicts")
    slower = any(each.verdict == "slower" for each in found)
    return 1 if slower and args.fail_on_slower else 0


def read_runs(path: Path) -> list[list[dict[str, Any]]]:
    """Rows of each result file. Raises UsageError."""
    files = _files(path)
    if not files:
        raise UsageError(f"{path} has no result files (*.json, or {_SUMMARY} of directories)")
    return [_read_rows(file) for file in files]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    summary = path / _SUMMARY
    if summary.is_file():
        return [summary]  # the other files of its directory say the same in other words
    return sorted(path.glob("*.json")) or sorted(path.glob(f"*/{_SUMMARY}"))


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        content = None
    if isinstance(content, dict) and isinstance(content.get("measures"), dict):
        if not content.get("valid", True):
            raise UsageError(f"{path}: the client limited this run, which says nothing of a server")
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
    """One row of the measures of a run under load, from its ``summary.json``.

    The dataset tells what was measured. All counts are measures, even those that never differ.
    """
    dataset = (summary.get("settings") or {}).get("dataset") or {}
    row: dict[str, Any] = {"work": dataset.get("name", "imported")}
    measures: Mapping[str, Any] = summary["measures"]
    for name, value in measures.items():
        if isinstance(value, (int, float)):
            row[name] = float(value)
        elif name == "goodput":
            row |= {f"goodput_{each}": float(value[each]) for each in ("requests_per_s", "share")}
        elif name == "stages_ms":
            for stage, times in value.items():
                row |= _times(f"stage_{stage}", times)
        elif name.endswith("_ms"):
            row |= _times(name.removesuffix("_ms"), value)
    return row


def _times(name: str, times: Mapping[str, float | None]) -> dict[str, float]:
    """The statistics of a distribution, such as ``ttft_p50_ms``, but those that nothing was seen
    of."""
    kept = {key: value for key, value in times.items() if key not in ("count", "std")}
    return {f"{name}_{key}_ms": value for key, value in kept.items() if value is not None}


def show(found: Sequence[Comparison]) -> None:
    """Print a table."""
    width = max(len(each.measure.label) for each in found)
    names = max(len(each.measure.name) for each in found)
    head = f"{'before':>12} {'after':>12} {'ratio':>7} {'interval':>15}"
    print(f"{'row':{width}}  {'measure':{names}} {head}  verdict")
    for each in found:
        interval = "" if each.low is None else f"{each.low:.3f} … {each.high:.3f}"
        print(
            f"{each.measure.label:{width}}  {each.measure.name:{names}} {each.before:12.6g} "
            f"{each.after:12.6g} {each.ratio:7.3f} {interval:>15}  {each.verdict}"
        )


# ---- two trees in turn


def _measure(args: argparse.Namespace) -> tuple[list[list[dict[str, Any]]], ...]:
    """Results of the other commit and of this tree."""
    if not args.what:
        raise UsageError("--against needs a benchmark behind --, such as -- radix")
    if args.pairs < 1:
        raise UsageError(f"--pairs must be at least 1, not {args.pairs}")
    _check_empty(args.keep)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-compare-")))
        other = stack.enter_context(_checked_out(args.against, scratch / "tree"))
        results = scratch if args.keep is None else args.keep
        trees = {"before": other, "after": ROOT}
        for name in trees:
            (results / name).mkdir(parents=True, exist_ok=True)
        for number in range(args.pairs):
            # The tree that goes first changes from pair to pair.
            for name in sorted(trees, reverse=number % 2 == 0):
                print(f"pair {number + 1} of {args.pairs}: {name}", file=sys.stderr, flush=True)
                _run(args.what, trees[name], results / name / f"{number:03}.json")
        return tuple(read_runs(results / name) for name in trees)


def _check_empty(keep: Path | None) -> None:
    """Raise UsageError for a directory whose files would be taken for results of this call."""
    try:
        found = None if keep is None else next(keep.iterdir(), None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--keep {keep}: {error.strerror}") from None
    if found is not None:
        raise UsageError(f"--keep {keep}: the directory is not empty, it has {found.name}")


@contextlib.contextmanager
def _checked_out(commit: str, tree: Path) -> Iterator[Path]:
    """A work tree of another commit. Raises UsageError if there is none of this name."""
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


def _run(arguments: Sequence[str], tree: Path, output: Path) -> None:
    """Run a benchmark of a tree. Raises SetupError if it fails or writes nothing."""
    command = [sys.executable, "-m", "pd.bench", *arguments, "--output", str(output.resolve())]
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not output.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SetupError(f"pd-bench {' '.join(arguments)} failed in {tree}: {last}")
