"""`pd-bench transfer`: how fast KV moves from one pool to another, and what the path itself can do.

Two processes (or two hosts) have a pool each; P pushes rooms through the real transfer manager, in
chunks of 8,192 tokens, into pages that lie scattered on both sides: in the portions in which a
prefill node sends (`nodes`; late where its forward pass would hide that), and in groups of 8 layers
(`groups`). The clock runs from the first `send` until everything is in D's pages, as D says, or as
P has observed where stores are one-sided (`nvlink`, `fake`). Transfers and their ceiling take
turns, so that noise of the machine hits both; GB/s are medians, the best stands beside them. In the
end one more transfer's bytes are compared.

The ceiling of `tcp` and `fake` is as many plain sockets; of `nixl` and `mooncake` the library with
large blocks between the same kinds of memory; of `nvlink` a copy between the two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import multiprocessing
import multiprocessing.connection
import shlex
import signal
import sys
from typing import TYPE_CHECKING

from pd.bench.report import Row, check_output, write_report
from pd.bench.transfer_flags import add_arguments, positive
from pd.core.errors import PDError, SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from pd.bench.transfer_control import Control
    from pd.bench.transfer_spec import Pattern, TransferRates, TransferSpec

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__name__)

_START_SECONDS = 90.0
_PR_SET_PDEATHSIG = 1
_COLUMNS = (
    f"{'backend':9} {'device':13} {'model':13} {'page':>4} {'tokens':>7} {'layout':10} {'sent':6} "
    f"{'GB/s':>8} {'best':>8} {'ceiling':>8} {'best':>8} {'share':>6}  ceiling is"
)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Returns 1 if a measurement failed; the others count.

    ``args`` has also the whole ``command_line``, as it was typed.
    """
    logging.basicConfig(stream=sys.stderr, level="WARNING")
    key = _cluster_key(args.cluster_key_file)
    if args.listen:
        return _listen(args.listen, _devices(args.device)[1], key)
    specs = _specs(args)
    from pd.bench.transfer_spec import row

    check_output(args.output)
    rows: list[Row] = []
    devices: set[str] = set()
    failed = 0
    print(_COLUMNS, flush=True)
    for spec, measured in _measurements(args, specs, key):
        if isinstance(measured, PDError):
            failed += 1
            print(f"pd-bench transfer: {spec}: {measured.message}", file=sys.stderr, flush=True)
            continue
        rows.append(row(measured))
        devices.update(measured.devices)
        print(_line(rows[-1]), flush=True)
        if args.output is not None:
            _write(args, rows, sorted(devices))
    return int(failed > 0)


def _measurements(
    args: argparse.Namespace, specs: list[TransferSpec], key: bytes | None
) -> Iterator[tuple[TransferSpec, TransferRates | PDError]]:
    if not args.connect:
        for spec in specs:
            yield spec, _measure_here(spec, args.timeout)
        return
    from pd.bench.transfer_control import Control, connect_socket, parse_address

    control = Control(connect_socket(*parse_address(args.connect), key))
    try:
        for spec in specs:
            yield spec, _measure(spec, control, key)
    finally:
        control.close()


def _measure(spec: TransferSpec, control: Control, key: bytes | None) -> TransferRates | PDError:
    from pd.bench.transfer_ends import SourceEnd

    try:
        return SourceEnd(spec, control, key).measure(_progress)
    except PDError as error:
        return error
    except Exception as error:
        # Whatever a library raises when the other end dies, or there is no memory.
        logger.debug("failed", exc_info=True)
        return SetupError(f"{type(error).__name__}: {error}")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- two processes of this machine


def _measure_here(spec: TransferSpec, timeout: float) -> TransferRates | PDError:
    """Measure in two new processes, so that no library disturbs the next measurement."""
    from pd.bench.transfer_spec import TransferRates

    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    decode = context.Process(target=_decode_process, args=(far, spec.target_device), daemon=True)
    decode.start()
    processes = [decode]
    try:
        port = _answer(near, decode, _START_SECONDS)
        if isinstance(port, PDError):
            return port
        prefill = context.Process(target=_prefill_process, args=(far, spec, port), daemon=True)
        prefill.start()
        processes.append(prefill)
        found = _answer(near, prefill, timeout)
        assert isinstance(found, TransferRates | PDError)
        return found
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in reversed(processes):
            # Each ends when its work is done or the other one closes the connection.
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(pipe: Connection, process: BaseProcess, timeout: float) -> object:
    """The report of a process, or a SetupError with the reason why there is none."""
    ready = multiprocessing.connection.wait([pipe, process.sentinel], timeout)
    if pipe.poll():
        reported: object = pipe.recv()
        return reported
    if not ready:
        process.kill()
        return SetupError(f"it took longer than {timeout:g} s")
    process.join()
    return SetupError(f"the process {process.name} ended with status {process.exitcode}")


