"""Flags of a run under load, shared by `pd-bench serve` and `pd-bench sweep`.

Names are those of ``vllm bench serve`` and SGLang's bench_serving, where they have the thing;
docs/harness.md says which of these do something else here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pd.bench.load.datasets.spec import NAMES

REMOTE_COMMAND = "ssh -o BatchMode=yes {host} python3 -m pd.bench.load.worker"


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that makes a run, but where results go."""
    _add_dataset(parser)
    _add_trace(parser)
    _add_arrivals(parser)
    _add_requests(parser)
    _add_client(parser)


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is asked (run under load)").add_argument
    add("--dataset-name", metavar="NAME", help=f"{', '.join(NAMES)}; starts a run under load")
    add("--vocab-size", type=int, default=2000, metavar="N", help="token ids are below this")
    add("--seed", type=int, default=0, help="of everything that is drawn")
    add("--dataset-path", type=Path, metavar="FILE", help="of jsonl, trace; schemas of structured")
    add(
        "--num-prompts",
        type=int,
        metavar="N",
        help="requests, or sessions of multi-turn (1000; all that a file has)",
    )
    add("--random-input-len", type=int, default=1024, metavar="N", help="tokens of a prompt")
    add("--random-output-len", type=int, default=128, metavar="N", help="tokens of an answer")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are uniform from (1 - R) to (1 + R) of that",
    )
    add("--num-prefixes", type=int, default=8, metavar="N", help="shared-prefix: prefixes")
    add("--prefix-len", type=int, default=512, metavar="N", help="shared-prefix: their tokens")
    add("--turns", type=int, default=4, metavar="N", help="multi-turn: questions of a session")
    add(
        "--turn-input-len",
        type=int,
        default=64,
        metavar="N",
        help="multi-turn: tokens of later questions",
    )
    add(
        "--think-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="multi-turn: mean time before a later question, exponential",
    )
    add(
        "--prompts-as",
        choices=("tokens", "text"),
        help="token ids, or words for the server to "
        "tokenize (default: text for a chat, else tokens)",
    )


def _add_trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traces in Mooncake's format").add_argument
    add(
        "--trace-length-scale",
        default="1",
        metavar="F",
        help="factor of lengths, such as 1/32, which makes blocks of 512 tokens ones of 16",
    )
    add("--trace-output-scale", metavar="F", help="factor of answers' lengths (the same)")
    add(
        "--trace-time-scale",
        type=float,
        default=1.0,
        metavar="F",
        help="factor of times; 0.5 replays twice as fast",
    )
    add("--trace-window", default="0:", metavar="START:END", help="seconds of the trace to replay")
    add(
        "--trace-arrivals",
        choices=("recorded", "spread"),
        default="recorded",
        help="as recorded, or uniform within the step of the recorder's clock",
    )
    add(
        "--trace-too-long",
        choices=("drop", "error"),
        default="drop",
        help="rows that the model's context does not hold are left out and counted, or an error",
    )


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("when").add_argument
    add(
        "--request-rate",
        type=float,
        metavar="R",
        help="sessions a second (default: inf, or as the dataset says)",
    )
    add(
        "--arrival",
        choices=("poisson", "constant"),
        default="poisson",
        help="intervals at that rate",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of the intervals; 1 is Poisson, less is burstier",
    )
    add(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="sessions at a time; without a rate a closed loop",
    )
    add(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="let the rate change over the requests",
    )
    add("--ramp-up-start-rps", type=float, metavar="R", help="rate of the first request")
    add("--ramp-up-end-rps", type=float, metavar="R", help="rate of the last request")
    add(
        "--warmup",
        "--num-warmups",
        "--warmup-requests",
        type=int,
        default=0,
        metavar="N",
        help="other requests before, which do not count; of jsonl the last lines of the file",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add(
        "--endpoint",
        default="/v1/completions",
        metavar="PATH",
        help="/v1/completions, /v1/chat/completions or /generate (default: %(default)s)",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers have their full length (default: yes, but for jsonl and structured)",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="of the sampling; 0 is greedy")
    add("--model", metavar="NAME", help="name of the model (default: the server's first)")
    add(
        "--extra-body",
        "--extra-request-body",
        metavar="JSON",
        help="fields that every request has beside",
    )
    add("--api-key", metavar="KEY", help="bearer token (default: $OPENAI_API_KEY)")
    add("--request-timeout", type=float, default=600.0, metavar="SECONDS", help="of one request")
    add("--cancel-rate", type=float, default=0.0, metavar="SHARE", help="clients that hang up")
    add(
        "--cancel-delay",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="they do so after a time up to this, uniform",
    )
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="objectives: ttft:MS or ttft:BASE+PER_TOKEN"
        " (ttft:1s+40us), tpot:MS, itl:MS (every gap), e2el:MS",
    )
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs of the server, for rates per GPU (default: with --cluster, as its file says)",
    )


def _add_client(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the client").add_argument
    add("--processes", type=int, default=1, metavar="N", help="load processes (on each host)")
    add(
        "--load-host",
        action="append",
        metavar="HOST",
        help="run load processes there; may be repeated (default: here)",
    )
    add(
        "--remote-command",
        default=REMOTE_COMMAND,
        metavar="COMMAND",
        help="starts one there (default: %(default)s)",
    )
    add(
        "--cluster",
        action="append",
        type=Path,
        metavar="FILE",
        help="start this deployment (docs/cluster.md), send from the hosts of its load: list, and "
        "stop it; may be repeated",
    )
    add(
        "--layout",
        action="append",
        metavar="NAME",
        help="of --cluster: measure only this one; may be repeated (default: each in turn)",
    )
    add(
        "--max-client-lag-ms",
        type=float,
        default=10.0,
        metavar="MS",
        help="later than this the run is void: p99 of requests' lateness and of the event loop's",
    )
    add(
        "--max-client-cpu",
        type=float,
        default=0.85,
        metavar="SHARE",
        help="busier than this the run is void: share of a processor that a load process used",
    )
