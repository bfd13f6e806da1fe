"""`pd-bench transfer`: how fast KV moves between two pools, and how fast the path itself is.

Two processes (or two hosts) have a pool each. P pushes rooms through the real transfer manager, in
chunks of 8,192 tokens, into pages scattered on both sides: either in the portions in which
a prefill node sends (`nodes`; late where its forward pass would hide that) or in groups of 8 layers
(`groups`). The clock runs from the first `send` until everything is in D's pages. D says when it
is, except that P observes it for one-sided stores (`nvlink`, `fake`). Transfers and their ceiling
take turns, so noise of the machine hits both. GB/s are medians, with the best next to them. A
last transfer compares the bytes.

The ceiling of `tcp` and `fake` is the same number of plain sockets. For `nixl` and `mooncake` it is
the library with large blocks between the same kinds of memory, and for `nvlink` a copy between the
two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import math
import multiprocessing
import multiprocessing.connection
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pd.bench.report import Row, add_output, check_output, format_command, write_report
from pd.bench.shapes import NAMES
from pd.core.errors import PDError, SetupError, UsageError
from pd.util.logs import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from pd.bench.transfer_control import Control
    from pd.bench.transfer_spec import TransferRates, TransferSpec

logger = logging.getLogger(__name__)

_START_SECONDS = 90.0
_PR_SET_PDEATHSIG = 1
_COLUMNS = (
    f"{'backend':9} {'device':13} {'model':13} {'page':>4} {'tokens':>7} {'layout':10} {'sent':6} "
    f"{'GB/s':>8} {'best':>8} {'ceiling':>8} {'best':>8} {'share':>6}  ceiling is"
)
EXAMPLES = """\
examples:
  pd-bench transfer                                   # tcp on this machine's CPU, Llama-3.1-8B
  pd-bench transfer --backend tcp,nixl --model llama-3.1-8b,embedded --output transfer.json
  pd-bench transfer --backend nvlink,nixl --device cuda:0,cuda:1
  pd-bench transfer --model ~/models/Qwen3-8B --page-size 64 --layout contiguous

on two hosts, with the same key file on both:
  decode host:   pd-bench transfer --listen 10.0.0.2:7000 --cluster-key-file cluster.key
  prefill host:  pd-bench transfer --connect 10.0.0.2:7000 --cluster-key-file cluster.key
