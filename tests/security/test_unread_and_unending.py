"""Clients that do not read their answers, and requests that go on after their end."""

from __future__ import annotations

import contextlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from guarded_server import LARGE, SMALL, LoopTime, Server, read_all, wait_until

from pd.net import turns
from pd.net.local_requests import has_local_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNKED = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def start(**limits: Any) -> Server:
            server = Server(**limits)
            stack.callback(server.stop)
            return server

        yield start


GET_LARGE = b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_a_client_that_does_not_read_is_disconnected(serve: Callable[..., Server]) -> None:
    server = serve(read_seconds=0.5)
    with server.ask(GET_LARGE, 4096) as silent, server.ask(GET_LARGE * 2, 4096) as asking_more:
        for sock in (silent, asking_more):
            assert sock.recv(1)
        wait_until(lambda: server.connections == 0)
        for sock in (silent, asking_more):
            assert len(read_all(sock)) < LARGE
    assert len(httpx.get(f"http://127.0.0.1:{server.port}/large").content) == LARGE


def test_an_unread_end_of_an_answer_does_not_keep_its_connection(
    serve: Callable[..., Server],
) -> None:
    server = serve(read_seconds=0.5)
    asks = b"GET /small HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with server.ask(asks, 4096) as silent:
        assert silent.recv(1)
        (connection,) = server.open
        wait_until(connection.transport.is_closing)
        wait_until(lambda: server.connections == 0)
        assert len(read_all(silent)) < SMALL


BODY = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 8000\r\n\r\n" + bytes(8000)


@pytest.mark.parametrize(
    "request_behind",
    [BODY, b"GET /small HTTP/1.1\r\nHost: 127.0.0.1\r\nX: %b\r\n\r\n" % (b"x" * 8000)],
    ids=["bodies", "heads"],
)
def test_pipelined_requests_are_bounded(
    serve: Callable[..., Server], request_behind: bytes
) -> None:
    server = serve()
    with server.ask(GET_LARGE + request_behind * 10, 4096) as sock:
        assert sock.recv(1)
        (connection,) = server.open
        wait_until(lambda: bool(connection.pipeline) and not connection.cycle.keep_alive)
        assert len(connection.pipeline) <= 2
        # The first byte of the first answer was read above.
        assert 1 < read_all(sock).count(b"TTP/1.1 200 OK") <= 3
    wait_until(lambda: server.connections == 0)


def test_a_slow_reader_gets_the_answer(serve: Callable[..., Server]) -> None:
    server = serve(read_seconds=0.5, read_rate=1 << 20)
    with server.ask(GET_LARGE, 64 << 10) as slow:
        read = 0
        while read < LARGE:
            read += len(slow.recv(1 << 20))
            time.sleep(min(0.02, read / LARGE))
        assert read > LARGE


def test_unread_answers_of_all_clients_are_bounded(serve: Callable[..., Server]) -> None:
    server = serve(unread_bytes=LARGE)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            assert stack.enter_context(server.ask(GET_LARGE, 4096)).recv(1)
        wait_until(lambda: server.connections <= 2)
        last = stack.enter_context(server.ask(GET_LARGE))
        answer = b""
        while len(answer) < LARGE:
            part = last.recv(1 << 20)
            assert part
            answer += part


# What a client can send for ever without asking anything: how that begins, and how it goes on.
NO_PROGRESS = {
    "a trailer": (CHUNKED + b"0\r\nX: ", b"a"),
    "trailers": (CHUNKED + b"0\r\n", b"A:\r\n"),
    "an extension": (CHUNKED + b"2;", b"a"),
    "extensions": (CHUNKED, b"1;a=b\r\n \r\n"),
    "tiny chunks": (CHUNKED, b"1\r\n \r\n"),
    "zeros before a size": (CHUNKED, b"0"),
    "empty lines": (b"", b"\r\n"),
    "ends of lines": (b"", b"\n"),
    "an address": (b"GET /", b"a"),
    "a header": (b"GET / HTTP/1.1\r\nX:", b" "),
    "headers": (b"GET / HTTP/1.1\r\n", b"A:\r\n"),
}


