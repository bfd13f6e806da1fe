"""Flags of ``pd-bench transfer``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from pd.bench.report import add_output
from pd.bench.shapes import NAMES

EXAMPLES = """\
examples:
  pd-bench transfer                                   # tcp on this machine's CPU, Llama-3.1-8B
  pd-bench transfer --backend tcp,nixl --model llama-3.1-8b,embedded --output transfer.json
  pd-bench transfer --backend nvlink,nixl --device cuda:0,cuda:1
  pd-bench transfer --model ~/models/Qwen3-8B --page-size 64 --layout contiguous

on two hosts, with the same key file on both:
  decode host:   pd-bench transfer --listen 10.0.0.2:7000 --cluster-key-file cluster.key
  prefill host:  pd-bench transfer --connect 10.0.0.2:7000 --cluster-key-file cluster.key
The decode host's own --device counts for its pool; everything else is set on the prefill host.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``pd-bench transfer``."""
    parser.epilog = EXAMPLES
    _add_work(parser)
    _add_measurement(parser)
    _add_hosts(parser)


def _add_work(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to move").add_argument
    add(
        "--backend",
        action="append",
        metavar="NAME",
        help="tcp, nixl, mooncake, nvlink, fake, or the backend of another package; repeat it or "
        "separate by commas (default: tcp)",
    )
    add(
        "--model",
        default=NAMES[0],
        metavar="NAME|DIR|FILE",
        help=f"whose KV to move: {', '.join(NAMES)}, a model directory or a config.json; "
        "several are separated by commas",
    )
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="dtype of the KV (default: %(default)s, the checkpoint's)",
    )
    add(
        "--page-size",
        default="16",
        metavar="N",
        help="tokens of a page; several are separated by commas",
    )
    add("--tokens", type=positive, default=8192, help="tokens of a room")
    add(
        "--layout",
        choices=("scattered", "contiguous"),
        default="scattered",
        help="how the pages lie, on both sides (default: %(default)s, anew for each room)",
    )
    add(
        "--pattern",
        default="nodes,groups",
        metavar="NAME",
        help="nodes: in the portions in which prefill nodes send while they compute; groups: in "
        "8 layers of each chunk; both are measured apart (default: %(default)s)",
    )
    add(
        "--device",
        default="cpu",
        metavar="P[,D]",
        help="cpu, cuda or cuda:N of P's and D's pool; one name stands for both",
    )


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add(
        "--connections",
        type=positive,
        default=0,
        help="connections of tcp, and of the plain sockets beside it (default: the backend's)",
    )
    add("--repeats", type=positive, default=7, help="timed transfers, at least")
    add(
        "--seconds",
        type=_seconds,
        default=2.0,
        help="go on for so long, with up to 100 transfers, if they are short",
    )
    add(
        "--timeout",
        type=positive,
        default=180,
        metavar="SECONDS",
        help="end a measurement on this machine that takes longer",
    )
    add_output(group)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
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


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds


def positive(text: str) -> int:
    """A whole number above 0. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)