The decode host uses its own --device for its pool; the prefill host sets everything else.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``pd-bench transfer``."""
    parser.epilog = EXAMPLES
    add = parser.add_argument_group("what to move").add_argument
    add(
        "--backend",
        action="append",
        metavar="NAME",
        help="tcp, nixl, mooncake, nvlink, fake, or another package's backend; repeat the flag or "
        "separate names by commas (default: tcp)",
    )
    add(
        "--model",
        default=NAMES[0],
        metavar="NAME|DIR|FILE",
        help=f"models whose KV to move, separated by commas: {', '.join(NAMES)}, a model directory "
        "or a config.json",
    )
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="dtype of the KV (default: %(default)s, the checkpoint's)",
    )
    add(
        "--page-size", default="16", metavar="N", help="tokens per page; separate several by commas"
    )
    add("--tokens", type=parse_positive, default=8192, help="tokens of a room")
    add(
        "--layout",
        choices=("scattered", "contiguous"),
        default="scattered",
        help="placement of the pages on both sides (default: %(default)s, anew for each room)",
    )
    add(
        "--pattern",
        default="nodes,groups",
        metavar="NAME",
        help="nodes: in the portions in which prefill nodes send during a forward pass; groups: in "
        "8 layers of each chunk; both are measured separately (default: %(default)s)",
    )
    add(
        "--device",
        default="cpu",
        metavar="P[,D]",
        help="cpu, cuda or cuda:N for P's and D's pool; one name for both if they are the same",
    )
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add(
        "--connections",
        type=parse_positive,
        default=0,
        help="connections of tcp, and of the plain sockets for comparison (default: the backend's)",
    )
    add("--repeats", type=parse_positive, default=7, help="timed transfers, at least")
    add(
        "--seconds",
        type=_parse_seconds,
        default=2.0,
        help="repeat short transfers for this long, up to 100 times",
    )
    add(
        "--timeout",
        type=parse_positive,
        default=180,
        metavar="SECONDS",
        help="end a measurement on this machine that takes longer",
    )
    add_output(group)
    group = parser.add_argument_group("two hosts")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--listen", metavar="HOST:PORT", help="be the decode side for another host")
    where.add_argument("--connect", metavar="HOST:PORT", help="the decode side, on another host")
    group.add_argument(
        "--cluster-key-file",
        type=Path,
        metavar="FILE",
        help="secret shared by both hosts; needed to leave this machine",
    )


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds


def parse_positive(text: str) -> int:
    """Parse a whole number above 0. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Return 1 if a measurement failed; we still do the others.

    ``args`` also has the whole ``command_line``.
    """
    from pd.bench.transfer_spec import make_row

    configure_logging(logging.WARNING)
    key = None
    if args.cluster_key_file is not None:
        from pd.net.cluster_key import load_cluster_key

        key = load_cluster_key(args.cluster_key_file)
    if args.listen:
        return _serve_target(args.listen, _parse_devices(args.device)[1], key)
    specs = _make_specs(args)
    check_output(args.output)
    rows: list[Row] = []
    devices: set[str] = set()
    failed = 0
    print(_COLUMNS, flush=True)
    for spec, measured in _measure_specs(args, specs, key):
        if isinstance(measured, PDError):
            failed += 1
            print(f"pd-bench transfer: {spec}: {measured.message}", file=sys.stderr, flush=True)
            continue
        rows.append(make_row(measured))
        devices.update(measured.devices)
        print(_format_row(rows[-1]), flush=True)
        if args.output is not None:
            write_report(
                args.output,
                format_command(args.command_line),
                rows,
                measured=["pd/bench", "pd/transfer", "pd/kernels"],
                machine={"gpu": ", ".join(sorted(devices))} if devices else None,
            )
    return int(failed > 0)


def _measure_specs(
    args: argparse.Namespace, specs: list[TransferSpec], key: bytes | None
) -> Iterator[tuple[TransferSpec, TransferRates | PDError]]:
    if not args.connect:
        for spec in specs:
            yield spec, _measure_in_processes(spec, args.timeout)
        return
    from pd.bench.transfer_control import Control, connect_socket, parse_address

    control = Control(connect_socket(*parse_address(args.connect), key))
    try:
        for spec in specs:
            yield spec, _measure_spec(spec, control, key)
    finally:
        control.close()


def _measure_spec(
    spec: TransferSpec, control: Control, key: bytes | None
) -> TransferRates | PDError:
    from pd.bench.transfer_ends import SourceEnd

    try:
        return SourceEnd(spec, control, key).measure(partial(print, file=sys.stderr, flush=True))
    except PDError as error:
        return error
    except Exception as error:
        # Libraries raise anything when the other end dies or memory runs out.
        logger.debug("failed", exc_info=True)
        return SetupError(f"{type(error).__name__}: {error}")


# ---- two processes on this machine


def _measure_in_processes(spec: TransferSpec, timeout: float) -> TransferRates | PDError:
    """Measure in two new processes, so no library disturbs the next measurement."""
    from pd.bench.transfer_spec import TransferRates

    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    target = (far, spec.target_device)
    decode = context.Process(target=_run_decode_process, args=target, daemon=True)
    decode.start()
    processes = [decode]
    try:
        port = _wait_for_report(near, decode, _START_SECONDS)
        if isinstance(port, PDError):
            return port
        source = (far, spec, port)
        prefill = context.Process(target=_run_prefill_process, args=source, daemon=True)
        prefill.start()
        processes.append(prefill)
        rates = _wait_for_report(near, prefill, timeout)
        assert isinstance(rates, TransferRates | PDError)
        return rates
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in reversed(processes):
            # Each ends when its work is done or when the other one closes the connection.
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _wait_for_report(pipe: Connection, process: BaseProcess, timeout: float) -> object:
    """Return the report of a process, or a SetupError with the reason for its absence."""
    ready = multiprocessing.connection.wait([pipe, process.sentinel], timeout)
    if pipe.poll():
        reported: object = pipe.recv()
        return reported
    if not ready:
        process.kill()
        return SetupError(f"it took longer than {timeout:g} s")
    process.join()
    return SetupError(f"the process {process.name} ended with status {process.exitcode}")


def _run_decode_process(pipe: Connection, device: str) -> None:
    from pd.bench.transfer_control import Control, accept_socket, open_listener
    from pd.bench.transfer_ends import TargetEnd

    _depend_on_parent()
    with contextlib.closing(open_listener("127.0.0.1", 0, None)) as listener:
        # This process must end even if the other one never connects.
        listener.settimeout(_START_SECONDS)
        pipe.send(listener.getsockname()[1])
        control = Control(accept_socket(listener, None))
    with contextlib.suppress(SetupError):  # the other process reports the error
        TargetEnd(control, device, None).serve()


def _depend_on_parent() -> None:
    """Leave Ctrl-C to the parent, and die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_prefill_process(pipe: Connection, spec: TransferSpec, port: int) -> None:
    from pd.bench.transfer_control import Control, connect_socket

    _depend_on_parent()
    control = Control(connect_socket("127.0.0.1", port, None))
    pipe.send(_measure_spec(spec, control, None))
    control.close()


