"""`pd-bench serve --dataset-name …`: one run under load, or AIPerf's results evaluated as one."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from pd.bench.load.aiperf import read_aiperf_records
from pd.bench.load.client import LoadClient
from pd.bench.load.goodput import Objectives, count_good
from pd.bench.load.load_process import local_places, remote_places
from pd.bench.load.measure import LoadResult, measure_server, probe_server
from pd.bench.load.measures import summarize
from pd.bench.load.records import OK
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
    from pathlib import Path

    from pd.bench.load.settings import LoadSettings

# Exit status of a run that the client limited, and of one that the user ended.
VOID, INTERRUPTED = 3, 130


def run_load(args: argparse.Namespace) -> int:
    """Measure, print and write. ``args`` has also the whole ``command_line``."""
    check_places(args)
    if args.import_aiperf is not None:
        return _import_aiperf(args)
    settings = load_settings(args, args.url, args.load_host or ())
    return measure_and_write(args, settings, client_of(args), args.output_dir)


def client_of(args: argparse.Namespace) -> LoadClient:
    """Load processes here, or on the hosts of ``--load-host``."""
    if args.load_host:
        return LoadClient(tuple(remote_places(args.processes, args.load_host, args.remote_command)))
    return LoadClient(tuple(local_places(args.processes)))


def check_places(args: argparse.Namespace) -> None:
    """Raise UsageError now for files that could not be written later."""
    for flag, path in (("--output-dir", args.output_dir), ("--save-result", args.save_result)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no directory {path.absolute().parent}")
        if path is not None:
            _check_writable(flag, path.absolute())
    if args.output_dir is not None and args.output_dir.is_file():
        raise UsageError(f"--output-dir {args.output_dir} is a file")


def _check_writable(flag: str, path: Path) -> None:
    where = path if path.is_dir() else path.parent
    try:
        tempfile.TemporaryFile(dir=where).close()
    except OSError as error:
        raise UsageError(f"{flag}: nothing can be written in {where}: {error.strerror}") from None


def measure_and_write(
    args: argparse.Namespace, settings: LoadSettings, client: LoadClient, directory: Path | None
) -> int:
    """One run against one server; returns the exit status. Raises PDError without an answer."""
    server = probe_server(settings, client)
    result = measure_server(server)
    _finish(args, result, shown_settings(server.settings), directory)
    if result.failure is not None:
        raise result.failure
    if result.interrupted:
        return INTERRUPTED
    if not result.measures["completed"] and not result.measures["cancelled"]:
        raise NodeFailedError(f"no request was answered: {result.measures['errors']}")
    return VOID if result.complaints else 0


def _finish(
    args: argparse.Namespace,
    result: LoadResult,
    settings: dict[str, Any],
    directory: Path | None,
) -> None:
    print_result(result)
    if directory is not None:
        write_results(directory, result, settings, shown_command(args.command_line))
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
        client={},
        complaints=[],
        measures=summarize(records, goodput, args.gpus),
        goodput=goodput,
        notes=notes,
        server={},
    )
    _finish(args, result, {}, args.output_dir)
    return 0
