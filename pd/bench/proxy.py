"""`pd-bench proxy`: what the proxy costs, in front of nodes that answer at a programmed rate.

The proxy is a process of its own, started as `pd-launch proxy`; so are its nodes, which have no
model. Processor time is that of all the proxy's threads, as the kernel counts it.

`request`: prompts of 16 token ids that are answered with one token and not streamed, 8 at a time.
`stream`: `--streams` streams get a token every `--step` milliseconds; each token is detokenized,
searched for a stop string and sent as an event of its own. Processor time counts from when all have
begun, since `request` says what beginning costs. `added` is the time from when a node
sent a token until its event's last byte had reached the client. `long text`: the streams while a
text of 32k tokens arrives every half second. `saturated`: four times as many streams, four times as
long, at a fifth of the step, which is more than one process can carry, with their beginning.

Beside it, in the same rounds: a bare FastAPI POST, uvicorn sending as many chunks through an ASGI
application, and bare transports writing them; and SGLang's router, if there is one (`pip install
sglang-router`), which passes bytes on from the first and the last of these and neither tokenizes
nor detokenizes. Numbers are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np

from pd.bench.proxy_floors import KINDS
from pd.bench.proxy_nodes import NodeScript
from pd.bench.report import Row, add_output, check_output, write_report
from pd.bench.serve_client import BenchCompletion, Server
from pd.core.errors import NodeFailedError, SetupError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence


Fields = dict[str, Any]

_CONNECTIONS = 8
_PROMPT = list(range(100, 116))
# Further fields of a request. The router takes no token ids, and wants a model's name.
NO_FIELDS: Fields = {}
_ROUTED: Fields = {"prompt": "a prompt of sixteen tokens or so, as a text", "model": "floor"}
_LONG_TOKENS, _LONG_EVERY = 32_768, 0.5
_START_SECONDS = 60.0
_POLL_SECONDS = 0.002
# What the answers consist of: prose, so that pieces of text are of the usual lengths.
_PROSE = "The proxy routes each request to a prefill node, which hands its keys and values over. "
_STOP = "never said"
EXAMPLES = """\
examples:
  pd-bench proxy --output proxy.json
  pd-bench proxy --streams 256 --step 10 --rounds 3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--streams", type=int, default=64, metavar="N", help="streams at a time")
    add("--tokens", type=int, default=200, metavar="N", help="tokens of each")
    add("--step", type=float, default=20.0, metavar="MS", help="between two tokens of a stream")
    add("--requests", type=int, default=400, metavar="N", help="requests that are not streamed")
    add("--rounds", type=int, default=5, metavar="N", help="medians are over so many")
    add(
        "--router",
        default=shutil.which("sglang-router"),
        metavar="PROGRAM",
        help="SGLang's router (default: sglang-router, if it is on the path)",
    )
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. ``args`` has also the whole ``command_line``."""
    if min(args.streams, args.tokens, args.requests, args.rounds) < 1 or args.step <= 0:
        raise UsageError("--streams, --tokens, --requests, --rounds and --step must be above 0")
    check_output(args.output)
    step = args.step / 1e3
    rounds: list[list[Row]] = []
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        rounds.append(measure_round(args.streams, args.tokens, step, args.requests, args.router))
    rows = [_median_row(rows) for rows in zip(*rounds, strict=True)]
    show(rows)
    if args.output is not None:
        command = shlex.join(["pd-bench", *args.command_line])
        write_report(args.output, command, rows, measured=["pd/proxy", "pd/core", "pd/bench"])
    return 0


def measure_round(
    streams: int, tokens: int, step: float, requests: int, router: str | None = None
) -> list[Row]:
    """Rows of one round: the floors, the router if there is one, and the proxy."""
    rows: list[Row] = []
    routed: Row = {"system": "sglang-router"}
    with started("pd.bench.proxy_floors", "fastapi", "0") as floor:
        rows.append({"work": "request", "system": "fastapi"} | measure_requests(floor, requests))
        if router is not None:
            with router_in_front(router, floor) as front:
                found = measure_requests(front, requests, _ROUTED)
                rows.append({"work": "request"} | routed | found)
    for kind in KINDS[1:]:
        with started("pd.bench.proxy_floors", kind, str(step)) as floor:
            streamed = asyncio.run(run_streams(floor, streams, tokens))
            rows.append({"work": "stream", "system": kind} | _cost(streamed))
            if router is not None and kind == "transport":
                with router_in_front(router, floor) as front:
                    streamed = asyncio.run(run_streams(front, streams, tokens, more=_ROUTED))
                    rows.append({"work": "stream"} | routed | _cost(streamed))
    with proxy_in_front(step) as (proxy, node):
        rows.append({"work": "request", "system": "pd"} | measure_requests(proxy, requests))
        rows.append(_stream_row("stream", proxy, node, streams, tokens))
        rows.append(_stream_row("long text", proxy, node, streams, tokens, long_text=True))
    with proxy_in_front(step / 5) as (proxy, _):
        streamed = asyncio.run(run_streams(proxy, 4 * streams, 4 * tokens, warm=False))
        rows.append({"work": "saturated", "system": "pd"} | _cost(streamed))
    return rows


# ---- processes


class Running:
    """A process that listens."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all threads that live."""
        total = 0
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
        return total * 1e-9

    def ask(self) -> dict[str, list[float]]:
        """What a scripted node sent since it was asked last: times by request."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        sent: dict[str, list[float]] = json.loads(self.process.stdout.readline())
        return sent


@contextmanager
def started(module: str, *arguments: str, first_line: str = "") -> Iterator[Running]:
    """A Python process, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        if first_line:
            assert process.stdin is not None
            process.stdin.write(first_line + "\n")
            process.stdin.flush()
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SetupError(f"{module} {shlex.join(arguments)} did not start")
        yield Running(process, str(json.loads(line)["url"]))
    finally:
        process.kill()
        process.wait()


