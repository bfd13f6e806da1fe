"""A guarded server on a thread of its own, without a proxy behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pd.net.connection_limits import ConnectionLimits
from pd.net.connections import GuardedServer
from pd.net.http_server import open_listener
from pd.proxy.workers import loop

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from starlette.requests import Request

    from pd.net.guarded_protocol import GuardedProtocol

# The second is less than transports like to hold.
LARGE, SMALL = 8 << 20, 48 << 10


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
    """A guarded server on a thread of its own.

    Attributes:
        loop: its event loop.
    """

    def __init__(self, tls: Callable[[], ssl.SSLContext] | None = None, **limits: Any) -> None:
        routes = [Route("/large", large), Route("/small", small)]
        routes.append(Route("/size", size, methods=["POST"]))
        app = Starlette(routes=[*routes, Route("/echo", echo, methods=["POST"])])
        config = uvicorn.Config(app, lifespan="off", log_config=None, ws=NoProtocol)
        self._server = GuardedServer(config, replace(ConnectionLimits(), **limits), tls)
        self._socket = open_listener("127.0.0.1", 0)
        # Accepted connections inherit the small buffer.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=loop.new_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._socket])

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


class LoopTime:
    """Measures how long a server's event loop computes between two turns at most.

    Attributes:
        computed: seconds of its thread's processor time.
    """

    def __init__(self, server: Server) -> None:
        self.computed = 0.0
        self._loop = server.loop
        self._ended = False

    def __enter__(self) -> LoopTime:
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._watching.result()

    async def _watch(self) -> None:
        while not self._ended:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            self.computed = max(self.computed, time.thread_time() - before)


class NoProtocol(asyncio.Protocol):
    """Where an installed library would take connections over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a WebSocket was opened")


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
