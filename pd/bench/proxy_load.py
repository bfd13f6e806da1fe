"""Clients for ``pd-bench proxy``: ``python -m pd.bench.proxy_load``, a process that asks a server.

Each line of standard input is a script in JSON, and is answered with lines of JSON on standard
output: :class:`Streams` with :class:`Begun` and :class:`Ended`, :class:`LongTexts` with
:class:`Texts`. Several such processes share a load that is too much for one.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from pd.bench.serve_client import BenchCompletion, Server
from pd.core.errors import NodeFailedError
from pd.proxy.loop import run_loop

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = list(range(100, 116))
# What answers and long texts consist of: prose, so that pieces of text are of the usual lengths.
PROSE = "The proxy routes each request to a prefill node, which hands its keys and values over. "
_POLL_SECONDS = 0.002


class Script(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what a process is asked to do."""

    url: str


class Streams(Script, frozen=True, tag=True):
    """Streams that begin together.

    Attributes:
        names: ids of the requests, one stream for each.
        tokens: that each asks for.
        fields: further fields of the requests.
    """

    names: list[str]
    tokens: int
    fields: dict[str, Any]


class LongTexts(Script, frozen=True, tag=True):
    """Long texts, each answered with one token, until the next line of standard input.

    Attributes:
        characters: of a text. No two texts begin alike.
        every: seconds from one to the next.
    """

    characters: int
    every: float


class Begun(msgspec.Struct, frozen=True):
    """All streams of a process have had an event, or have ended.

    Attributes:
        at: when, by ``time.perf_counter``, which all processes share.
        events: that came so far.
    """

    at: float
    events: int


class Ended(msgspec.Struct, frozen=True):
    """The streams' answers, in the order of their names.

    Attributes:
        at: when the last of them ended, by ``time.perf_counter``.
        cpu_share: processor time of this process by elapsed time, since all streams had begun.
    """

    at: float
    answers: list[BenchCompletion]
    cpu_share: float


class Texts(msgspec.Struct, frozen=True):
    """Seconds until the answer to each long text."""

    seconds: list[float]


Answer = Begun | Ended | Texts


async def run_streams(script: Streams, tell: Callable[[Answer], None]) -> None:
    """Ask for streams, and tell when all have begun and when all have ended."""
    server = Server(script.url, None)
    requests = [
        server.request(PROMPT, script.tokens, more=script.fields | {"rid": name})
        for name in script.names
    ]
    receptions = await asyncio.gather(*(server.start(request) for request in requests))
    while not all(reception.events or reception.ended.done() for reception in receptions):
        await asyncio.sleep(_POLL_SECONDS)
    began, cpu = time.perf_counter(), time.process_time()
    tell(Begun(began, sum(reception.events for reception in receptions)))
    await asyncio.gather(*(reception.ended for reception in receptions))
    ended = time.perf_counter()
    share = (time.process_time() - cpu) / (ended - began)
    tell(Ended(ended, [reception.completion() for reception in receptions], share))


def send_long_texts(script: LongTexts, tell: Callable[[Answer], None]) -> None:
    """Ask for one token after a long text, again and again."""
    prose = (PROSE * (script.characters // len(PROSE) + 1))[: script.characters]
    server = Server(script.url, None)
    found: list[float] = []
    wait = 0.0
    while not found or not select.select([sys.stdin], [], [], wait)[0]:
        began = time.perf_counter()
        _ask(server, {"prompt": f"{len(found)}. {prose}", "max_tokens": 1})
        found.append(time.perf_counter() - began)
        wait = max(0.0, script.every - found[-1])
    sys.stdin.readline()
    tell(Texts(found))


def _ask(server: Server, fields: dict[str, Any]) -> None:
    """Raises NodeFailedError unless the answer has status 200."""
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(head.encode() + body)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    if not answer.startswith(b"HTTP/1.1 200"):
        raise NodeFailedError(f"a long text was answered with {answer[:40]!r}")


def _tell(answer: Answer) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


def main() -> None:
    """Do what each line of standard input says, until it ends."""
    _tell_ready()
    while line := sys.stdin.readline():
        script = msgspec.json.decode(line, type=Streams | LongTexts)
        if isinstance(script, Streams):
            run_loop(run_streams(script, _tell))
        else:
            send_long_texts(script, _tell)


def _tell_ready() -> None:
    print(json.dumps({"event": "ready", "url": ""}), flush=True)


if __name__ == "__main__":
    main()
