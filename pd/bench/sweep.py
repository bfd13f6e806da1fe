"""`pd-bench sweep`: the highest rate at which a deployment keeps its objectives.

At each rate, a load of `pd-bench serve --dataset-name` runs `--repeats` times with different seeds.
The rate passes if in the median at least `--share` of the requests meet every objective of
`--goodput`; failed requests meet none. Rates double from `--min-rate` until one fails, then we
bisect the interval down to `--resolution`.

`--deployment` names running servers. `--cluster` starts those of a file, all layouts at once. It
also starts all files at once, unless they need the same GPUs.

A run limited by the client proves nothing, so it ends the search with exit status 3.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from pd.bench.load.flags import add_load_arguments
from pd.bench.report import Row, add_output, check_output, format_command, write_report
from pd.core.errors import PDError, UsageError
from pd.util.printable import escape_text

if TYPE_CHECKING:
    import argparse

    from pd.bench.deployments import ServedLayout
    from pd.bench.load.measure import LoadResult, ProbedServer
    from pd.bench.load.search import SearchSettings

EXAMPLES = """\
examples:
  pd-bench sweep --deployment split=http://127.0.0.1:8000 \\
      --deployment unified=http://127.0.0.1:8001 --goodput ttft:1s+40us tpot:50 \\
      --random-input-len 2048 --random-output-len 128 \\
      --min-rate 1 --max-rate 50 --seconds 60 --output sweep.json
  pd-bench sweep --cluster a.yaml --cluster b.yaml --goodput ttft:1s+40us tpot:50 \\
      --max-rate 50 --output sweep.json --output-dir out
