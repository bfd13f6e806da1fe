"""`pd-bench proxy`: what the proxy costs, in front of nodes that answer at a programmed rate.

The proxy is a process of its own, started as `pd-launch proxy`; so are its nodes, which have no
model, and its clients. Processor time is that of all the proxy's threads, as the kernel counts it.

`request`: prompts of 16 token ids that are answered with one token and not streamed, 8 at a time.
`stream`: `--streams` streams get a token every `--step` milliseconds; each token is detokenized,
searched for a stop string and sent as an event of its own. Processor time counts from when all have
begun, since `request` says what beginning costs. `added` is the time from when a node sent a token
until its event's last byte had reached the client, of tokens that were sent when all streams had
begun. `stream with ids`: events have the token ids, too, which are written anew for each event.
`chat`: the streams as chats (`/v1/chat/completions`), whose prompts are written by the chat
template and tokenized. `/generate`: the streams by that endpoint, whose events have times as well;
`whole`: each event has the whole answer so far. `long text`: the streams while a text of 32k tokens
arrives every half second, of which no two have a passage in common; `text` is how long they took,
and `beside_text` is the added time of those tokens that were sent meanwhile. `saturated requests`:
requests, 64 at a time, to two nodes at a sixteenth of the step, and `saturated`: four times as many
streams of these nodes, eight times as long, are more than one process can carry. With `--workers N`
also N times as many requests, streams and nodes, and N processes of the proxy. Tokens a second are
those that came while all streams ran.

`load_share` is the processor time of the busiest client or node, by elapsed time: near 1 it is the
load that is measured, and `--clients` has to be raised.

Beside it, in the same rounds: a bare FastAPI POST, uvicorn sending as many chunks through an ASGI
application, and bare transports writing them; and routers, if there are any (`pip install
sglang-router smg`), which pass bytes on from the first and the last of these and neither tokenizes
nor detokenizes. Numbers are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

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
from pd.bench.proxy_processes import Running, proxy_in_front, router_in_front, started
from pd.bench.report import Row, add_output, check_output, write_report
from pd.bench.serve_client import BenchCompletion
from pd.core.errors import NodeFailedError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]

Fields = dict[str, Any]

_CONNECTIONS, _CONNECTIONS_SATURATED = 8, 64
# Programs of SGLang's gateway, the older and the newer one.
ROUTERS = ("sglang-router", "smg")
# Further fields of a request. Routers take no token ids, and want a model's name.
NO_FIELDS: Fields = {}
_ROUTED: Fields = {"prompt": "a prompt of sixteen tokens or so, as a text", "model": "floor"}
_LONG_TOKENS, _LONG_EVERY = 32_768, 0.5
_CHARACTERS_PER_TOKEN = 4
_STOP = "never said"
# Streams that are measured one after the other: name of the work, further fields of the requests,
# and their form. Events of `stream` and `chat` are written from a prepared template.
_STREAMS: list[tuple[str, Fields, Form]] = [
    ("stream", {}, "completions"),
    ("stream with ids", {"return_token_ids": True}, "completions"),
    ("chat", {}, "chat"),
    ("/generate", {}, "generate"),
    ("/generate, whole", {}, "generate, whole"),
]
# Requests of `saturated requests` for each of `--requests`.
_SATURATED_REQUESTS = 8
# Clients for each process of a proxy, where there are several.
_CLIENTS_PER_WORKER = 2
EXAMPLES = """\
examples:
  pd-bench proxy --output proxy.json
  pd-bench proxy --streams 256 --step 10 --rounds 3
  pd-bench proxy --workers 4 --work saturated     # on a host with 16 cores or more
"""
# What can be measured; the floors of requests and streams go with these.
WORK = ("request", "stream", "saturated")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--streams", type=int, default=64, metavar="N", help="streams at a time")
    add("--tokens", type=int, default=200, metavar="N", help="tokens of each")
    add("--step", type=float, default=20.0, metavar="MS", help="between two tokens of a stream")
    add("--requests", type=int, default=400, metavar="N", help="requests that are not streamed")
    add("--rounds", type=int, default=5, metavar="N", help="medians are over so many")
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
        help=f"routers that pass bytes on (default: {' and '.join(ROUTERS)}, if on the path)",
    )
    add_output(parser)


class Load(NamedTuple):
    """The load that is put on everything that is measured.

    Attributes:
        step: seconds between two tokens of a stream.
        requests: number of requests that are not streamed.
    """

    streams: int
    tokens: int
    step: float
    requests: int


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. ``args`` has also the whole ``command_line``."""
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
        rounds.append(measure_round(load, args.work, workers, clients, args.router))
    rows = [median_row(rows) for rows in zip(*rounds, strict=True)]
    show(rows)
    if args.output is not None:
        command = shlex.join(["pd-bench", *args.command_line])
        measured = ["pd/proxy", "pd/core", "pd/bench"]
        write_report(args.output, command, rows, measured=measured, machine=_event_loop())
    return 0


