"""Clients for ``pd-bench proxy``: ``python -m pd.bench.proxy_load``, a process that asks a server.

Each line of standard input is a script in JSON, and is answered with lines of JSON on standard
output: :class:`Streams` with :class:`Begun` and :class:`Ended`, :class:`Requests` with
:class:`Answered`, :class:`LongTexts` with :class:`Texts`. Several such processes share a load that
is too much for one.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pd.bench.serve_client import BenchCompletion, Server
from pd.core.errors import NodeFailedError
from pd.proxy.loop import run_loop

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = list(range(100, 116))
# What answers and long texts consist of: prose, so that pieces of text are of the usual lengths.
PROSE = "The proxy routes each request to a prefill node, which hands its keys and values over. "
_WORDS = PROSE.split()
Form = Literal["completions", "chat", "generate", "generate, whole"]
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
        form: where the requests go. Events of ``/generate`` hold only what is new, or all so far
            (``generate, whole``).
    """

    names: list[str]
    tokens: int
    fields: dict[str, Any]
    form: Form = "completions"


class Requests(Script, frozen=True, tag=True):
    """Requests that are not streamed, each answered with one token.

    Attributes:
        count: of all requests.
        connections: that are kept, with a request at a time on each.
        fields: further fields of the requests.
    """

    count: int
    connections: int
    fields: dict[str, Any]


class LongTexts(Script, frozen=True, tag=True):
    """Long texts, each answered with one token, until the next line of standard input.

    Attributes:
        characters: of a text. No two texts have a passage in common.
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


class Answered(msgspec.Struct, frozen=True):
    """All requests have been answered.

    Attributes:
        began: when they began, by ``time.perf_counter``; ``ended``: when the last was answered.
        cpu_share: processor time of this process by elapsed time.
    """

    began: float
    ended: float
    cpu_share: float


class Texts(msgspec.Struct, frozen=True):
    """When each long text was sent and when it was answered, by ``time.perf_counter``."""

    spans: list[tuple[float, float]]


Answer = Begun | Ended | Answered | Texts


def random_prose(seed: int, characters: int) -> str:
    """Words of prose in random order, so that no two texts have a passage in common."""
    rng = random.Random(seed)
    # No word is shorter than one letter and a space.
    return " ".join(rng.choices(_WORDS, k=characters // 2))[:characters]


async def run_streams(script: Streams, tell: Callable[[Answer], None]) -> None:
    """Ask for streams, and tell when all have begun and when all have ended."""
    server = Server(script.url, None)
    requests = [_stream_request(server, script, name) for name in script.names]
    receptions = await asyncio.gather(*(server.start(request) for request in requests))
    while not all(reception.events or reception.ended.done() for reception in receptions):
        await asyncio.sleep(_POLL_SECONDS)
    began, cpu = time.perf_counter(), time.process_time()
    tell(Begun(began, sum(reception.events for reception in receptions)))
    await asyncio.gather(*(reception.ended for reception in receptions))
    ended = time.perf_counter()
    share = (time.process_time() - cpu) / (ended - began)
    tell(Ended(ended, [reception.completion() for reception in receptions], share))


def _stream_request(server: Server, script: Streams, name: str) -> bytes:
    more = script.fields | {"rid": name}
    if script.form == "completions":
        return server.request(PROMPT, script.tokens, more=more)
    if script.form == "chat":
        return server.chat_request(PROSE, script.tokens, more=more)
    sampling = {"max_new_tokens": script.tokens, "temperature": 0, "ignore_eos": True}
    incremental = script.form == "generate"
    fields = {"input_ids": PROMPT, "stream": True, "incremental": incremental, "rid": name}
    return server.post("/generate", fields | {"sampling_params": sampling | script.fields})


async def run_requests(script: Requests) -> Answered:
    """Ask for one token after a short prompt, again and again."""
    began, cpu = time.perf_counter(), time.process_time()
    await ask_all(script.url, script.count, script.connections, script.fields)
    ended = time.perf_counter()
    return Answered(began, ended, (time.process_time() - cpu) / (ended - began))


async def ask_all(url: str, count: int, connections: int, more: dict[str, Any]) -> None:
    """Ask ``count`` times over connections that are kept. Raises NodeFailedError unless each answer
    has status 200."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0} | more).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    left = iter(range(count))

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in left:
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise NodeFailedError(f"{url} answered {answer[:40]!r}")
            length = answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))


def send_long_texts(script: LongTexts, tell: Callable[[Answer], None]) -> None:
    """Ask for one token after a long text, again and again."""
    server = Server(script.url, None)
    found: list[tuple[float, float]] = []
    wait = 0.0
    while not found or not select.select([sys.stdin], [], [], wait)[0]:
        prose = random_prose(len(found), script.characters)
        began = time.perf_counter()
        _ask(server, {"prompt": prose, "max_tokens": 1})
        ended = time.perf_counter()
        found.append((began, ended))
        wait = max(0.0, began + script.every - ended)
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
        script = msgspec.json.decode(line, type=Streams | Requests | LongTexts)
        if isinstance(script, Streams):
            run_loop(run_streams(script, _tell))
        elif isinstance(script, Requests):
            _tell(run_loop(run_requests(script)))
        else:
            send_long_texts(script, _tell)


def _tell_ready() -> None:
    print(json.dumps({"event": "ready", "url": ""}), flush=True)


if __name__ == "__main__":
    main()