"""
_VOID = 3
# Fewer requests say little about a share such as nine in ten.
_LEAST_REQUESTS = 20


class _ClientLimitedError(PDError):
    """The client could not keep up with the schedule."""

    exit_status = _VOID


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--deployment", action="append", metavar="NAME=URL", help="running server; may be repeated")
    add("--share", type=float, default=0.9, metavar="S", help="share of requests to be good")
    add("--min-rate", type=float, default=1.0, metavar="R", help="first rate, requests/s")
    add("--max-rate", type=float, default=64.0, metavar="R", help="highest rate to try")
    add("--repeats", type=int, default=3, metavar="N", help="runs at each rate; the median decides")
    add("--resolution", type=float, default=0.1, metavar="F", help="end at this relative interval")
    add(
        "--seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="length of a run, unless --num-prompts is given",
    )
    add_output(parser)
    add("--output-dir", type=Path, metavar="DIR", help="write the files of every run below")
    add_load_arguments(parser)
    parser.set_defaults(dataset_name="random")


def run(args: argparse.Namespace) -> int:
    """Search for each deployment, print and write. ``args`` also has the whole ``command_line``."""
    from pd.bench.deployments import measure_layouts
    from pd.bench.load.search import SearchSettings

    search = SearchSettings(args.min_rate, args.max_rate, args.share, args.repeats, args.resolution)
    layouts = _parse_deployments(args)
    _check_flags(args)
    rows: list[Row] = []
    status = 0

    def sweep(layout: ServedLayout) -> None:
        _Sweep(args, search, layout, rows).run()

    try:
        for layout in layouts:
            sweep(layout)
        if args.cluster:
            measure_layouts(args, sweep, taken={each.name for each in layouts})
    except _ClientLimitedError as error:
        print(f"RESULT VOID, the client was the bottleneck: {escape_text(error.message)}")
        status = error.exit_status
    finally:
        if args.output is not None:
            command = format_command(args.command_line)
            settings = dataclasses.asdict(search)
            write_report(args.output, command, rows, measured=["pd"], settings=settings)
    return status


def _parse_deployments(args: argparse.Namespace) -> list[ServedLayout]:
    """Parse ``--deployment``. Raises UsageError."""
    from pd.bench.deployments import ServedLayout
    from pd.bench.load.command import make_local_client

    layouts: dict[str, ServedLayout] = {}
    for text in args.deployment or ():
        name, equals, url = text.partition("=")
        if not equals or not name or not url or name in layouts or "/" in name:
            raise UsageError(f"--deployment is NAME=URL with a name of its own, not {text}")
        layouts[name] = ServedLayout(name, url, (), make_local_client(args))
    if not layouts and not args.cluster:
        raise UsageError("--deployment NAME=URL or --cluster FILE is missing: give one or more")
    return list(layouts.values())


def _check_flags(args: argparse.Namespace) -> None:
    """Raise UsageError for impossible sweeps."""
    if not args.goodput:
        raise UsageError(
            "--goodput is missing: a sweep needs objectives, such as ttft:1000,tpot:50"
        )
    given = ("request_rate", "ramp_up_strategy", "max_concurrency")
    wrong = [f"--{name.replace('_', '-')}" for name in given if getattr(args, name) is not None]
    if wrong:
        raise UsageError(f"a sweep sets the rate itself: leave out {', '.join(wrong)}")
    if not 0 < args.seconds < float("inf"):
        raise UsageError(f"--seconds must be above 0, not {args.seconds:g}")
    check_output(args.output)


def _round_rate(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 6)


class _Sweep:
    """Searches for the highest rate of one deployment; adds all runs and the result to ``rows``."""

    def __init__(
        self,
        args: argparse.Namespace,
        search: SearchSettings,
        layout: ServedLayout,
        rows: list[Row],
    ) -> None:
        self._args, self._search, self._layout, self._rows = args, search, layout, rows
        self._name = layout.name
        self._server: ProbedServer | None = None
        self._runs = 0

    def run(self) -> None:
        from pd.bench.load.measure import probe_server
        from pd.bench.load.search import highest_rate
        from pd.bench.load.settings import load_settings

        settings = load_settings(
            self._args, self._layout.url, self._layout.hosts, self._layout.gpus
        )
        self._server = probe_server(settings, self._layout.client)
        result = highest_rate(self._search, self._measure_share)
        row: Row = {"deployment": self._name, "highest_rate": _round_rate(result.highest)}
        row["lowest_rate_that_failed"] = _round_rate(result.failed)
        if settings.gpus and result.highest is not None:
            row["highest_rate_per_gpu"] = round(result.highest / settings.gpus, 4)
        self._rows.append(row)
        rate = f"below {self._search.low:g}" if result.highest is None else f"{result.highest:g}"
        reached = " (--max-rate)" if result.failed is None else ""
        print(f"{self._name}: highest rate {rate} requests/s{reached}", flush=True)

    def _measure_share(self, rate: float, repeat: int) -> float:
        """Run once; return the share of good requests."""
        from pd.bench.load.measure import measure_server

        assert self._server is not None
        # Each run draws other prompts, because a prefix cache would have the old ones. Only lines
        # of a file repeat.
        settings = self._server.settings.at_rate(rate, self._args.seed + self._runs)
        self._runs += 1
        if settings.dataset.count is None:
            count = max(_LEAST_REQUESTS, round(rate * self._args.seconds))
            dataset = dataclasses.replace(settings.dataset, count=count)
            settings = dataclasses.replace(settings, dataset=dataset)
        server = dataclasses.replace(self._server, settings=settings)
        result = measure_server(server)
        self._report_run(rate, repeat, server, result)
        if result.failure is not None:
            raise result.failure
        if result.interrupted:
            raise KeyboardInterrupt
        if result.complaints:
            raise _ClientLimitedError(f"{self._name} at {rate:g}/s: {result.complaints[0]}")
        assert result.goodput is not None
        return result.goodput.share

    def _report_run(
        self, rate: float, repeat: int, server: ProbedServer, result: LoadResult
    ) -> None:
        goodput, measures = result.goodput, result.measures
        assert goodput is not None
        row: Row = {
            "deployment": self._name,
            "rate": round(rate, 6),
            "repeat": repeat,
            "share": round(goodput.share, 6),
            "requests": measures["requests"],
            "failed": measures["failed"],
            "requests_per_s": measures["requests_per_s"],
            "output_tokens_per_s": measures["output_tokens_per_s"],
            "ttft_p50_ms": measures["ttft_ms"]["p50"],
            "ttft_p90_ms": measures["ttft_ms"]["p90"],
            "tpot_p50_ms": measures["tpot_ms"]["p50"],
            "tpot_p90_ms": measures["tpot_ms"]["p90"],
            "valid": not result.complaints,
        }
        self._rows.append(row)
        missed = ", ".join(f"{name} {count}" for name, count in goodput.missed.items())
        print(
            f"{self._name:12} {rate:8.3f}/s repeat {repeat}: {goodput.share:6.1%} of "
            f"{goodput.counted} good{f' (missed: {missed})' if missed else ''}",
            flush=True,
        )
        if self._args.output_dir is not None:
            from pd.bench.load.results import settings_to_json, write_results

            directory = self._args.output_dir / f"{self._name}-{rate:.3f}-{repeat}"
            directory.parent.mkdir(parents=True, exist_ok=True)
            command = format_command(self._args.command_line)
            write_results(directory, result, settings_to_json(server.settings), command)