def _event_loop() -> dict[str, object]:
    """The version of uvloop, which the proxy and the floors use if it is there."""
    try:
        return {"uvloop": metadata.version("uvloop")}
    except metadata.PackageNotFoundError:
        return {}


@contextmanager
def load_processes(count: int) -> Iterator[list[Running]]:
    """Processes of :mod:`pd.bench.proxy_load`."""
    with ExitStack() as stack:
        yield [stack.enter_context(started("pd.bench.proxy_load")) for _ in range(count)]


def measure_round(
    load: Load,
    work: Collection[str] = WORK,
    workers: int = 1,
    num_clients: int = 1,
    routers: Sequence[str] = (),
) -> list[Row]:
    """Rows of one round: the floors, the routers if there are any, and the proxy."""
    rows: list[Row] = []
    with load_processes(num_clients + 1) as (texts, *clients):
        if "request" in work:
            rows += _measure_request_floors(load, routers)
        if "stream" in work:
            rows += _measure_stream_floors(load, clients, routers)
        if set(work) & {"request", "stream"}:
            with proxy_in_front(load.step) as (proxy, nodes):
                if "request" in work:
                    found = measure_requests(proxy, load.requests)
                    rows.append({"work": "request", "system": "pd"} | found)
                if "stream" in work:
                    asked = (proxy, nodes, clients, load.streams, load.tokens)
                    for name, more, form in _STREAMS:
                        streamed = run_streams(*asked, more=more, form=form)
                        rows.append({"work": name, "system": "pd"} | _latency(streamed))
                    streamed = run_streams(*asked, texts=texts)
                    rows.append({"work": "long text", "system": "pd"} | _latency(streamed))
        for count in dict.fromkeys([1, workers]) if "saturated" in work else ():
            rows += _saturate(load, clients, count)
    return rows


def _saturate(load: Load, clients: Sequence[Running], workers: int) -> list[Row]:
    """Rows of more requests, and of more streams, than so many processes of the proxy can carry."""
    several: Row = {"workers": workers} if workers > 1 else {}
    # Two nodes for each process, so that no node is what limits.
    with proxy_in_front(load.step / 16, workers=workers, nodes=2 * workers) as (proxy, nodes):
        asked = _saturate_with_requests(proxy, nodes, clients, load.requests, workers)
        streams, tokens = 4 * workers * load.streams, 8 * load.tokens
        streamed = run_streams(proxy, nodes, clients, streams, tokens, warm=False)
    row: Row = {"work": "saturated", "system": "pd"} | several
    return [
        {"work": "saturated requests", "system": "pd"} | several | asked,
        row | _cost(streamed) | {"tokens_per_s": rate_of_all(streamed)},
    ]