@contextmanager
def router_in_front(program: str, worker: Running) -> Iterator[Running]:
    """SGLang's router before a server. Raises SetupError if it does not serve."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [program, "launch", "--worker-urls", worker.url, "--host", "127.0.0.1"]
    command += ["--port", port, "--policy", "round_robin", "--log-level", "error"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    )
    try:
        running = Running(process, f"http://127.0.0.1:{port}")
        _wait_until_ready(f"{running.url}/readiness", program)
        yield running
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(url: str, name: str) -> None:
    """Wait for an answer of status 200. Raises SetupError if none comes in time."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise SetupError(f"{name} was not ready within {_START_SECONDS:g} s")
        time.sleep(0.05)


@contextmanager
def proxy_in_front(step: float) -> Iterator[tuple[Running, Running]]:
    """A proxy that is ready, and its scripted node."""
    from tokenizers import Tokenizer

    from pd.embedded import EMBEDDED_MODEL

    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    script = NodeScript(
        model_path=str(EMBEDDED_MODEL),
        vocab_size=tokenizer.get_vocab_size(),
        context_length=1 << 17,
        token_ids=tokenizer.encode(_PROSE, add_special_tokens=False).ids,
        step_seconds=step,
    )
    with ExitStack() as stack:
        line = msgspec.json.encode(script).decode()
        node = stack.enter_context(started("pd.bench.proxy_nodes", first_line=line))
        flags = ["proxy", "--port", "0", "--unified", node.url, "--log-level", "error"]
        proxy = stack.enter_context(started("pd.cli", *flags))
        _wait_until_ready(f"{proxy.url}/readiness", "the proxy")
        yield proxy, node


# ---- requests


