"""HTTP plumbing: bodies in, errors and event streams out."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pd.core.errors import (
    AbortedError,
    InvalidRequestError,
    PDError,
    QueueFullError,
    UnavailableError,
)
from pd.proxy.fields import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from pd.proxy.dispatcher import Dispatcher
    from pd.proxy.generation import Choice, Delta, Spec
    from pd.proxy.job import Job

log = logging.getLogger(__name__)

# JSON is parsed in one go, and meanwhile everybody waits.
MAX_BODY_BYTES = 8 << 20
MAX_HEAD_BYTES = 64 << 10
RETRY_AFTER_SECONDS = 1
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()
# JSON allows them in strings and events in lines, but clients that read lines of text (httpx) take
# them for ends of lines.
_LINE_BREAKS = {
    char.encode(): f"\\u{ord(char):04x}".encode() for char in ("\x85", "\u2028", "\u2029")
}


class Protocol11(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with the connection within reach, to cut off a client that does not read,
    and with errors in our shape."""

    # Of the present request line and headers, as far as they came by themselves.
    _head_bytes = 0
    _in_body = False

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_body:
            self._head_bytes = 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                "431 Request Header Fields Too Large",
                f"the request's headers exceed {MAX_HEAD_BYTES} bytes",
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["transport"] = self.transport

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body, self._head_bytes = False, 0

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def _refuse(self, status: str, message: str) -> None:
        body = _encoder.encode(error_body(InvalidRequestError(message)))
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


async def read_object(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises InvalidRequestError."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        # The rest is read all the same, or the client would see a broken connection and no error.
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
    if size > MAX_BODY_BYTES:
        raise InvalidRequestError(f"the body has {size} bytes; at most {MAX_BODY_BYTES} are taken")
    return parse_object(b"".join(chunks))


def error_body(error: PDError) -> dict[str, Any]:
    """OpenAI's shape."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.kind,
        }
    }


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(_encoder.encode(value), status, headers, "application/json")


def error_response(error: PDError) -> Response:
    headers = {}
    if isinstance(error, QueueFullError | UnavailableError):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), error.status, headers)


class Renderer(Protocol):
    """An API's view of a job."""

    def events(self, choice: Choice, delta: Delta) -> Iterable[object]:
        """Server-sent events for what a choice gained."""

    def last_events(self) -> Iterable[object]:
        """Events after all choices ended (usage)."""

    def body(self) -> object:
        """The whole response, when it is not streamed."""


class JobResponse(Response):
    """Runs a job and sends its result, streamed or whole, watching the client meanwhile.

    Nothing is sent before the first news, so that what fails until then has its HTTP status.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        job: Job,
        specs: list[Spec],
        renderer: Renderer,
        timeout: float | None,
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._job = job
        self._specs = specs
        self._renderer = renderer
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        transport = scope.get("state", {}).get("transport")
        job.on_overflow = lambda: self._overflow(transport)
        watcher = None
        try:
            with self._dispatcher.run(job, self._specs, self._timeout):
                watcher = asyncio.create_task(self._watch(receive))
                if job.streaming:
                    await self._stream(send, scope, receive)
                else:
                    await job.finished()
                    await (await self._whole())(scope, receive, send)
        except PDError as error:
            if job.outcome is None:
                await error_response(error)(scope, receive, send)
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _whole(self) -> Response:
        if any(spec.params.logprobs for spec in self._specs):
            # Thousands of them take so long to write down that everybody would wait.
            return await asyncio.to_thread(lambda: json_response(self._renderer.body()))
        return json_response(self._renderer.body())

    async def _stream(self, send: Send, scope: Scope, receive: Receive) -> None:
        job, renderer = self._job, self._renderer
        news = await job.news()
        if job.error is not None:
            raise job.error
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            parts = [_event(e) for choice in news for e in renderer.events(choice, choice.take())]
            done = job.done
            if job.error is not None:
                parts.append(_event(error_body(job.error)))
            elif done:
                parts += [_event(event) for event in renderer.last_events()] + [DONE]
            await self._write(send, b"".join(parts), more=not done)
            if done:
                return
            news = await job.news()

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        # `send` waits only if the client has not read what it was sent before.
        self._job.writing = True
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._job.writing = False

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._job.done:
            self._cut("disconnect", "the client went away")

    def _overflow(self, transport: asyncio.Transport | None) -> None:
        self._cut("slow_reader", "the client does not read")
        if transport is not None:
            transport.abort()

    def _cut(self, outcome: str, message: str) -> None:
        job = self._job
        job.abort_is_result = False
        job.outcome = outcome
        self._dispatcher.end(job, AbortedError(message), outcome)


def _event(value: object) -> bytes:
    data = _encoder.encode(value)
    if not data.isascii():
        for char, escape in _LINE_BREAKS.items():
            data = data.replace(char, escape)
    return b"data: " + data + b"\n\n"
