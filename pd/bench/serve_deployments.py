"""`pd-bench serve --cluster`: the same load on each layout of deployments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.bench.deployments import measure_layouts
from pd.bench.load.command import INTERRUPTED, check_places, measure_and_write
from pd.bench.load.settings import load_settings
from pd.core.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from pd.bench.deployments import ServedLayout


def serve_deployments(args: argparse.Namespace) -> int:
    """Start, measure, print, write and stop; returns the exit status, or raises KeyboardInterrupt.

    The results of a layout are in a directory of its name below ``--output-dir``.
    """
    check_places(args)
    if args.url is not None:
        raise UsageError("--cluster starts what is measured: leave out --url")
    if args.save_result is not None:
        raise UsageError("--save-result is of one server: give --output-dir with --cluster")
    statuses: list[int] = []

    def measure(layout: ServedLayout) -> None:
        print(f"{layout.name}, {layout.url}:", flush=True)
        settings = load_settings(args, layout.url, layout.hosts, layout.gpus)
        directory = None if args.output_dir is None else args.output_dir / layout.name
        statuses.append(measure_and_write(args, settings, layout.client, directory))
        if statuses[-1] == INTERRUPTED:
            # Ctrl-C is for the whole command: no other layout is measured, no other file started.
            raise KeyboardInterrupt

    measure_layouts(args, measure)
    return max(statuses, default=0)