def measure_requests(server: Running, count: int, more: Fields = NO_FIELDS) -> Row:
    """Processor time and rate of requests that are not streamed."""
    asyncio.run(_ask_all(server.url, count // 10 + 1, more))  # warms up
    cpu, began = server.cpu_seconds, time.perf_counter()
    asyncio.run(_ask_all(server.url, count, more))
    took, cpu = time.perf_counter() - began, server.cpu_seconds - cpu
    return {"cpu_us": cpu / count * 1e6, "requests_per_s": count / took}


async def _ask_all(url: str, count: int, more: Fields) -> None:
    """Ask ``count`` times over a few connections that are kept."""
    host, port = _address(url)
    body = json.dumps({"prompt": _PROMPT, "max_tokens": 1, "temperature": 0} | more).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    left = iter(range(count))

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for _ in left:
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise NodeFailedError(f"{url} answered {answer[:40]!r}")
            length = answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()

    await asyncio.gather(*(ask() for _ in range(_CONNECTIONS)))


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


# ---- streams


class Streamed(msgspec.Struct):
    """Answers to streams that ran at the same time, and what they cost.

    Attributes:
        num_tokens: those of which ``cpu_seconds`` and ``seconds`` are.
    """

    answers: list[BenchCompletion]
    names: list[str]
    cpu_seconds: float
    seconds: float
    num_tokens: int


async def run_streams(
    server: Running,
    streams: int,
    tokens: int,
    *,
    long_text: bool = False,
    warm: bool = True,
    more: Fields = NO_FIELDS,
) -> Streamed:
    """Streams that begin together, and what they cost. Raises PDError if one fails.

    ``warm``: from when all have begun.
    """
    asked = Server(server.url, None)
    names = [f"stream-{time.monotonic_ns()}-{number}" for number in range(streams)]
    fields = {"stop": [_STOP], "return_token_ids": False} | more
    requests = [asked.request(_PROMPT, tokens, more=fields | {"rid": name}) for name in names]
    cpu, began, before = server.cpu_seconds, time.perf_counter(), 0
    receptions = await asyncio.gather(*(asked.start(request) for request in requests))
    if warm:
        while not all(reception.events or reception.ended.done() for reception in receptions):
            await asyncio.sleep(_POLL_SECONDS)
        cpu, began = server.cpu_seconds, time.perf_counter()
        # Until now every event has had one token.
        before = sum(reception.events for reception in receptions)
    sender = asyncio.create_task(_send_long_texts(server.url)) if long_text else None
    await asyncio.gather(*(reception.ended for reception in receptions))
    seconds, cpu = time.perf_counter() - began, server.cpu_seconds - cpu
    if sender is not None:
        sender.cancel()
    answers = [reception.completion() for reception in receptions]
    for answer in answers:
        if answer.error is not None:
            raise NodeFailedError(answer.error)
    return Streamed(answers, names, cpu, seconds, max(1, streams * tokens - before))


async def _send_long_texts(url: str) -> None:
    """Ask for one token after a long text, again and again."""
    text = (_PROSE * (_LONG_TOKENS // 16))[: 5 * _LONG_TOKENS]
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            body = {"prompt": text, "max_tokens": 1}
            asked = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await asyncio.sleep(_LONG_EVERY)
            await asked


def _cost(found: Streamed) -> Row:
    return {
        "streams": len(found.answers),
        "cpu_us": found.cpu_seconds / found.num_tokens * 1e6,
        "cpu_share": found.cpu_seconds / found.seconds,
        "tokens_per_s": found.num_tokens / found.seconds,
    }


def _stream_row(
    work: str, proxy: Running, node: Running, streams: int, tokens: int, *, long_text: bool = False
) -> Row:
    node.ask()  # forgets what came before
    found = asyncio.run(run_streams(proxy, streams, tokens, long_text=long_text))
    row: Row = {"work": work, "system": "pd"} | _cost(found)
    added = added_seconds(found, node.ask())
    for name, percent in (("p50", 50), ("p99", 99), ("max", 100)):
        row[f"added_{name}_ms"] = float(np.percentile(added, percent)) * 1e3
    return row


def added_seconds(found: Streamed, sent: dict[str, list[float]]) -> list[float]:
    """Time from a node's sending of each token until it had come, for every token."""
    added: list[float] = []
    for name, answer in zip(found.names, found.answers, strict=True):
        # The request's first prompt, of one.
        tokens = iter(sent[f"{name}_0"])
        for came, count in zip(answer.times, answer.counts, strict=True):
            added += [came - next(tokens) for _ in range(count)]
    return added


# ---- results


def _median_row(rows: Sequence[Row]) -> Row:
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
        print(f"{row['work']:10} {row['system']:10} {', '.join(numbers)}", flush=True)
