"""Requests to a proxy's application from its own process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, MutableMapping

    from starlette.types import ASGIApp

    from pd.core.errors import PDError


def make_scope(method: str, path: str, content: bytes) -> dict[str, Any]:
    """Return the scope of a request of this host, with a body of JSON unless it is empty."""
    headers = [(b"host", b"localhost")]
    if content:
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        # The proxy lets programs of this host administrate it.
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 0),
    }


class Exchange:
    """One request to an application, and its answer.

    Args:
        failure: gets the error for all requests when nothing can be answered any more.

    Attributes:
        status, headers: of the answer; set before the first part.
    """

    def __init__(
        self,
        app: ASGIApp,
        scope: MutableMapping[str, Any],
        content: bytes,
        failure: asyncio.Future[PDError],
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._content: bytes | None = content
        self._failure = failure
        self._gone = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._serving = asyncio.ensure_future(app(scope, self._receive, self._send))
        self._serving.add_done_callback(lambda _: self._parts.put_nowait(None))
        failure.add_done_callback(self._note_failure)

    async def iter_parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of the answer as they come. Raises NodeFailedError if the engine ended,
        and the application's own error if it broke."""
        try:
            while (part := await self._parts.get()) is not None:
                yield part
            if self._failure.done() and not self._failure.cancelled():
                raise self._failure.result()
            self._serving.result()
        finally:
            await self.end()

    async def end(self) -> None:
        """Disconnect, which aborts the request unless it has its answer."""
        self._failure.remove_done_callback(self._note_failure)
        self._gone.set()
        if not self._serving.done():
            await asyncio.wait([self._serving])

    async def _receive(self) -> dict[str, Any]:
        if self._content is not None:
            content, self._content = self._content, None
            return {"type": "http.request", "body": content, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                key.decode("latin-1").lower(): value.decode("latin-1")
                for key, value in message.get("headers", ())
            }
        elif message.get("body"):
            self._parts.put_nowait(message["body"])

    def _note_failure(self, failure: asyncio.Future[PDError]) -> None:
        if not failure.cancelled():  # we stop, and the proxy answers what is left
            self._gone.set()
            self._parts.put_nowait(None)
