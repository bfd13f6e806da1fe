"""`pd-bench proxy`: what the proxy costs, in front of nodes with a programmed rate.

The proxy is a process of its own, started as `pd-launch proxy`. Its clients and its nodes, which
have no model, are processes too. Processor time covers all threads of the proxy, as the kernel
counts it. Numbers are medians over the rounds.

- `request`: prompts of 16 token ids, answered with one token, not streamed, 8 at a time
- `stream`: `--streams` streams get a token every `--step` milliseconds; the proxy detokenizes
  each token, searches it for a stop string and sends an event
- `stream with ids`: events also have the token ids, so each event is formatted anew
- `chat`: the streams as chats, whose prompts go through chat template and tokenizer
- `/generate`: the streams by that endpoint, whose events also have times
- `/generate, whole`: each event repeats the whole answer so far
- `long text`: the streams while a text of 32k tokens arrives every half second; no two texts
  share a passage; `text` is how long they took, `beside_text` the added time of tokens sent
  meanwhile
- `api`: the same text by each API, and the ratios of their costs to those of chats
- `saturated requests`: 64 requests at a time to two nodes at a sixteenth of the step
- `saturated`: four times as many streams, eight times as long, at these nodes

The saturated ones are more than one process can carry. `--workers N` also measures N proxy
processes with N times as many requests, streams and nodes.

`added` is the time from a node's sending of a token until the last byte of its event is at the
client. Processor time and `added` count once all streams have begun, because `request` measures
beginnings. Tokens per second count while all streams run. `load_share` is the processor time of the
busiest client or node by elapsed time: near 1 you measure the load, so raise `--clients`.

For comparison each round also measures a bare FastAPI POST, uvicorn sending as many chunks from an
ASGI application, and bare transports writing them. If you have routers (`pip install sglang-router
smg`), they pass on the bytes of the first and the last of these, without any tokenization.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from pd.bench.proxy_apis import measure_apis
from pd.bench.proxy_floors import KINDS
from pd.bench.proxy_load import (
    Answered,
    Begun,
    Ended,
    Form,
    LongTexts,
    Requests,
    Streams,
    Texts,
    ask_all,
)
from pd.bench.proxy_processes import Running, start_process, start_proxy, start_router
from pd.bench.report import Row, add_output, check_output, format_command, write_report
from pd.bench.serve_client import BenchCompletion
from pd.core.errors import NodeFailedError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]

Fields = dict[str, Any]

_CONNECTIONS, _CONNECTIONS_SATURATED = 8, 64
# Programs of SGLang's gateway, the old one and the new one.
ROUTERS = ("sglang-router", "smg")
# Further fields of a request. Routers accept no token ids and need a model name.
NO_FIELDS: Fields = {}
_ROUTED: Fields = {"prompt": "a prompt of sixteen tokens or so, as a text", "model": "floor"}
_LONG_TOKENS, _LONG_EVERY = 32_768, 0.5
_CHARACTERS_PER_TOKEN = 4
_STOP = "never said"
# Streams that run one after the other: name of the work, further request fields, and form. The
# proxy formats events of `stream` and `chat` from a prepared template.
_STREAMS: list[tuple[str, Fields, Form]] = [
    ("stream", {}, "completions"),
    ("stream with ids", {"return_token_ids": True}, "completions"),
    ("chat", {}, "chat"),
    ("/generate", {}, "generate"),
    ("/generate, whole", {}, "generate, whole"),
]
# Requests of `saturated requests` per request of `--requests`.
_SATURATED_REQUESTS = 8
# Clients per process of the proxy, if it has several.
_CLIENTS_PER_WORKER = 2
EXAMPLES = """\
examples:
  pd-bench proxy --output proxy.json
  pd-bench proxy --streams 256 --step 10 --rounds 3
  pd-bench proxy --work apis --rounds 7
  pd-bench proxy --workers 4 --work saturated     # on a host with 16 cores or more