def _saturate_with_requests(
    proxy: Running,
    nodes: Sequence[Running],
    clients: Sequence[Running],
    count: int,
    workers: int,
) -> Row:
    """Requests on so many connections that a node's step does not limit their rate."""
    connections = max(1, workers * _CONNECTIONS_SATURATED // len(clients))
    count = max(1, workers * _SATURATED_REQUESTS * count // len(clients))
    for share in (10, 1):  # the first warms up
        meter = _Meter(proxy, nodes)
        for client in clients:
            client.tell(Requests(proxy.url, count // share + 1, connections, NO_FIELDS))
        answered = [client.hear(Answered) for client in clients]
    total = len(clients) * (count + 1)
    seconds, cpu, node_share = meter.read(max(each.ended for each in answered))
    return {
        "connections": connections * len(clients),
        "cpu_us": cpu / total * 1e6,
        "cpu_share": cpu / seconds,
        "requests_per_s": total / seconds,
        "load_share": max(node_share, *(each.cpu_share for each in answered)),
    }


def _measure_request_floors(load: Load, routers: Sequence[str]) -> list[Row]:
    """Rows of a server that does less than a proxy, and of routers before it."""
    rows: list[Row] = []
    with started("pd.bench.proxy_floors", "fastapi", "0") as floor:
        found = measure_requests(floor, load.requests)
        rows.append({"work": "request", "system": "fastapi"} | found)
        for router in routers:
            with router_in_front(router, floor) as front:
                found = measure_requests(front, load.requests, _ROUTED)
                rows.append({"work": "request", "system": Path(router).name} | found)
    return rows


def _measure_stream_floors(
    load: Load, clients: Sequence[Running], routers: Sequence[str]
) -> list[Row]:
    """Rows of servers that do less than a proxy, and of routers before the last of them."""
    rows: list[Row] = []
    for kind in KINDS[1:]:
        with started("pd.bench.proxy_floors", kind, str(load.step)) as floor:
            streamed = run_streams(floor, [], clients, load.streams, load.tokens)
            rows.append({"work": "stream", "system": kind} | _cost(streamed))
            for router in routers if kind == "transport" else ():
                with router_in_front(router, floor) as front:
                    streamed = run_streams(
                        front, [], clients, load.streams, load.tokens, more=_ROUTED
                    )
                    rows.append({"work": "stream", "system": Path(router).name} | _cost(streamed))
    return rows


# ---- requests


def measure_requests(server: Running, count: int, more: Fields = NO_FIELDS) -> Row:
    """Processor time and rate of requests that are not streamed."""
    asyncio.run(ask_all(server.url, count // 10 + 1, _CONNECTIONS, more))  # warms up
    cpu, began = server.cpu_seconds, time.perf_counter()
    asyncio.run(ask_all(server.url, count, _CONNECTIONS, more))
    took, cpu = time.perf_counter() - began, server.cpu_seconds - cpu
    return {"cpu_us": cpu / count * 1e6, "requests_per_s": count / took}


# ---- streams


class Streamed(msgspec.Struct):
    """Answers to streams that ran at the same time, and what they cost.

    Attributes:
        begun_at: when the last of them had begun, by ``time.perf_counter``.
        num_tokens: those of which ``cpu_seconds`` and ``seconds`` are.
        load_share: processor time of the busiest client or node, by elapsed time.
        sent: when the nodes sent tokens, by request.
        text_spans: when each long text was sent and when it was answered.
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
    """Streams that begin together, and what they cost. Raises NodeFailedError if one fails.

    Args:
        clients: processes of :mod:`pd.bench.proxy_load` which share the streams.
        texts: one more, which sends long texts from when all streams have begun.
        warm: count from when all have begun.
        more: further fields of the requests.
        form: see :class:`pd.bench.proxy_load.Streams`.
    """
    for node in nodes:
        node.ask()  # forgets what came before
    names = [f"stream-{time.monotonic_ns()}-{number}" for number in range(streams)]
    parts = [names[number :: len(clients)] for number in range(min(len(clients), streams))]
    clients = clients[: len(parts)]
    meter, before = _Meter(server, nodes), 0
    for client, part in zip(clients, parts, strict=True):
        fields: Fields = {"stop": [_STOP]}
        if form in ("completions", "chat"):
            fields |= {"return_token_ids": False} | more
        client.tell(Streams(server.url, part, tokens, fields, form))
    begun = [client.hear(Begun) for client in clients]
    if warm:
        # Until now every event has had one token.
        meter, before = _Meter(server, nodes), sum(each.events for each in begun)
    if texts is not None:
        characters = _CHARACTERS_PER_TOKEN * _LONG_TOKENS
        texts.tell(LongTexts(server.url, characters, _LONG_EVERY))
    ended = [client.hear(Ended) for client in clients]
    # They read what they got when all had ended.
    seconds, cpu, node_share = meter.read(max(each.at for each in ended))
    found = Streamed(
        answers=[answer for each in ended for answer in each.answers],
        names=[name for part in parts for name in part],
        begun_at=max(each.at for each in begun),
        cpu_seconds=cpu,
        seconds=seconds,
        num_tokens=max(1, streams * tokens - before),
        load_share=max(node_share, *(each.cpu_share for each in ended)),
    )
    if texts is not None:
        texts.tell(None)
        found.text_spans = texts.hear(Texts).spans
    for node in nodes:
        found.sent |= node.ask()
    for answer in found.answers:
        if answer.error is not None:
            raise NodeFailedError(answer.error)
    return found


class _Meter:
    """Time and processor time since it was made."""

    def __init__(self, server: Running, nodes: Sequence[Running]) -> None:
        self._server, self._nodes = server, nodes
        self._at, self._cpu = time.perf_counter(), self._read_cpu()

    def _read_cpu(self) -> list[float]:
        return [process.cpu_seconds for process in (self._server, *self._nodes)]

    def read(self, ended: float) -> tuple[float, float, float]:
        """Seconds until ``ended``, the server's processor time, and that of the busiest node by
        elapsed time."""
        seconds = ended - self._at
        spent = [now - then for now, then in zip(self._read_cpu(), self._cpu, strict=True)]
        return seconds, spent[0], max(spent[1:], default=0.0) / seconds


def _cost(found: Streamed) -> Row:
    return {
        "streams": len(found.answers),
        "cpu_us": found.cpu_seconds / found.num_tokens * 1e6,
        "cpu_share": found.cpu_seconds / found.seconds,
        "tokens_per_s": found.num_tokens / found.seconds,
        "load_share": found.load_share,
    }


def _latency(found: Streamed) -> Row:
    """The cost, and how long tokens were on their way."""
    row = _cost(found) | _percentiles("added", added_seconds(found))
    if found.text_spans:
        if beside := added_beside_texts(found):
            row |= _percentiles("beside_text", beside)
        row["text_ms"] = median(ended - began for began, ended in found.text_spans) * 1e3
    return row


def _percentiles(name: str, seconds: list[float]) -> Row:
    return {
        f"{name}_{suffix}_ms": float(np.percentile(seconds, percent)) * 1e3
        for suffix, percent in (("p50", 50), ("p99", 99), ("max", 100))
    }


def rate_of_all(found: Streamed) -> float:
    """Tokens a second that came while all streams ran: from when the last had begun until the first
    had all. Of the whole time, if there was no such moment.

    Events that hold several tokens do not tell how many. Text does: all of it is the same prose.
    """
    end = min(answer.times[-1] for answer in found.answers)
    if end <= found.begun_at:
        return found.num_tokens / found.seconds
    came = np.concatenate([answer.times for answer in found.answers])
    characters = np.concatenate([answer.characters for answer in found.answers])
    counts = (came >= found.begun_at) & (came < end)
    share = characters[counts].sum() / characters.sum()
    return float(share) * found.num_tokens / (end - found.begun_at)


def added_seconds(found: Streamed) -> list[float]:
    """Time from a node's sending of each token until it had come, for every token that was sent
    when all streams had begun; for all tokens if there is none."""
    sent, added = _sent_and_added(found)
    counts = sent >= found.begun_at
    return list(map(float, added[counts] if counts.any() else added))


def added_beside_texts(found: Streamed) -> list[float]:
    """Return the added times of the tokens that were sent while a long text was under way."""
    sent, added = _sent_and_added(found)
    counts = np.zeros(len(sent), bool)
    for began, ended in found.text_spans:
        counts |= (sent >= began) & (sent <= ended)
    return list(map(float, added[counts]))


def _sent_and_added(found: Streamed) -> tuple[FloatArray, FloatArray]:
    """When each token was sent, and how long it took to come."""
    came: list[float] = []
    sent: list[float] = []
    for name, answer in zip(found.names, found.answers, strict=True):
        # A chat and a single prompt of `/generate` have the request's name, the first prompt of
        # `/v1/completions` one made of it.
        own = found.sent[name] if name in found.sent else found.sent[f"{name}_0"]
        sent += own
        came += arrivals(answer, own)
    times = np.array(sent)
    return times, np.array(came) - times


def arrivals(answer: BenchCompletion, sent: Sequence[float]) -> list[float]:
    """When each of the tokens came that were sent at these times.

    Events do not tell how many tokens their text is. One that holds more than are counted holds
    those that were sent after the event before it had come, or that came before all others.
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
    """The medians of the numbers of the same row in several rounds."""
    first = rows[0]
    return {
        name: round(median([_number(row[name]) for row in rows]), 3)
        if isinstance(value, float)
        else value
        for name, value in first.items()
    }


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return float(value)


def show(rows: Sequence[Row]) -> None:
    """Print rows with their numbers by name."""
    for row in rows:
        numbers: list[Any] = [f"{k} {v}" for k, v in row.items() if k not in ("work", "system")]
        print(f"{row['work']:18} {row['system']:10} {', '.join(numbers)}", flush=True)