def _decode_process(pipe: Connection, device: str) -> None:
    from pd.bench.transfer_control import Control, accept_socket, listen
    from pd.bench.transfer_ends import TargetEnd

    _depend_on_parent()
    with contextlib.closing(listen("127.0.0.1", 0, None)) as listener:
        # If the other process never comes, this one must not stay for ever.
        listener.settimeout(_START_SECONDS)
        pipe.send(listener.getsockname()[1])
        control = Control(accept_socket(listener, None))
    with contextlib.suppress(SetupError):  # the other process reports the error
        TargetEnd(control, device, None).serve()


def _depend_on_parent() -> None:
    """Ctrl-C and the end of the parent, however it comes, are its to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prefill_process(pipe: Connection, spec: TransferSpec, port: int) -> None:
    from pd.bench.transfer_control import Control, connect_socket

    _depend_on_parent()
    control = Control(connect_socket("127.0.0.1", port, None))
    pipe.send(_measure(spec, control, None))
    control.close()


# ---- two hosts


def _listen(address: str, device: str, key: bytes | None) -> int:
    """Serve one prefill side, then end."""
    from pd.bench.transfer_control import Control, accept_socket, listen, parse_address
    from pd.bench.transfer_ends import TargetEnd, check_device
    from pd.core.addresses import in_url

    check_device(device)
    with contextlib.closing(listen(*parse_address(address), key)) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"{in_url(host)}:{port}"
        ready = {"event": "ready", "role": "decode", "address": shown}
        print(json.dumps(ready), flush=True)
        control = Control(accept_socket(listener, key))
    TargetEnd(control, device, key).serve()
    control.close()
    return 0


def _cluster_key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    from pd.core.cluster_key import load_cluster_key

    return load_cluster_key(path)


# ---- what to measure, and what came out


def _specs(args: argparse.Namespace) -> list[TransferSpec]:
    from pd.bench.transfer_spec import TransferSpec, load_shape
    from pd.transfer.registry import backend_names

    backends = [name for given in args.backend or ["tcp"] for name in given.split(",")]
    known = backend_names()
    unknown = [name for name in backends if name not in known]
    if unknown:
        raise UsageError(f"unknown backend {unknown[0]!r}; choose from {', '.join(known)}")
    source, target = _devices(args.device)
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
        for page_size in _page_sizes(args.page_size)
        for backend in backends
        for pattern in _patterns(args.pattern)
    ]


def _patterns(text: str) -> list[Pattern]:
    from pd.bench.transfer_spec import PATTERNS

    unknown = [name for name in text.split(",") if name not in PATTERNS]
    if unknown:
        raise UsageError(f"--pattern is one of {', '.join(PATTERNS)}, not {unknown[0]!r}")
    return [pattern for pattern in PATTERNS if pattern in text.split(",")]


def _page_sizes(text: str) -> list[int]:
    try:
        return [positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--page-size {error}") from None


def _devices(text: str) -> tuple[str, str]:
    """P's and D's; ``cuda`` is ``cuda:0``."""
    from pd.commands.parser import DEVICE

    names = ["cuda:0" if name == "cuda" else name for name in text.split(",")]
    if len(names) > 2 or not all(DEVICE.fullmatch(name) and name != "auto" for name in names):
        raise UsageError(f"--device is cpu, cuda or cuda:N, or two of them: P,D; not {text!r}")
    return names[0], names[-1]


def _line(row: Row) -> str:
    return (
        f"{row['backend']:9} {row['device']:13} {row['model']:13.13} {row['page_size']:4} "
        f"{row['tokens']:7} {row['layout']:10} {row['pattern']:6} {row['gb_s']:8.2f} "
        f"{row['best_gb_s']:8.2f} "
        f"{row['ceiling_gb_s']:8.2f} {row['best_ceiling_gb_s']:8.2f} "
        f"{row['share_of_ceiling_rate']:6.1%}  {row['ceiling']}"
    )


def _write(args: argparse.Namespace, rows: list[Row], devices: list[str]) -> None:
    write_report(
        args.output,
        shlex.join(["pd-bench", *args.command_line]),
        rows,
        measured=["pd/bench", "pd/transfer", "pd/kernels"],
        machine={"gpu": ", ".join(devices)} if devices else None,
    )