"""
# Choices of --work. Floors of requests and streams belong to the first two; `apis` writes `api`.
WORK = ("request", "stream", "apis", "saturated")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--streams", type=int, default=64, metavar="N", help="streams at a time")
    add("--tokens", type=int, default=200, metavar="N", help="tokens of each stream")
    add("--step", type=float, default=20.0, metavar="MS", help="between two tokens of a stream")
    add("--requests", type=int, default=400, metavar="N", help="requests without streaming")
    add("--rounds", type=int, default=5, metavar="N", help="number of rounds for the medians")
    add(
        "--work", nargs="+", default=list(WORK), choices=WORK, help="what to measure (default: all)"
    )
    add("--workers", type=int, default=1, metavar="N", help="also measure N processes of the proxy")
    add(
        "--clients",
        type=int,
        metavar="N",
        help="processes that share the streams (default: 1, or with --workers 2 for each of them)",
    )
    add(
        "--router",
        nargs="*",
        default=[name for name in ROUTERS if shutil.which(name) is not None],
        metavar="PROGRAM",
        help=f"routers to compare with (default: {' and '.join(ROUTERS)}, if on the path)",
    )
    add_output(parser)


class Load(NamedTuple):
    """The load for each measurement.

    Attributes:
        step: seconds between two tokens of a stream.
        requests: number of requests without streaming.
    """

    streams: int
    tokens: int
    step: float
    requests: int


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. ``args`` also has the whole ``command_line``."""
    workers = args.workers
    clients = args.clients
    if clients is None:
        clients = 1 if workers == 1 else _CLIENTS_PER_WORKER * workers
    if min(args.streams, args.tokens, args.requests, args.rounds, workers, clients) < 1:
        raise UsageError(
            "--streams, --tokens, --requests, --rounds, --workers and --clients must be above 0"
        )
    if args.step <= 0:
        raise UsageError(f"--step must be above 0, not {args.step:g}")
    check_output(args.output)
    load = Load(args.streams, args.tokens, args.step / 1e3, args.requests)
    rounds: list[list[Row]] = []
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        rounds.append(measure_round(load, args.work, workers, clients, args.router, number))
    rows = [median_row(rows) for rows in zip(*rounds, strict=True)]
    show_rows(rows)
    if args.output is not None:
        command = format_command(args.command_line)
        measured = ["pd/proxy", "pd/core", "pd/bench"]
        machine: Row = {}
        with suppress(metadata.PackageNotFoundError):
            # The proxy and the floors use uvloop if it is installed.
            machine["uvloop"] = metadata.version("uvloop")
        write_report(args.output, command, rows, measured=measured, machine=machine)
    return 0


@contextmanager
def start_load_processes(count: int) -> Iterator[list[Running]]:
    """Start processes of :mod:`pd.bench.proxy_load`."""
    with ExitStack() as stack:
        yield [stack.enter_context(start_process("pd.bench.proxy_load")) for _ in range(count)]


def measure_round(
    load: Load,
    work: Collection[str] = WORK,
    workers: int = 1,
    num_clients: int = 1,
    routers: Sequence[str] = (),
    turn: int = 0,
) -> list[Row]:
    """Measure the floors, the routers and the proxy once. Returns a row for each work.

    Args:
        turn: number of the round.
    """
    rows: list[Row] = []
    with start_load_processes(num_clients + 1) as (texts, *clients):
        if "request" in work:
            rows += _measure_request_floors(load, routers)
        if "stream" in work:
            rows += _measure_stream_floors(load, clients, routers)
        if set(work) & {"request", "stream"}:
            with start_proxy(load.step) as (proxy, nodes):
                if "request" in work:
                    row = measure_requests(proxy, load.requests)
                    rows.append({"work": "request", "system": "pd"} | row)
                if "stream" in work:
                    setup = (proxy, nodes, clients, load.streams, load.tokens)
                    for name, more, form in _STREAMS:
                        streamed = run_streams(*setup, more=more, form=form)
                        rows.append({"work": name, "system": "pd"} | _latency_fields(streamed))
                    streamed = run_streams(*setup, texts=texts)
                    rows.append({"work": "long text", "system": "pd"} | _latency_fields(streamed))
        if "apis" in work:
            with start_proxy(load.step) as (proxy, nodes):
                rows += measure_apis(proxy, nodes, load.requests, load.streams, load.tokens, turn)
        for count in dict.fromkeys([1, workers]) if "saturated" in work else ():
            rows += _measure_saturation(load, clients, count)
    return rows


