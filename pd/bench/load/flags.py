"""Flags of a run under load, shared by `pd-bench serve` and `pd-bench sweep`.

Names are those of ``vllm bench serve`` and SGLang's bench_serving, if they have the feature;
docs/harness.md says which of them behave differently here.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from pd.bench.load.datasets.spec import NAMES


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run, except for its result files."""
    add = parser.add_argument_group("what is asked (run under load)").add_argument
    count = partial(add, type=int, metavar="N")
    add("--dataset-name", metavar="NAME", help=f"{', '.join(NAMES)}; starts a run under load")
    count("--vocab-size", default=2000, help="token ids are below this")
    add("--seed", type=int, default=0, help="seed of everything random")
    add("--dataset-path", type=Path, metavar="FILE", help="of jsonl, trace; schemas of structured")
    count("--num-prompts", help="requests, or sessions of multi-turn (1000; all that a file has)")
    count("--random-input-len", default=1024, help="tokens of a prompt")
    count("--random-output-len", default=128, help="tokens of an answer")
    ratio = "lengths are uniform from (1 - R) to (1 + R) of that"
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help=ratio)
    count("--num-prefixes", default=8, help="shared-prefix: prefixes")
    count("--prefix-len", default=512, help="shared-prefix: their tokens")
    count("--turns", default=4, help="multi-turn: questions of a session")
    count("--turn-input-len", default=64, help="multi-turn: tokens of later questions")
    think_time = "multi-turn: mean time before a later question, exponential"
    add("--think-time", type=float, default=0.0, metavar="SECONDS", help=think_time)
    add(
        "--prompts-as",
        choices=("tokens", "text"),
        help="token ids, or words for the server to tokenize (default: text for a chat, else "
        "tokens)",
    )

    add = parser.add_argument_group("traces in Mooncake's format").add_argument
    add(
        "--trace-length-scale",
        default="1",
        metavar="F",
        help="factor of lengths, such as 1/32, which makes blocks of 512 tokens ones of 16",
    )
    add("--trace-output-scale", metavar="F", help="factor of answers' lengths (the same)")
    time_scale = "factor of times; 0.5 replays twice as fast"
    add("--trace-time-scale", type=float, default=1.0, metavar="F", help=time_scale)
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
        help="leave out and count rows that exceed the model's context, or end with an error",
    )

    add = parser.add_argument_group("when").add_argument
    rate = partial(add, type=float, metavar="R")
    rate("--request-rate", help="sessions per second (default: inf, or as the dataset says)")
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
    concurrency = "sessions at a time; without a rate a closed loop"
    add("--max-concurrency", type=int, metavar="N", help=concurrency)
    add(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="change the rate over the requests",
    )
    rate("--ramp-up-start-rps", help="rate of the first request")
    rate("--ramp-up-end-rps", help="rate of the last request")
    add(
        "--warmup",
        "--num-warmups",
        "--warmup-requests",
        type=int,
        default=0,
        metavar="N",
        help="other requests before the run, which do not count; for jsonl the file's last lines",
    )

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
        help="answers have their full length (default: yes, except for jsonl and structured)",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="of the sampling; 0 is greedy")
    add("--model", metavar="NAME", help="name of the model (default: the server's first)")
    fields = "further fields of every request"
    add("--extra-body", "--extra-request-body", metavar="JSON", help=fields)
    add("--api-key", metavar="KEY", help="bearer token (default: $OPENAI_API_KEY)")
    add("--request-timeout", type=float, default=600.0, metavar="SECONDS", help="of one request")
    add("--cancel-rate", type=float, default=0.0, metavar="SHARE", help="clients that hang up")
    delay = "they hang up after a uniform time up to this"
    add("--cancel-delay", type=float, default=1.0, metavar="SECONDS", help=delay)
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="objectives: ttft:MS or ttft:BASE+PER_TOKEN (ttft:1s+40us), tpot:MS, itl:MS (every "
        "gap), e2el:MS",
    )
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs of the server, for rates per GPU (default: with --cluster, as its file says)",
    )

    add = parser.add_argument_group("the client").add_argument
    add("--processes", type=int, default=1, metavar="N", help="load processes (on each host)")
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
