"""One HTTP connection with limits on the sizes of its requests and on how long it may take.

uvicorn has no deadline for a request's head or body. A response has all the time in the world once
its request is complete.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pd.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PDError,
    UnavailableError,
    error_body,
)

if TYPE_CHECKING:
    import asyncio

    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    from pd.core.connections import Listener

# Headers of one request.
MAX_HEADERS = 256
# Requests that a client may send before it has the answer to the first.
MAX_PIPELINED = 16
# Bytes of these requests, heads and bodies.
MAX_PIPELINED_BYTES = 16 << 10
# Headers by which a request offers another protocol (Java's client offers HTTP/2), and the tokens
# of ``Connection`` that name them.
_OFFERS = (b"upgrade", b"http2-settings")


class _OneWarningASecond(logging.Filter):
    """uvicorn warns of every malformed request."""

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        now = time.monotonic()
        passes = now >= self._next
        if passes:
            self._next = now + 1.0
        return passes


logging.getLogger("uvicorn.error").addFilter(_OneWarningASecond())


class BodyWriter:
    """Writes parts of one streamed answer at once, where an application that awaited uvicorn's
    ``send`` would be woken for each. For the event loop's thread; each request's scope has one as
    ``state["body_writer"]``."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, protocol: GuardedProtocol, cycle: RequestResponseCycle) -> None:
        self._transport, self._flow, self._cycle = protocol.transport, protocol.flow, cycle

    @property
    def is_open(self) -> bool:
        """Whether the answer's head was sent and its end was not, and it is chunked."""
        cycle = self._cycle
        is_under_way = cycle.response_started and not cycle.response_complete
        return bool(is_under_way and cycle.chunked_encoding)

    @property
    def ready(self) -> bool:
        """Whether :meth:`write` may be called, if :attr:`is_open`: the client is there and reads
        what it was sent."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Write a part of the body that is not empty, framed as uvicorn does."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with limits."""

    def __init__(
        self,
        listener: Listener,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._listener = listener
        self._limits = listener.limits
        # Bytes of the present request line and headers.
        self._head_bytes = 0
        # Bytes of the present body, and the same with chunk headers and trailers.
        self._body_bytes = self._framed_bytes = 0
        # Since when the client has left more unread than the transport likes to hold, or anything
        # of a connection that closes, and how much that was; nothing is added until it has read.
        self.unread_since: float | None = None
        self._unread_then = 0
        # When the present head or body began; None while there is neither.
        self._head_since: float | None = time.monotonic()
        self._body_since: float | None = None
        self._problem = ""
        # The request that is being answered, and the one whose body is coming. uvicorn's ``cycle``
        # is the newest, which may wait for the answers to others.
        self._answered: RequestResponseCycle | None = None
        self._incoming: RequestResponseCycle | None = None
        # What comes is not read any more.
        self._has_refused = False
        # The head that was read offers another protocol, and was not taken for a request yet.
        self._is_offer = False

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Take no more requests. The one that comes is answered so and the connection is closed; if
        others go before it, the connection is closed after their answers."""
        if self._has_refused:
            return
        self._has_refused = True
        answered, incoming = self._answered, self._incoming
        if self._is_answering and incoming is not answered:
            self._close_after_answers()
            return
        if not self._is_answering or not self.cycle.response_started:
            self.transport.write(refusal(status, reason, message))
        self.transport.close()

    def _close_after_answers(self) -> None:
        """Have the connection closed when the requests that came whole are answered."""
        assert self._answered is not None
        if self._incoming is not None:
            self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else self._answered
        self.cycle.keep_alive = False
        self._incoming = self._head_since = self._body_since = None

    def sweep(self, now: float) -> None:
        """End the connection if it is late with a head or a body, or with reading."""
        limits = self._limits
        if self.unread_since is None and self.transport.is_closing() and self.unread_bytes:
            # Only the client keeps the connection, with less than the transport likes to hold.
            self.unread_since, self._unread_then = now, self.unread_bytes
        if self.unread_since is not None:
            taken = self._unread_then - self.unread_bytes
            if now > self.unread_since + limits.read_seconds + taken / limits.read_rate:
                self.transport.abort()
        if self.transport.is_closing():
            return
        if self._head_since is not None and self._is_answering:
            self._head_since = now  # there is no hurry with the next one
        elif self._head_since is not None and now > self._head_since + limits.head_seconds:
            if self._head_bytes:
                what = f"the request's head did not come within {limits.head_seconds:g} s"
                self.refuse(408, "Request Timeout", what)
            else:
                self.transport.close()
        elif self._body_since is not None:
            if self.flow.read_paused:
                self._body_since = now  # it is this end that does not read
            earned = self._body_bytes / limits.body_rate
            if now > self._body_since + limits.body_seconds + earned:
                what = f"only {self._body_bytes} bytes of the body came in time"
                self.refuse(408, "Request Timeout", what)

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that wait in this process for the client to read."""
        return self.transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_since, self._unread_then = time.monotonic(), self.unread_bytes

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_since = None

    def give_way(self) -> None:
        """Close the connection at once, whatever was not read."""
        self.transport.abort()

    # The base class takes transports of every kind; only these come from a server.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listener.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in (self._answered, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._listener.lost(self)

    def data_received(self, data: bytes) -> None:
        if self._has_refused:
            return
        if self._head_since is None and self._body_since is None:
            self._head_since = time.monotonic()
        self._head_bytes += len(data)
        if self._body_since is not None:
            self._framed_bytes += len(data)
        self._feed(data)
        if self._body_since is not None:
            self._head_bytes = 0
            around = self._framed_bytes - self._body_bytes
            if around > self._body_bytes + self._limits.head_bytes:
                self.send_400_response(f"{around} bytes surround {self._body_bytes} of the body")
        if self._head_bytes > self._limits.head_bytes and not self.transport.is_closing():
            reason = "Request Header Fields Too Large"
            self.refuse(
                431, reason, f"the request's headers exceed {self._limits.head_bytes} bytes"
            )

    def _feed(self, data: bytes) -> None:
        """Have the parser read, as uvicorn does; but a request that offers another protocol is read
        once more without the offer. The parser would take its body for that protocol, and then for
        further requests."""
        self._unset_keepalive_if_required()
        is_read = False
        while not is_read:
            try:
                self.parser.feed_data(data)
                is_read = True
            except httptools.HttpParserError:
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
                is_read = True
            except httptools.HttpParserUpgrade as upgrade:
                is_read = not self._is_offer
                if self._is_offer:
                    data = self._head_without_offer() + data[upgrade.args[0] :]
                    self._begin_again()

    def _begin_again(self) -> None:
        """Have a new parser read what comes, of which nothing was taken for a request."""
        self._is_offer = False
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_offer(self) -> bytes:
        """The head that was read last, without the headers that offer another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["transport"] = self.transport

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body_since is not None:
            return  # a trailer, which must not pass for a header
        if len(self.headers) >= MAX_HEADERS:
            self._problem = f"the request has more than {MAX_HEADERS} headers"
            raise ValueError(self._problem)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers):
            self._is_offer = True
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._problem = f"more than {MAX_PIPELINED} requests wait for the answer to the first"
            raise ValueError(self._problem)
        self._head_since, self._body_since = None, time.monotonic()
        self._body_bytes = self._framed_bytes = 0
        admitted = self._listener.asks(self)
        app = self.app
        if not admitted:
            self.app = _Unavailable(self._limits.open_paths, app)
        before = self.cycle
        super().on_headers_complete()
        self.app = app
        if self.cycle is not None and self.cycle is not before:
            # The application has not begun yet.
            self.scope["state"]["body_writer"] = BodyWriter(self, self.cycle)
            self._incoming = self.cycle
            if self.cycle is not self._answered:
                # uvicorn has stopped reading, but then nobody would learn that the client leaves.
                self.flow.resume_reading()
                head = sum(len(name) + len(value) for name, value in self.headers)
                self.scope["state"]["head_bytes"] = head + len(self.url)
                self._bound_pipelined()

    def _bound_pipelined(self) -> None:
        """Raise ValueError if requests that wait for the answer to the first are too large."""
        waiting = sum(len(c.body) + c.scope["state"]["head_bytes"] for c, _ in self.pipeline)
        if waiting > MAX_PIPELINED_BYTES:
            self._problem = (
                f"requests that wait for the answer to the first have more than "
                f"{MAX_PIPELINED_BYTES} bytes"
            )
            raise ValueError(self._problem)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            what = f"the body has more than {self._limits.body_bytes} bytes"
            if not self.transport.is_closing():
                self.refuse(413, "Content Too Large", what)
            raise ValueError(what)  # so that the parser stops
        super().on_body(body)
        if self._incoming is not None and self._incoming is not self._answered:
            self._bound_pipelined()

    def on_message_complete(self) -> None:
        if self._is_offer:
            return
        super().on_message_complete()
        self._incoming, self._body_since, self._head_bytes = None, None, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._listener.waits(self)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self.refuse(400, "Bad Request", self._problem or msg)


_ERRORS: dict[int, type[PDError]] = {408: DeadlineExceededError, 503: UnavailableError}


def _body(status: int, message: str) -> bytes:
    return msgspec.json.encode(error_body(_ERRORS.get(status, InvalidRequestError)(message)))


def refusal(status: int, reason: str, message: str) -> bytes:
    """A whole response that ends its connection."""
    body = _body(status, message)
    head = (
        f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Unavailable:
    """Answers 503 to all but some paths."""

    def __init__(self, open_paths: frozenset[str], app: ASGIApp) -> None:
        self._open_paths = open_paths
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        body = _body(503, FULL)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", b"1"),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


FULL = "too many connections; try again later"