def _measure_saturation(load: Load, clients: Sequence[Running], workers: int) -> list[Row]:
    """Send more requests, and more streams, than ``workers`` processes of the proxy can carry."""
    row: Row = {"system": "pd"} | ({"workers": workers} if workers > 1 else {})
    # With so many connections a node's step does not limit the rate.
    connections = max(1, workers * _CONNECTIONS_SATURATED // len(clients))
    count = max(1, workers * _SATURATED_REQUESTS * load.requests // len(clients))
    # Two nodes per process, because one node would be the bottleneck.
    with start_proxy(load.step / 16, workers=workers, nodes=2 * workers) as (proxy, nodes):
        for share in (10, 1):  # the first warms up
            meter = _Meter(proxy, nodes)
            script = Requests(proxy.url, count // share + 1, connections, NO_FIELDS)
            for client in clients:
                client.write_message(script)
            answered = [client.read_message(Answered) for client in clients]
        seconds, cpu, node_share = meter.measure_until(max(each.ended for each in answered))
        streams, tokens = 4 * workers * load.streams, 8 * load.tokens
        streamed = run_streams(proxy, nodes, clients, streams, tokens, warm=False)
    total = len(clients) * (count + 1)
    requests: Row = {
        "connections": connections * len(clients),
        "cpu_us": cpu / total * 1e6,
        "cpu_share": cpu / seconds,
        "requests_per_s": total / seconds,
        "load_share": max(node_share, *(each.cpu_share for each in answered)),
    }
    rate: Row = {"tokens_per_s": rate_of_all(streamed)}
    return [
        {"work": "saturated requests"} | row | requests,
        {"work": "saturated"} | row | _cost_fields(streamed) | rate,
    ]


def _measure_request_floors(load: Load, routers: Sequence[str]) -> list[Row]:
    """Measure a minimal server, and routers in front of it."""
    rows: list[Row] = []
    with start_process("pd.bench.proxy_floors", "fastapi", "0") as floor:
        row = measure_requests(floor, load.requests)
        rows.append({"work": "request", "system": "fastapi"} | row)
        for router in routers:
            with start_router(router, floor) as front:
                row = measure_requests(front, load.requests, _ROUTED)
                rows.append({"work": "request", "system": Path(router).name} | row)
    return rows


def _measure_stream_floors(
    load: Load, clients: Sequence[Running], routers: Sequence[str]
) -> list[Row]:
    """Measure minimal servers, and routers in front of the last one."""
    rows: list[Row] = []

    def measure(server: Running, system: str, more: Fields = NO_FIELDS) -> None:
        streamed = run_streams(server, [], clients, load.streams, load.tokens, more=more)
        rows.append({"work": "stream", "system": system} | _cost_fields(streamed))

    for kind in KINDS[1:]:
        with start_process("pd.bench.proxy_floors", kind, str(load.step)) as floor:
            measure(floor, kind)
            for router in routers if kind == "transport" else ():
                with start_router(router, floor) as front:
                    measure(front, Path(router).name, _ROUTED)
    return rows


# ---- requests


def measure_requests(server: Running, count: int, more: Fields = NO_FIELDS) -> Row:
    """Measure processor time and rate of requests without streaming."""
    asyncio.run(ask_all(server.url, count // 10 + 1, _CONNECTIONS, more))  # warms up
    cpu, began = server.cpu_seconds, time.perf_counter()
    asyncio.run(ask_all(server.url, count, _CONNECTIONS, more))
    took, cpu = time.perf_counter() - began, server.cpu_seconds - cpu
    return {"cpu_us": cpu / count * 1e6, "requests_per_s": count / took}


# ---- streams


class Streamed(msgspec.Struct):
    """Answers of simultaneous streams, and their cost.

    Attributes:
        begun_at: time of ``time.perf_counter`` when the last stream had begun.
        num_tokens: number of tokens in ``cpu_seconds`` and ``seconds``.
        load_share: processor time of the busiest client or node, by elapsed time.
        sent: times at which the nodes sent tokens, by request.
        text_spans: when each long text was sent and answered.
    """

    answers: list[BenchCompletion]
    names: list[str]
    begun_at: float
    cpu_seconds: float
    seconds: float
    num_tokens: int
    load_share: float = 0.0
    sent: dict[str, list[float]] = {}
    text_spans: list[tuple[float, float]] = []


def run_streams(
    server: Running,
    nodes: Sequence[Running],
    clients: Sequence[Running],
    streams: int,
    tokens: int,
    *,
    texts: Running | None = None,
    warm: bool = True,
    more: Fields = NO_FIELDS,
    form: Form = "completions",
) -> Streamed:
    """Run simultaneous streams. Raises NodeFailedError if one fails.

    Args:
        clients: processes of :mod:`pd.bench.proxy_load` which share the streams.
        texts: another such process, which sends long texts once all streams have begun.
        warm: measure from when all streams have begun.
        more: further fields of the requests.
        form: see :class:`pd.bench.proxy_load.Streams`.
    """
    for node in nodes:
        node.read_sent_times()  # forgets earlier requests
    names = [f"stream-{time.monotonic_ns()}-{number}" for number in range(streams)]
    parts = [names[number :: len(clients)] for number in range(min(len(clients), streams))]
    clients = clients[: len(parts)]
    meter, before = _Meter(server, nodes), 0
    for client, part in zip(clients, parts, strict=True):
        fields: Fields = {"stop": [_STOP]}
        if form in ("completions", "chat"):
            fields |= {"return_token_ids": False} | more
        client.write_message(Streams(server.url, part, tokens, fields, form))
    begun = [client.read_message(Begun) for client in clients]
    if warm:
        # So far every event has had one token.
        meter, before = _Meter(server, nodes), sum(each.events for each in begun)
    if texts is not None:
        characters = _CHARACTERS_PER_TOKEN * _LONG_TOKENS
        texts.write_message(LongTexts(server.url, characters, _LONG_EVERY))
    ended = [client.read_message(Ended) for client in clients]
    # Clients parse their answers after all streams have ended, which must not count.
    seconds, cpu, node_share = meter.measure_until(max(each.at for each in ended))
    streamed = Streamed(
        answers=[answer for each in ended for answer in each.answers],
        names=[name for part in parts for name in part],
        begun_at=max(each.at for each in begun),
        cpu_seconds=cpu,
        seconds=seconds,
        num_tokens=max(1, streams * tokens - before),
        load_share=max(node_share, *(each.cpu_share for each in ended)),
    )
    if texts is not None:
        texts.write_message(None)
        streamed.text_spans = texts.read_message(Texts).spans
    for node in nodes:
        streamed.sent |= node.read_sent_times()
    for answer in streamed.answers:
        if answer.error is not None:
            raise NodeFailedError(answer.error)
    return streamed


class _Meter:
    """Measures time and processor time since it was made."""

    def __init__(self, server: Running, nodes: Sequence[Running]) -> None:
        self._server, self._nodes = server, nodes
        self._at, self._cpu = time.perf_counter(), self._read_cpu()

    def _read_cpu(self) -> list[float]:
        return [process.cpu_seconds for process in (self._server, *self._nodes)]

    def measure_until(self, ended: float) -> tuple[float, float, float]:
        """Return the seconds until ``ended``, the server's processor time, and the processor time
        of the busiest node by elapsed time."""
        seconds = ended - self._at
        spent = [now - then for now, then in zip(self._read_cpu(), self._cpu, strict=True)]
        return seconds, spent[0], max(spent[1:], default=0.0) / seconds


def _cost_fields(streamed: Streamed) -> Row:
    return {
        "streams": len(streamed.answers),
        "cpu_us": streamed.cpu_seconds / streamed.num_tokens * 1e6,
        "cpu_share": streamed.cpu_seconds / streamed.seconds,
        "tokens_per_s": streamed.num_tokens / streamed.seconds,
        "load_share": streamed.load_share,
    }


def _latency_fields(streamed: Streamed) -> Row:
    """Return the cost, and how long tokens were on their way."""
    row = _cost_fields(streamed) | _percentile_fields("added", added_seconds(streamed))
    if streamed.text_spans:
        if beside := added_beside_texts(streamed):
            row |= _percentile_fields("beside_text", beside)
        row["text_ms"] = median(ended - began for began, ended in streamed.text_spans) * 1e3
    return row


def _percentile_fields(name: str, seconds: list[float]) -> Row:
    return {
        f"{name}_{suffix}_ms": float(np.percentile(seconds, percent)) * 1e3
        for suffix, percent in (("p50", 50), ("p99", 99), ("max", 100))
    }


def rate_of_all(streamed: Streamed) -> float:
    """Return the tokens per second that came while all streams ran, from when the last stream had
    begun until the first was complete. Without such a time use the whole measurement.

    An event does not say how many tokens it has, so we estimate them by the length of its text,
    which is the same prose everywhere.
    """
    end = min(answer.times[-1] for answer in streamed.answers)
    if end <= streamed.begun_at:
        return streamed.num_tokens / streamed.seconds
    came = np.concatenate([answer.times for answer in streamed.answers])
    characters = np.concatenate([answer.characters for answer in streamed.answers])
    counts = (came >= streamed.begun_at) & (came < end)
    share = characters[counts].sum() / characters.sum()
    return float(share) * streamed.num_tokens / (end - streamed.begun_at)


def added_seconds(streamed: Streamed) -> list[float]:
    """Return the time from sending to arrival of each token that a node sent once all streams had
    begun, or of all tokens if there is none."""
    sent, added = _sent_and_added(streamed)
    counts = sent >= streamed.begun_at
    return list(map(float, added[counts] if counts.any() else added))


def added_beside_texts(streamed: Streamed) -> list[float]:
    """Return the added times of tokens sent while a long text was under way."""
    sent, added = _sent_and_added(streamed)
    counts = np.zeros(len(sent), bool)
    for began, ended in streamed.text_spans:
        counts |= (sent >= began) & (sent <= ended)
    return list(map(float, added[counts]))


def _sent_and_added(streamed: Streamed) -> tuple[FloatArray, FloatArray]:
    """Return when each token was sent and how long it took to arrive."""
    came: list[float] = []
    sent: list[float] = []
    for name, answer in zip(streamed.names, streamed.answers, strict=True):
        # Chats and `/generate` keep the request's name; `/v1/completions` numbers its prompts.
        own = streamed.sent[name] if name in streamed.sent else streamed.sent[f"{name}_0"]
        sent += own
        came += find_arrivals(answer, own)
    times = np.array(sent)
    return times, np.array(came) - times


def find_arrivals(answer: BenchCompletion, sent: Sequence[float]) -> list[float]:
    """Find when each of the tokens arrived that were sent at these times.

    An event does not say how many tokens its text has. If it has more than we counted, the others
    are tokens that were sent after the previous event had arrived, or before the first event.
    """
    came = [answer.times[0]] * len(sent)
    left, later = len(sent), answer.times[-1]
    for at, count in zip(reversed(answer.times), reversed(answer.counts), strict=True):
        while left and sent[left - 1] > at:
            left -= 1
            came[left] = later
        first = max(0, left - count)
        came[first:left] = [at] * (left - first)
        left, later = first, at
    return came


# ---- results


def median_row(rows: Sequence[Row]) -> Row:
    """Return the medians of the same row in several rounds."""
    return {
        name: round(median([cast("float", row[name]) for row in rows]), 3)
        if isinstance(value, float)
        else value
        for name, value in rows[0].items()
    }


def show_rows(rows: Sequence[Row]) -> None:
    """Print rows with names and numbers."""
    for row in rows:
        numbers: list[Any] = [f"{k} {v}" for k, v in row.items() if k not in ("work", "system")]
        print(f"{row['work']:18} {row['system']:10} {', '.join(numbers)}", flush=True)
