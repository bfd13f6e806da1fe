"""`pd-bench serve --dataset-name …`: one run under load, or AIPerf's results evaluated as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.bench.load.aiperf import read_aiperf_records
from pd.bench.load.goodput import Objectives, count_good
from pd.bench.load.measure import LoadResult, measure_server, probe_server
from pd.bench.load.measures import summarize
from pd.bench.load.results import (
    print_result,
    shown_command,
    shown_settings,
    write_bench_file,
    write_results,
)
from pd.bench.load.settings import load_settings
from pd.core.errors import NodeFailedError, UsageError

if TYPE_CHECKING:
    import argparse

# Exit status of a run that the client limited, and of one that the user ended.
VOID, INTERRUPTED = 3, 130


def run_load(args: argparse.Namespace) -> int:
    """Measure, print and write. ``args`` has also the whole ``command_line``."""
    _check_places(args)
    if args.import_aiperf is not None:
        return _import_aiperf(args)
    server = probe_server(load_settings(args, args.url))
    result = measure_server(server)
    _finish(args, result, shown_settings(server.settings))
    if result.interrupted:
        return INTERRUPTED
    if not result.measures["completed"] and not result.measures["cancelled"]:
        raise NodeFailedError(f"no request was answered: {result.measures['errors']}")
    return VOID if result.complaints else 0


def _check_places(args: argparse.Namespace) -> None:
    """Raise UsageError now for files that could not be written later."""
    for flag, path in (("--output-dir", args.output_dir), ("--save-result", args.save_result)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no directory {path.absolute().parent}")


def _finish(args: argparse.Namespace, result: LoadResult, settings: dict[str, Any]) -> None:
    print_result(result)
    if args.output_dir is not None:
        command = shown_command(args.command_line)
        write_results(args.output_dir, result, settings, command)
    if args.save_result is not None:
        write_bench_file(args.save_result, result, settings, detailed=args.save_detailed)


def _import_aiperf(args: argparse.Namespace) -> int:
    start_time, records = read_aiperf_records(args.import_aiperf)
    objectives = Objectives.parse(" ".join(args.goodput)) if args.goodput else None
    goodput = None if objectives is None else count_good(records, objectives)
    result = LoadResult(
        start_time=start_time,
        records=records,
        client={},
        complaints=[],
        measures=summarize(records, goodput, args.gpus),
        goodput=goodput,
        notes={"imported_from": str(args.import_aiperf)},
        server={},
    )
    _finish(args, result, {})
    return 0
