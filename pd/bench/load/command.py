"""`pd-bench serve --dataset-name …`: one run under load, or an evaluation of AIPerf's results."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from pd.bench.load.aiperf import read_aiperf_records
from pd.bench.load.client import LoadClient
from pd.bench.load.goodput import Objectives, count_good
from pd.bench.load.load_process import local_places
from pd.bench.load.measure import LoadResult, measure_server, probe_server
from pd.bench.load.measures import summarize_records
from pd.bench.load.records import OK
from pd.bench.load.results import (
    print_result,
    settings_to_json,
    write_bench_file,
    write_results,
)
from pd.bench.load.settings import load_settings
from pd.bench.report import format_command
from pd.core.errors import NodeFailedError, UsageError

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from pd.bench.load.settings import LoadSettings

# Exit statuses of runs limited by the client, and interrupted by the user.
VOID, INTERRUPTED = 3, 130


def run_load(args: argparse.Namespace) -> int:
    """Measure, print and write. ``args`` also has the whole ``command_line``."""
    check_places(args)
    if args.import_aiperf is not None:
        return _import_aiperf(args)
    settings = load_settings(args, args.url, ())
    return measure_and_write(args, settings, make_local_client(args), args.output_dir)


def make_local_client(args: argparse.Namespace) -> LoadClient:
    """Plan load processes on this machine."""
    return LoadClient(tuple(local_places(args.processes)))


def check_places(args: argparse.Namespace) -> None:
    """Raise UsageError now for unwritable files."""
    for flag, path in (("--output-dir", args.output_dir), ("--save-result", args.save_result)):
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no directory {path.absolute().parent}")
        where = path.absolute() if path.is_dir() else path.absolute().parent
        try:
            tempfile.TemporaryFile(dir=where).close()
        except OSError as error:
            raise UsageError(f"{flag}: cannot write in {where}: {error.strerror}") from None
    if args.output_dir is not None and args.output_dir.is_file():
        raise UsageError(f"--output-dir {args.output_dir} is a file")


def measure_and_write(
    args: argparse.Namespace, settings: LoadSettings, client: LoadClient, directory: Path | None
) -> int:
    """Run once against one server; return the exit status. Raises PDError without an answer."""
    server = probe_server(settings, client)
    result = measure_server(server)
    _report_result(args, result, settings_to_json(server.settings), directory)
    if result.failure is not None:
        raise result.failure
    if result.interrupted:
        return INTERRUPTED
    if not result.measures["completed"] and not result.measures["cancelled"]:
        raise NodeFailedError(f"no request was answered: {result.measures['errors']}")
    return VOID if result.complaints else 0


def _report_result(
    args: argparse.Namespace,
    result: LoadResult,
    settings: dict[str, Any],
    directory: Path | None,
) -> None:
    print_result(result)
    if directory is not None:
        write_results(directory, result, settings, format_command(args.command_line))
    if args.save_result is not None:
        write_bench_file(args.save_result, result, settings, detailed=args.save_detailed)


def _import_aiperf(args: argparse.Namespace) -> int:
    start_time, records = read_aiperf_records(args.import_aiperf)
    objectives = Objectives.parse(" ".join(args.goodput)) if args.goodput else None
    goodput = None if objectives is None else count_good(records, objectives)
    notes: dict[str, Any] = {"imported_from": str(args.import_aiperf)}
    without = sum(record.status == OK and record.lacks_gaps for record in records)
    if without:
        notes["answers_without_gaps"] = without
    result = LoadResult(
        start_time=start_time,
        records=records,
        measures=summarize_records(records, goodput, args.gpus),
        goodput=goodput,
        notes=notes,
    )
    _report_result(args, result, {}, args.output_dir)
    return 0
