"""Serves ASGI applications on sockets that the caller has bound early in the start."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import uvicorn
from starlette.responses import Response

from pd.core.addresses import bind_socket
from pd.core.errors import SetupError
from pd.net.connection_limits import ConnectionLimits
from pd.net.connections import GuardedServer
from pd.util.descriptors import limit_strangers

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send


LIMITS = ConnectionLimits(
    connections=1024,
    open_paths=frozenset({"/health", "/metrics", "/server_info"}),
    keep_alive_seconds=30,
)
# Part of a node's descriptors for each of its HTTP ports.
_PARTS = 8


def open_listener(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Open a listening TCP socket. If the address is not free, raise SetupError naming ``flag``."""
    listener = bind_socket(host, port, flag)
    try:
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag} or --host"
        ) from error
    return listener


class DeferredApp:
    """Answers 503 until you set :attr:`app`, and then passes requests on to it."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        starting = Response(status_code=503, headers={"Retry-After": "1"})
        await (self.app or starting)(scope, receive, send)


class HttpServers(threading.Thread):
    """Serves several applications from one thread."""

    def __init__(self, apps: Sequence[tuple[ASGIApp, socket.socket]]) -> None:
        super().__init__(name="http", daemon=True)
        limits = LIMITS.fit_files(limit_strangers(LIMITS.connections, _PARTS))
        self._servers = []
        self._sockets = [sock for _, sock in apps]
        for app, _ in apps:
            settings = uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
            )
            self._servers.append(GuardedServer(settings, limits))

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        pairs = zip(self._servers, self._sockets, strict=True)
        await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))

    def stop(self) -> None:
        """Stop serving and close the sockets."""
        for server in self._servers:
            server.should_exit = True
        if self.is_alive():
            self.join(timeout=5)
        for sock in self._sockets:
            sock.close()
