"""ASGI applications on sockets that were bound before anything else was set up."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import uvicorn
from starlette.responses import Response

from pd.core.addresses import bind
from pd.core.connections import ConnectionLimits, GuardedServer
from pd.core.errors import SetupError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send


LIMITS = ConnectionLimits(
    connections=1024,
    open_paths=frozenset({"/health", "/metrics", "/server_info"}),
    keep_alive_seconds=30,
)


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening TCP socket. Raises SetupError, naming ``flag``, if the address cannot be had."""
    listener = bind(host, port, flag)
    try:
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag} or --host"
        ) from error
    return listener


class Deferred:
    """An application that answers 503 until there is one."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        starting = Response(status_code=503, headers={"Retry-After": "1"})
        await (self.app or starting)(scope, receive, send)


class HttpServers(threading.Thread):
    """Serves several applications from one thread."""

    def __init__(self, apps: Sequence[tuple[ASGIApp, socket.socket]]) -> None:
        super().__init__(name="http", daemon=True)
        self._servers = []
        self._sockets = [sock for _, sock in apps]
        for app, _ in apps:
            settings = uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
            )
            self._servers.append(GuardedServer(settings, LIMITS))

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        pairs = zip(self._servers, self._sockets, strict=True)
        await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))

    def stop(self) -> None:
        """Stop serving."""
        for server in self._servers:
            server.should_exit = True
        if self.is_alive():
            self.join(timeout=5)
        for sock in self._sockets:
            sock.close()
