"""Minimal servers for comparison with the proxy: ``python -m pd.bench.proxy_floors KIND``.

``fastapi`` answers a POST with JSON. ``uvicorn`` streams chunks from an ASGI application, one task
per stream. ``transport`` writes the same chunks to bare transports, all streams in one pass.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Coroutine

KINDS = ("fastapi", "uvicorn", "transport")
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)
# Answer to the questions that routers ask, at all of their paths.
ABOUT: dict[str, object] = {"status": "ok", "model_path": "floor", "served_model_name": "floor"}
ABOUT |= {"object": "list", "data": [{"id": "floor", "object": "model"}]}
_DONE = b"data: [DONE]\n\n"


def make_event(token: int) -> bytes:
    """Make a server-sent event as large as the proxy's event for a token."""
    choice = {
        "index": 0,
        "text": " word",
        "logprobs": None,
        "token_ids": [token],
        "finish_reason": None,
        "stop_reason": None,
    }
    head = {"id": "cmpl-" + 32 * "0", "object": "text_completion", "created": 0, "model": "floor"}
    return b"data: " + json.dumps(head | {"choices": [choice]}).encode() + b"\n\n"


def _format_chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _parse_max_tokens(body: bytes) -> int:
    return int(json.loads(body)["max_tokens"])


# ---- ASGI


def fastapi_app() -> Any:
    """Make an application that validates a body and answers with a dictionary."""
    from fastapi import FastAPI
    from pydantic import BaseModel

    class FloorRequest(BaseModel):
        prompt: list[int] | str
        max_tokens: int
        temperature: float = 1.0
        model: str | None = None

    app = FastAPI()

    async def complete(body: FloorRequest) -> dict[str, Any]:
        choice = {"index": 0, "text": " word", "finish_reason": "length"}
        usage = {"prompt_tokens": len(body.prompt), "completion_tokens": body.max_tokens}
        return {"id": "cmpl-0", "model": "floor", "choices": [choice], "usage": usage}

    async def about() -> dict[str, object]:
        return ABOUT

    complete.__annotations__["body"] = FloorRequest
    for path in ("/health", "/model_info", "/server_info", "/v1/models"):
        app.get(path)(about)
    app.post("/v1/completions")(complete)
    return app


class StreamingApp:
    """Sends an event every ``step_seconds``."""

    def __init__(self, step_seconds: float) -> None:
        self._step = step_seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body, more = body + message["body"], message.get("more_body", False)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(_parse_max_tokens(body)):
            await asyncio.sleep(self._step)
            data = make_event(number)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE})


async def _serve_asgi(app: Any) -> None:
    import uvicorn

    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    _say_ready(server.servers[0].sockets[0].getsockname()[1])
    await task


# ---- transports


class _BareStream(asyncio.Protocol):
    """Reads one request whose body has a known length."""

    def __init__(self, streams: set[_BareStream]) -> None:
        self._streams = streams
        self._data = b""
        self.left = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have another base class.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if data.startswith(b"GET "):
            assert self.transport is not None
            body = json.dumps(ABOUT).encode()
            head = (
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            ).encode()
            self.transport.write(head + body)
            self.transport.close()
            return
        head, blank, body = self._data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if blank and len(body) >= int(length or 0) and self.transport is not None:
            self.left = _parse_max_tokens(body)
            self.transport.write(_HEAD)
            self._streams.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)


async def _serve_transports(step_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    streams: set[_BareStream] = set()
    server = await loop.create_server(lambda: _BareStream(streams), "127.0.0.1", 0)
    _say_ready(server.sockets[0].getsockname()[1])
    data, end = _format_chunk(make_event(7)), _format_chunk(_DONE) + b"0\r\n\r\n"
    while True:
        await asyncio.sleep(step_seconds)
        for stream in list(streams):
            assert stream.transport is not None
            stream.transport.write(data)
            stream.left -= 1
            if stream.left == 0:
                stream.transport.write(end)
                stream.transport.close()
                streams.discard(stream)


def _say_ready(port: int) -> None:
    print(json.dumps({"event": "ready", "url": f"http://127.0.0.1:{port}"}), flush=True)


def main() -> None:
    """Serve until killed."""
    kind, step_seconds = sys.argv[1], float(sys.argv[2])
    server: Coroutine[Any, Any, None]
    if kind == "transport":
        server = _serve_transports(step_seconds)
    else:
        server = _serve_asgi(fastapi_app() if kind == "fastapi" else StreamingApp(step_seconds))
    try:
        import uvloop
    except ImportError:
        asyncio.run(server)
    else:
        uvloop.run(server)


if __name__ == "__main__":
    main()
