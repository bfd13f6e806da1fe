"""`pd-bench programs`: what the prefix cache gives programs that call a model many times.

Each workload of programs runs on real processes of this machine, once with everything on and once
per ablation. We record the requests and replay them in an unlimited cache in the best order. So you
see the hit rate, the best hit rate, and their ratio (`of_best`), next to programs per second.

`no cache` is `--radix-cache off`; `fcfs` and `random` are orders of waiting prompts; without
parallelism a program sends the requests of its branches one after the other; without hints nobody
computes a common beginning first. Elastic nodes have an order of their own instead of `fcfs`.

The first of `--page-size` is used for everything, the others with everything on. `page_loss` is the
share of the best hits that whole pages lose against single tokens. Orders also run with a pool of
`--pool-share` of the distinct tokens, on one node that prefills (`pool` is its size).
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pd.bench.programs.layouts import LAYOUTS, ProgramLayout, start_layout
from pd.bench.programs.runner import ABLATIONS, run_workload
from pd.bench.programs.workloads import WORKLOADS, ProgramWorkload, make_workload
from pd.bench.report import Row, add_output, check_output, format_command, write_report
from pd.bench.shapes import model_directory
from pd.core.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from pd.bench.programs.runner import ProgramsResult

EXAMPLES = """\
examples:
  pd-bench programs --output programs.json
  pd-bench report programs.json --output programs.html
  pd-bench programs --model DIR --device cuda --layout unified --program mine.py
"""
# Orders of prompts, which matter most when the cache is small.
_ORDERS = ("full", "fcfs", "random")


@dataclass(frozen=True)
class _Case:
    """Settings of nodes, and the ablations that run on them."""

    settings: ProgramLayout
    ablations: tuple[str, ...]
    has_small_pool: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--model", default="embedded", help="checkpoint directory (default: the one in pd)")
    add("--device", default="cpu", help="device of all nodes (default: %(default)s)")
    add(
        "--workload",
        nargs="+",
        choices=WORKLOADS,
        metavar="NAME",
        help=f"default: all of {', '.join(WORKLOADS)}",
    )
    add(
        "--program",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="instead, or also: your own workloads; each file has make_workload(seed, count)",
    )
    add("--layout", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], help="default: all")
    add("--ablation", nargs="+", choices=ABLATIONS, default=[*ABLATIONS], help="default: all")
    add("--programs", type=int, default=32, metavar="N", help="of each workload (%(default)s)")
    add("--concurrency", type=int, default=16, metavar="N", help="at a time (%(default)s)")
    add("--seed", type=int, default=0, help="of the data (%(default)s)")
    add("--page-size", nargs="+", type=int, default=[1, 16], metavar="N", help="default: 1 16")
    share = "a small pool, as a share of the distinct tokens; 0: none (%(default)s)"
    add("--pool-share", type=float, default=0.25, metavar="F", help=share)
    ample = "an ample pool, in tokens (%(default)s)"
    add("--kv-cache-tokens", type=int, default=1 << 17, metavar="N", help=ample)
    add("--node-flags", type=shlex.split, default=[], metavar="FLAGS", help="further ones, quoted")
    add("--note", help="remark for readers of the results, such as other work on the machine")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write, also what was measured before an error or Ctrl-C.

    ``args`` also has the whole ``command_line``.

    Raises:
        UsageError: invalid arguments.
        SetupError: a deployment did not start, or a count is wrong (see
            :func:`pd.bench.programs.runner.run_workload`).
        ProgramError: a program failed.
    """
    if min(args.programs, args.concurrency, *args.page_size) < 1 or not 0 <= args.pool_share < 1:
        raise UsageError(
            "--programs, --concurrency and --page-size must be at least 1, and --pool-share at "
            "least 0 and below 1"
        )
    check_output(args.output)
    workloads = _load_workloads(args)
    rows: list[Row] = []
    note = f"{args.note}; it was ended before its time" if args.note else "ended before its time"
    try:
        for row in _measure_cases(args, workloads):
            rows.append(row)
            print(_format_row(row), flush=True)
        note = args.note
    finally:
        if args.output is not None and rows:
            command = format_command(args.command_line)
            write_report(args.output, command, rows, measured=["pd"], note=note)
    return 0


