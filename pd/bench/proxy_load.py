"""Clients for ``pd-bench proxy``: ``python -m pd.bench.proxy_load``.

The process reads scripts, one JSON line each, from standard input, and answers with JSON lines on
standard output: :class:`Streams` with :class:`Begun` and :class:`Ended`, :class:`Requests` with
:class:`Answered`, :class:`LongTexts` with :class:`Texts`. Several such processes can share a
load.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pd.bench.load.endpoints import NativeGenerate
from pd.bench.serve_client import BenchCompletion, Server
from pd.proxy.workers.loop import run_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.bench.serve_client import BenchRequest
PROMPT = list(range(100, 116))
# Answers and long texts consist of prose, so pieces of text have realistic lengths.
PROSE = "The proxy routes each request to a prefill node, which hands its keys and values over. "
_WORDS = PROSE.split()
Form = Literal["completions", "chat", "generate", "generate, whole"]
_POLL_SECONDS = 0.002


class Script(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of the scripts."""

    url: str


class Streams(Script, frozen=True, tag=True):
    """Simultaneous streams.

    Attributes:
        names: ids of the requests, one stream for each.
        tokens: length of each answer.
        fields: further fields of the requests.
        form: endpoint of the requests. Events of ``/generate`` hold only new tokens, or all tokens
            so far (``generate, whole``).
    """

    names: list[str]
    tokens: int
    fields: dict[str, Any]
    form: Form = "completions"


class Requests(Script, frozen=True, tag=True):
    """Requests without streaming, each answered with one token.

    Attributes:
        count: number of requests.
        connections: number of kept connections, each with one request at a time.
        fields: further fields of the requests.
    """

    count: int
    connections: int
    fields: dict[str, Any]


class LongTexts(Script, frozen=True, tag=True):
    """Long texts, each answered with one token, until the next line of standard input.

    Attributes:
        characters: length of a text. No two texts share a passage.
        every: seconds from one text to the next.
    """

    characters: int
    every: float


class Begun(msgspec.Struct, frozen=True):
    """All streams of a process have had an event, or have ended.

    Attributes:
        at: time of ``time.perf_counter``, which all processes share.
        events: number of events so far.
    """

    at: float
    events: int


class Ended(msgspec.Struct, frozen=True):
    """The streams' answers, in the order of their names.

    Attributes:
        at: time of ``time.perf_counter`` at which the last stream ended.
        cpu_share: processor time of this process by elapsed time, since all streams had begun.
    """

    at: float
    answers: list[BenchCompletion]
    cpu_share: float


class Answered(msgspec.Struct, frozen=True):
    """All requests have been answered.

    Attributes:
        began: time of ``time.perf_counter`` at the start; ``ended``: at the last answer.
        cpu_share: processor time of this process by elapsed time.
    """

    began: float
    ended: float
    cpu_share: float


class Texts(msgspec.Struct, frozen=True):
    """When each long text was sent and answered, by ``time.perf_counter``."""

    spans: list[tuple[float, float]]


Answer = Begun | Ended | Answered | Texts


def random_prose(seed: int, characters: int) -> str:
    """Write words of prose in random order, so no two texts share a passage."""
    rng = random.Random(seed)
    # No word is shorter than one letter and a space.
    return " ".join(rng.choices(_WORDS, k=characters // 2))[:characters]


async def run_streams(script: Streams, report: Callable[[Answer], None]) -> None:
    """Ask for streams, and report when all have begun and when all have ended."""
    server = Server(script.url, None)
    requests = [_make_request(server, script, name) for name in script.names]
    receptions = await asyncio.gather(*(server.start_request(request) for request in requests))
    while not all(reception.events or reception.ended.done() for reception in receptions):
        await asyncio.sleep(_POLL_SECONDS)
    began, cpu = time.perf_counter(), time.process_time()
    report(Begun(began, sum(reception.events for reception in receptions)))
    await asyncio.gather(*(reception.ended for reception in receptions))
    ended = time.perf_counter()
    share = (time.process_time() - cpu) / (ended - began)
    report(Ended(ended, [reception.completion() for reception in receptions], share))


def _make_request(server: Server, script: Streams, name: str) -> BenchRequest:
    more = script.fields | {"rid": name}
    if script.form == "completions":
        return server.make_request(PROMPT, script.tokens, more=more)
    if script.form == "chat":
        return server.make_chat_request(PROSE, script.tokens, more=more)
    sampling = {"max_new_tokens": script.tokens, "temperature": 0, "ignore_eos": True}
    incremental = script.form == "generate"
    fields = {"input_ids": PROMPT, "stream": True, "incremental": incremental, "rid": name}
    fields["sampling_params"] = sampling | script.fields
    return server.make_post(NativeGenerate(), fields)


async def run_requests(script: Requests) -> Answered:
    """Ask for one token after a short prompt, repeatedly."""
    began, cpu = time.perf_counter(), time.process_time()
    await ask_all(script.url, script.count, script.connections, script.fields)
    ended = time.perf_counter()
    return Answered(began, ended, (time.process_time() - cpu) / (ended - began))


async def ask_all(url: str, count: int, connections: int, more: dict[str, Any]) -> None:
    """Ask ``count`` times over kept connections. Raises NodeFailedError unless each status is
    200."""
    fields = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0} | more
    await Server(url, None).post_repeatedly(fields, count, connections)


def send_long_texts(script: LongTexts, report: Callable[[Answer], None]) -> None:
    """Ask for one token after a long text, repeatedly."""
    server = Server(script.url, None)
    spans: list[tuple[float, float]] = []
    wait = 0.0
    while not spans or not select.select([sys.stdin], [], [], wait)[0]:
        fields = {"prompt": random_prose(len(spans), script.characters), "max_tokens": 1}
        began = time.perf_counter()
        run_loop(server.post_once(fields))
        ended = time.perf_counter()
        spans.append((began, ended))
        wait = max(0.0, began + script.every - ended)
    sys.stdin.readline()
    report(Texts(spans))


def _write_answer(answer: Answer) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


def main() -> None:
    """Run the script of each line of standard input, until it ends."""
    print(json.dumps({"event": "ready", "url": ""}), flush=True)
    while line := sys.stdin.readline():
        script = msgspec.json.decode(line, type=Streams | Requests | LongTexts)
        if isinstance(script, Streams):
            run_loop(run_streams(script, _write_answer))
        elif isinstance(script, Requests):
            _write_answer(run_loop(run_requests(script)))
        else:
            send_long_texts(script, _write_answer)


if __name__ == "__main__":
    main()