@pytest.mark.parametrize(("begin", "more"), NO_PROGRESS.values(), ids=NO_PROGRESS.keys())
def test_bytes_without_progress_end_their_connection(
    serve: Callable[..., Server], begin: bytes, more: bytes
) -> None:
    server = serve()
    part = more * ((64 << 10) // len(more))
    with server.ask(begin) as sock:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                sock.sendall(part)
                sent += len(part)
        assert sent < 64 << 20


# So much of a body pays for as much around it.
PAID = CHUNKED + b"200000\r\n" + bytes(2 << 20) + b"\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [*NO_PROGRESS.values(), (PAID, b"1\r\n \r\n"), (PAID + b"0\r\n", b"A:\r\n")],
    ids=[*NO_PROGRESS.keys(), "tiny chunks that are paid for", "trailers that are paid for"],
)
def test_bytes_without_progress_do_not_delay_others(
    serve: Callable[..., Server], begin: bytes, more: bytes
) -> None:
    """From eight connections at once."""
    server = serve()
    flood = begin + more * ((512 << 10) // len(more))

    def send() -> None:
        with contextlib.suppress(ConnectionError), server.ask(b"") as sock:
            sock.sendall(flood)

    with LoopTime(server) as longest, ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(send)
    # Reading may take a tenth of it.
    assert longest.computed < 10 * turns.TURN_SECONDS


def test_trailers_do_not_count_as_headers(serve: Callable[..., Server]) -> None:
    server = serve()
    trailers = b"0\r\nContent-Type: application/json\r\nAuthorization: Bearer x\r\n\r\n"
    with server.ask(CHUNKED + trailers) as sock:
        answer = sock.recv(65536)
        while b"]" not in answer:
            answer += sock.recv(65536)
    assert answer.endswith(b'["host","transfer-encoding"]')


def test_offered_protocols_do_not_replace_the_guard(serve: Callable[..., Server]) -> None:
    server = serve()
    upgrade = (
        b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    with server.ask(upgrade) as sock:
        assert re.match(rb"HTTP/1.1 200", sock.recv(65536))
    wait_until(lambda: server.connections == 0)


# Java's HttpClient asks in this way over plain HTTP.
OFFER = (
    b"POST /size HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: 127.0.0.1\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
)
# What it carries would be a request of its own if it were not a body.
INSIDE = b"GET /small HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
WITH_LENGTH = OFFER + b"Content-Length: %d\r\n\r\n%b" % (len(INSIDE), INSIDE)
IN_CHUNKS = OFFER + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    len(INSIDE),
    INSIDE,
)


@pytest.mark.parametrize("asks", [WITH_LENGTH, IN_CHUNKS], ids=["length", "chunks"])
@pytest.mark.parametrize("cut", ["nowhere", "head", "behind head", "body"])
def test_the_body_after_an_offer_of_another_protocol_is_a_body(
    serve: Callable[..., Server], asks: bytes, cut: str
) -> None:
    """A server may ignore the offer, but not the body, nor take it for further requests."""
    server = serve()
    end = asks.index(b"\r\n\r\n") + 4
    at = {"nowhere": len(asks), "head": 30, "behind head": end, "body": end + 9}[cut]
    with server.ask(asks[:at]) as sock:
        if asks[at:]:
            time.sleep(0.05)
            sock.sendall(asks[at:])
        for _ in range(2):  # the connection remains as it was
            answer = b""
            while b"\r\n\r\n%d" % len(INSIDE) not in answer:
                part = sock.recv(65536)
                assert part, answer
                answer += part
            assert answer.count(b"HTTP/1.1 200 OK") == 1
            assert answer.count(b"HTTP/1.1") == 1
            sock.sendall(asks)


def test_several_offers_in_one_packet_are_several_requests(serve: Callable[..., Server]) -> None:
    server = serve()
    with server.ask(WITH_LENGTH * 10) as sock:
        answers = b""
        while answers.count(b"\r\n\r\n%d" % len(INSIDE)) < 10:
            part = sock.recv(65536)
            assert part, answers
            answers += part
    with server.ask(WITH_LENGTH * 1000) as sock:
        assert read_all(sock).count(b"HTTP/1.1 200 OK") <= 17
    wait_until(lambda: server.connections == 0)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.2", True),
        ("[::1]:8000", True),
        ("[::ffff:127.0.0.1]", True),
        ("", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.nip.io", False),
        ("evil.example", False),
        ("[::1]evil.example", False),
        ("localhost:x@evil.example", False),
        ("localhost@evil.example", False),
        ("localhost:1, evil.example", False),
        ("localhost:8000.evil.example", False),
        ("0", False),
        ("0.0.0.0", False),
        ("2130706433", False),
        ("127.1", False),
        ("[::]", False),
    ],
)
def test_only_a_complete_local_host_is_local(host: str, local: bool) -> None:
    scope = {"headers": [(b"host", value.encode()) for value in host.split(", ")]}
    assert has_local_host(scope) == local
