"""Clients that do not read their answers, and requests that go on after their end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pd.core.connections import ConnectionLimits, GuardedServer
from pd.core.local_requests import has_local_host
from pd.node.http_server import listen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request

    from pd.core.guarded_protocol import GuardedProtocol

# The second is less than transports like to hold.
LARGE, SMALL = 8 << 20, 48 << 10
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


async def large(request: Request) -> Response:
    return Response(bytes(LARGE))


async def small(request: Request) -> Response:
    return Response(bytes(SMALL))


async def size(request: Request) -> Response:
    return JSONResponse(len(await request.body()))


async def echo(request: Request) -> Response:
    await request.body()
    return JSONResponse(sorted(request.headers.keys()))


class Server:
    """A guarded server on a thread of its own."""

    def __init__(self, **limits: Any) -> None:
        routes = [Route("/large", large), Route("/small", small)]
        routes.append(Route("/size", size, methods=["POST"]))
        app = Starlette(routes=[*routes, Route("/echo", echo, methods=["POST"])])
        config = uvicorn.Config(app, lifespan="off", log_config=None, ws=NoProtocol)
        self._server = GuardedServer(config, replace(ConnectionLimits(), **limits))
        self._socket = listen("127.0.0.1", 0)
        # Accepted connections inherit the small buffer.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port: int = self._socket.getsockname()[1]
        serving = self._server.serve(sockets=[self._socket])
        self._thread = threading.Thread(target=lambda: asyncio.run(serving))
        self._thread.start()
        wait_until(lambda: self._server.started)

    def ask(self, data: bytes, receive_buffer: int = 0) -> socket.socket:
        """Send and read nothing."""
        sock = socket.socket()
        sock.settimeout(10)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(("127.0.0.1", self.port))
        sock.sendall(data)
        return sock

    @property
    def connections(self) -> int:
        (listener,) = self._server.listeners
        return listener.connections

    @property
    def open(self) -> set[GuardedProtocol]:
        (listener,) = self._server.listeners
        return listener._open

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class NoProtocol(asyncio.Protocol):
    """Where an installed library would take connections over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a WebSocket was opened")


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def start(**limits: Any) -> Server:
            server = Server(**limits)
            stack.callback(server.stop)
            return server

        yield start


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_all(sock: socket.socket) -> bytes:
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 20):
            data += part
    return bytes(data)


GET_LARGE = b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_who_does_not_read_an_answer_is_cut_off(serve: Callable[..., Server]) -> None:
    server = serve(read_seconds=0.5)
    with server.ask(GET_LARGE, 4096) as silent, server.ask(GET_LARGE * 2, 4096) as asking_more:
        for sock in (silent, asking_more):
            assert sock.recv(1)
        wait_until(lambda: server.connections == 0)
        for sock in (silent, asking_more):
            assert len(read_all(sock)) < LARGE
    assert len(httpx.get(f"http://127.0.0.1:{server.port}/large").content) == LARGE


def test_the_end_of_an_answer_does_not_keep_its_connection(serve: Callable[..., Server]) -> None:
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
def test_requests_behind_an_answer_are_bounded(
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


def test_who_reads_slowly_but_reads_gets_the_answer(serve: Callable[..., Server]) -> None:
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


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\nX: ", b"a" * 65536),
        (b"0\r\n", b"A: b\r\n" * 10_000),
        (b"2;", b"a" * 65536),
        (b"", b"1\r\n \r\n" * 10_000),
    ],
    ids=["a trailer", "trailers", "an extension", "tiny chunks"],
)
def test_what_surrounds_a_body_is_bounded(
    serve: Callable[..., Server], begin: bytes, more: bytes
) -> None:
    server = serve()
    with server.ask(CHUNKED + begin) as sock:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                sock.sendall(more)
                sent += len(more)
        assert sent < 64 << 20


def test_trailers_are_no_headers(serve: Callable[..., Server]) -> None:
    server = serve()
    trailers = b"0\r\nContent-Type: application/json\r\nAuthorization: Bearer x\r\n\r\n"
    with server.ask(CHUNKED + trailers) as sock:
        answer = sock.recv(65536)
        while b"]" not in answer:
            answer += sock.recv(65536)
    assert answer.endswith(b'["host","transfer-encoding"]')


def test_connections_stay_with_their_guard(serve: Callable[..., Server]) -> None:
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
def test_what_follows_an_offer_of_another_protocol_is_a_body(
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


def test_many_offers_at_once_are_as_many_requests(serve: Callable[..., Server]) -> None:
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
def test_a_host_is_local_as_a_whole(host: str, local: bool) -> None:
    scope = {"headers": [(b"host", value.encode()) for value in host.split(", ")]}
    assert has_local_host(scope) == local