# ---- two hosts


def _serve_target(address: str, device: str, key: bytes | None) -> int:
    """Serve one prefill side, then end."""
    from pd.bench.transfer_control import Control, accept_socket, open_listener, parse_address
    from pd.bench.transfer_ends import TargetEnd, check_device
    from pd.core.addresses import format_host

    check_device(device)
    with contextlib.closing(open_listener(*parse_address(address), key)) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"{format_host(host)}:{port}"
        ready = {"event": "ready", "role": "decode", "address": shown}
        print(json.dumps(ready), flush=True)
        control = Control(accept_socket(listener, key))
    TargetEnd(control, device, key).serve()
    control.close()
    return 0


# ---- flags and rows


def _make_specs(args: argparse.Namespace) -> list[TransferSpec]:
    from pd.bench.transfer_spec import PATTERNS, TransferSpec, load_shape
    from pd.transfer.registry import backend_names

    backends = [name for given in args.backend or ["tcp"] for name in given.split(",")]
    known = backend_names()
    unknown = [name for name in backends if name not in known]
    if unknown:
        raise UsageError(f"unknown backend {unknown[0]!r}; choose from {', '.join(known)}")
    try:
        page_sizes = [parse_positive(part) for part in args.page_size.split(",")]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--page-size {error}") from None
    patterns = args.pattern.split(",")
    unknown = [name for name in patterns if name not in PATTERNS]
    if unknown:
        raise UsageError(f"--pattern is one of {', '.join(PATTERNS)}, not {unknown[0]!r}")
    source, target = _parse_devices(args.device)
    return [
        TransferSpec(
            backend=backend,
            shape=load_shape(model, args.dtype),
            page_size=page_size,
            tokens=args.tokens,
            layout=args.layout,
            source_device=source,
            target_device=target,
            connections=args.connections,
            repeats=args.repeats,
            seconds=args.seconds,
            pattern=pattern,
        )
        for model in args.model.split(",")
        for page_size in page_sizes
        for backend in backends
        for pattern in PATTERNS
        if pattern in patterns
    ]


def _parse_devices(text: str) -> tuple[str, str]:
    """Return P's and D's device; ``cuda`` means ``cuda:0``."""
    from pd.commands.parser import DEVICE

    names = ["cuda:0" if name == "cuda" else name for name in text.split(",")]
    if len(names) > 2 or not all(DEVICE.fullmatch(name) and name != "auto" for name in names):
        raise UsageError(f"--device is cpu, cuda or cuda:N, or two of them: P,D; not {text!r}")
    return names[0], names[-1]


def _format_row(row: Row) -> str:
    return (
        f"{row['backend']:9} {row['device']:13} {row['model']:13.13} {row['page_size']:4} "
        f"{row['tokens']:7} {row['layout']:10} {row['pattern']:6} {row['gb_s']:8.2f} "
        f"{row['best_gb_s']:8.2f} "
        f"{row['ceiling_gb_s']:8.2f} {row['best_ceiling_gb_s']:8.2f} "
        f"{row['share_of_ceiling_rate']:6.1%}  {row['ceiling']}"
    )
