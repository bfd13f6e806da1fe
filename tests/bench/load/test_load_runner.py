"""When a load process connects, and what it records of connections that are lost or never come."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from pd.bench.load import runner as module
from pd.bench.load.client_checks import ClientLimits, client_complaints, client_facts
from pd.bench.load.endpoints import Options, Sampling
from pd.bench.load.plan import Plan
from pd.bench.load.processes import Run
from pd.bench.load.runner import Runner
from pd.bench.load.spool import Spool
from pd.bench.load.target import EndpointAddress
from pd.bench.load.workload import Session, Turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from pd.bench.load.client_load import ProcessLoad
    from pd.bench.load.reception import Piece, Reception
    from pd.bench.load.records import Record
    from pd.bench.load.spool import Spooled

ENDPOINT = "/v1/completions"
EVENT = json.dumps({"choices": [{"index": 0, "text": "w", "token_ids": [7]}]})
ANSWER = (
    f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {EVENT}\n\ndata: [DONE]\n\n"
).encode()


def runner_of(port: int, *sessions: Session, timeout: float = 30.0) -> Runner:
    target = EndpointAddress("127.0.0.1", port, False, ENDPOINT)
    options = Options(ignore_eos=True)
    plan = Plan("p", target, ENDPOINT, Sampling(), options, None, timeout, "bench-x")
    return Runner(plan, sessions)


def request(number: int, arrival: float) -> Session:
    return Session(number, (Turn([1, 2], 2, 1),), arrival)


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port whose queue of connections is full, so that the kernel answers no more of them."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


def test_a_connection_that_is_closed_before_its_request_is_due_fails_that_request_alone() -> None:
    answered = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        answered += 1
        if answered > 1:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
        writer.close()

    async def run() -> list[Record]:
        async with serving(answer) as port:
            runner = runner_of(port, request(0, 0.5), request(1, 1.0))
            await runner.run(time.perf_counter())
            return list(runner.make_records())

    first, second = asyncio.run(run())
    assert (first.status, first.error_kind) == ("error", "no answer")
    assert second.status == "ok"


def test_a_later_turn_connects_after_the_time_to_think() -> None:
    """Servers, pd's among them, close connections on which nothing comes for a while."""
    waits = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begin = time.perf_counter()
        await reader.readuntil(b"\r\n\r\n")
        waits.append(time.perf_counter() - begin)
        writer.write(ANSWER)
        writer.close()

    async def run() -> list[Record]:
        async with serving(answer) as port:
            turns = Turn([1, 2], 2, 1), Turn([3], 1, 1, think_time=3.0)
            runner = runner_of(port, Session(0, turns))
            await runner.run(time.perf_counter())
            return list(runner.make_records())

    first, second = asyncio.run(run())
    assert (first.status, second.status) == ("ok", "ok")
    assert second.sent - (first.end or 0) >= 3.0
    assert waits[1] < 1.5


def test_a_run_ends_while_its_connections_hang() -> None:
    async def run(port: int) -> list[Record]:
        runner = runner_of(port, request(0, 0.0), request(1, 0.1), request(2, 1000.0))
        asyncio.get_running_loop().call_later(0.5, runner.stop)
        await asyncio.wait_for(runner.run(time.perf_counter()), 20)
        return list(runner.make_records())

    with deaf_port() as port:
        records = asyncio.run(run(port))
    assert {(record.session, record.status) for record in records} == {
        (0, "interrupted"),
        (1, "interrupted"),
    }


def test_a_connection_that_hangs_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.2)

    async def run(port: int) -> list[Record]:
        runner = runner_of(port, request(0, 0.0), timeout=600.0)
        await asyncio.wait_for(runner.run(time.perf_counter()), 20)
        return list(runner.make_records())

    with deaf_port() as port:
        [record] = asyncio.run(run(port))
    assert (record.status, record.error_kind) == ("error", "connect")
    assert record.error == "TimeoutError: no connection within 0.2 s"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *[
            (number, "client")
            for number in (
                errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM,
            )
        ],
        (errno.ECONNREFUSED, "connect"),
    ],
)  # fmt: skip
def test_a_connection_for_which_the_client_lacks_something_is_no_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: str
) -> None:
    async def connect(target: EndpointAddress) -> Reception:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(EndpointAddress, "connect", connect)
    runner = runner_of(9, request(0, 0.0))
    asyncio.run(runner.run(time.perf_counter()))
    [record] = runner.make_records()
    assert (record.status, record.error_kind) == ("error", kind)
    assert os.strerror(number) in (record.error or "")
    record.lag = 0.0  # a machine that other tests keep busy makes every client late
    found = Run(records=[record])
    complaints = client_complaints(client_facts(found), ClientLimits())
    assert len(complaints) == (kind == "client")
    assert all("connections_without_resources is 1, the limit is 0" in c for c in complaints)


def test_a_full_disk_ends_the_run_and_costs_the_answers_that_it_did_not_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FullSpool(Spool):
        added = 0

        def add_pieces(self, pieces: Sequence[Piece]) -> Spooled:
            self.added += 1
            if self.added == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().add_pieces(pieces)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        writer.close()

    monkeypatch.setattr(module, "Spool", FullSpool)

    async def run() -> tuple[list[Record], ProcessLoad]:
        async with serving(answer) as port:
            arrivals = (0.0, 0.2, 0.4, 1000.0)
            runner = runner_of(port, *(request(n, at) for n, at in enumerate(arrivals)))
            await asyncio.wait_for(runner.run(time.perf_counter()), 60)
            return list(runner.make_records()), runner.load.describe_process("p")

    records, load = asyncio.run(run())
    assert [record.status for record in records] == ["ok", "ok"]
    assert load.failure is not None
    assert load.failure.startswith("answers cannot be kept in /")
    assert load.failure.endswith(": No space left on device")