def _load_workloads(args: argparse.Namespace) -> list[ProgramWorkload]:
    names = args.workload or ([] if args.program else WORKLOADS)
    workloads = [make_workload(name, args.seed, args.programs) for name in names]
    for path in args.program:
        name = f"program_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise UsageError(f"--program {path}: there is no such Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look for their module here
        spec.loader.exec_module(module)
        workload = getattr(module, "make_workload", lambda *_: None)(args.seed, args.programs)
        if not isinstance(workload, ProgramWorkload):
            raise UsageError(
                f"--program {path}: define make_workload(seed, count), which returns a "
                "pd.bench.programs.workloads.ProgramWorkload"
            )
        workloads.append(workload)
    return workloads


def _measure_cases(args: argparse.Namespace, workloads: list[ProgramWorkload]) -> Iterator[Row]:
    for layout in args.layout:
        settings = ProgramLayout(
            layout, args.device, args.page_size[0], more_flags=tuple(args.node_flags)
        )
        results: dict[str, ProgramsResult] = {}
        for case in _list_cases(args, settings):
            if not case.has_small_pool:
                yield from _measure_case(args, case, workloads, results)
                continue
            for workload in workloads:
                tokens = results[workload.name].choose_pool(args.pool_share)
                small = replace(case.settings, kv_cache_tokens=tokens)
                yield from _measure_case(args, replace(case, settings=small), [workload], {})


def _list_cases(args: argparse.Namespace, settings: ProgramLayout) -> list[_Case]:
    """List the deployments to start, each with all that it can measure."""
    is_elastic = settings.layout == "elastic"
    chosen = [name for name in args.ablation if not (is_elastic and name == "fcfs")]
    groups: dict[ProgramLayout, list[str]] = {}
    for name in chosen:
        groups.setdefault(ABLATIONS[name].change_settings(settings), []).append(name)
    cases = [_Case(group, tuple(names)) for group, names in groups.items()]
    if "full" in chosen:
        cases += [
            _Case(replace(settings, page_size=page_size), ("full",))
            for page_size in args.page_size[1:]
        ]
    if args.pool_share and not is_elastic:
        for name in chosen:
            if name in _ORDERS:
                order = ABLATIONS[name].change_settings(settings)
                cases.append(_Case(order, (name,), has_small_pool=True))
    return cases


def _measure_case(
    args: argparse.Namespace,
    case: _Case,
    workloads: list[ProgramWorkload],
    results: dict[str, ProgramsResult],
) -> Iterator[Row]:
    """Start a deployment and measure. Keep the last result of each workload in ``results``."""
    settings = case.settings
    model = model_directory(args.model)
    with start_layout(model, settings, args.kv_cache_tokens) as layout:
        for workload in workloads:
            for name in case.ablations:
                result = run_workload(layout, workload, ABLATIONS[name], settings, args.concurrency)
                results[workload.name] = result
                yield {
                    "workload": workload.name,
                    "layout": settings.layout,
                    "ablation": name,
                    "page_size": settings.page_size,
                    "pool": settings.kv_cache_tokens or "ample",
                    **result.to_row(),
                }


def _format_row(row: Row) -> str:
    return (
        f"{row['workload']:12} {row['layout']:8} {row['ablation']:15} page {row['page_size']:<3} "
        f"pool {row['pool']:<6} {row['programs_per_s']:8.2f} programs/s, mean "
        f"{row['latency_mean_s']:6.2f} s, p99 {row['latency_p99_s']:6.2f} s, hit rate "
        f"{row['hit_rate']:.3f} of {row['best_hit_rate']:.3f}: {row['of_best']:.3f}"
    )
