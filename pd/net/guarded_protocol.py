"""An HTTP connection with limits on the size and duration of its requests.

We add these limits because uvicorn has no deadline for a request's head or body. We set none for
the answer to a complete request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pd.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PDError,
    UnavailableError,
    error_body,
)
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    from pd.net.connection_limits import ConnectionLimits
    from pd.net.turns import Turns

# Headers of one request.
MAX_HEADERS = 256
# Requests that a client may send before it has our answer to the first.
MAX_PIPELINED = 16
# Bytes of these requests, heads and bodies together.
MAX_PIPELINED_BYTES = 16 << 10
# We check the limits after this many parsed bytes.
_PART_BYTES = 16 << 10
# Headers offering another protocol (Java's client offers HTTP/2), and their names in
# ``Connection``.
_OFFERS = (b"upgrade", b"http2-settings")


# uvicorn warns of every malformed request.
_uvicorn_logger = logging.getLogger("uvicorn.error")
_uvicorn_logger.addFilter(WarningLimit(_uvicorn_logger))


class BodyWriter:
    """Writes parts of one streamed answer without waking the application.

    An application that awaits uvicorn's ``send`` wakes once per part. Each request's scope has a
    writer as ``state["body_writer"]``. Use it on the event loop's thread only.
    """

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, protocol: GuardedProtocol, cycle: RequestResponseCycle) -> None:
        self._transport, self._flow, self._cycle = protocol.transport, protocol.flow, cycle

    @property
    def is_open(self) -> bool:
        """Whether the answer is chunked and under way: we sent its head, but not its end."""
        cycle = self._cycle
        is_under_way = cycle.response_started and not cycle.response_complete
        return bool(is_under_way and cycle.chunked_encoding)

    @property
    def can_write(self) -> bool:
        """Whether the client is connected and reads. Check :attr:`is_open`, too."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write_part(self, data: bytes) -> None:
        """Write a non-empty part of the body, framed as uvicorn does."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _Flow(FlowControl):
    """uvicorn's flow control, but it does not read from a client while the parser lags.

    Attributes:
        is_behind: received bytes wait for the parser.
    """

    is_behind = False

    def resume_reading(self) -> None:
        if self.is_behind:
            self.read_paused = False
        else:
            super().resume_reading()


class Connections(Protocol):
    """The connections of one socket, as their protocols see them.

    :class:`pd.net.connections.Listener` implements this. We call it on the event loop's thread.
    """

    @property
    def limits(self) -> ConnectionLimits:
        """Limits on each connection and on all of them."""

    def add_connection(self, connection: GuardedProtocol) -> None:
        """Count a new connection."""

    def remove_connection(self, connection: GuardedProtocol) -> None:
        """Forget a connection that has ended."""

    def on_request(self, connection: GuardedProtocol) -> None:
        """Note that a connection has a request. Its body comes next."""

    def on_body_part(self, connection: GuardedProtocol) -> None:
        """Note that more of the request's body has arrived."""

    def on_request_complete(self, connection: GuardedProtocol) -> None:
        """Note that the request is complete. After this we close it for no other request."""

    def on_idle(self, connection: GuardedProtocol) -> None:
        """Note that the request was answered, so the connection may send another."""

    def assign_owner(self, connection: GuardedProtocol, owner: str) -> None:
        """Count the connection's request as one of ``owner``, if it may be served.

        Raises:
            QueueFullError: the owner has its share of the connections.
            UnavailableError: there are too many connections, and no owner with more requests gives
                one up.
        """


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with limits.

    Attributes:
        owner: client that sent the request, set by the application (:meth:`assign_owner`).
    """

    flow: _Flow
    owner = ""

    def __init__(
        self,
        listener: Connections,
        turns: Turns,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        *,
        has_owners: bool = False,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._has_owners = has_owners
        self._listener = listener
        self._limits = listener.limits
        self._turns = turns
        # Received unparsed bytes, and whether a parsing step is under way.
        self._unparsed, self._is_parsing = b"", False
        # Bytes of the current request line and headers.
        self._head_bytes = 0
        # Bytes of the current body, without and with chunk headers and trailers.
        self._body_bytes = self._framed_bytes = 0
        # Since when the client has left more bytes unread than the transport's high-water mark (or
        # any, if the connection closes), and their number. We add none until it has read.
        self.unread_since: float | None = None
        self._unread_then = 0
        # When the current head or body began; None without one.
        self._head_since: float | None = time.monotonic()
        self._body_since: float | None = None
        # When the last part of the current body arrived, and the body's limit.
        self._body_seen = 0.0
        self._body_limit = self._limits.body_bytes
        self._problem = ""
        # The request being answered, and the one whose body arrives. uvicorn's ``cycle`` is
        # the newest request. It may wait for the answers to earlier ones.
        self._answered: RequestResponseCycle | None = None
        self._incoming: RequestResponseCycle | None = None
        # We ignore further input.
        self._has_refused = False
        # The last head offers another protocol, and we have not treated it as a request yet.
        self._is_offer = False

    def refuse_request(self, status: int, reason: str, message: str) -> None:
        """Answer the incoming request with an error and close the connection.

        If earlier requests wait for answers, close after those instead and send no error.
        """
        if self._has_refused:
            return
        self._has_refused = True
        answered, incoming = self._answered, self._incoming
        if self._is_answering and incoming is not answered:
            self._close_after_answers()
            return
        if not self._is_answering or not self.cycle.response_started:
            self.transport.write(render_refusal(status, reason, message))
        self.transport.close()

    def _close_after_answers(self) -> None:
        """Close the connection after the answers to complete requests."""
        assert self._answered is not None
        if self._incoming is not None:
            self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else self._answered
        self.cycle.keep_alive = False
        self._incoming = self._head_since = self._body_since = None

    def end_if_late(self, now: float) -> None:
        """End the connection if the client is late with a head, a body, or reading."""
        limits = self._limits
        if self.unread_since is None and self.transport.is_closing() and self.unread_bytes:
            # The connection closes as soon as the client reads, but less than the high-water mark
            # is left, so the transport does not call `pause_writing`.
            self.unread_since, self._unread_then = now, self.unread_bytes
        if self.unread_since is not None:
            taken = self._unread_then - self.unread_bytes
            if now > self.unread_since + limits.read_seconds + taken / limits.read_rate:
                self.transport.abort()
        if self.transport.is_closing():
            return
        if self._head_since is not None and self._is_answering:
            self._head_since = now  # the next head may wait for our answer
        elif self._head_since is not None and now > self._head_since + limits.head_seconds:
            if self._head_bytes:
                message = f"the request's head did not arrive within {limits.head_seconds:g} s"
                self.refuse_request(408, "Request Timeout", message)
            else:
                self.transport.close()
        elif self._body_since is not None:
            if self.flow.read_paused:
                # We do not read, so the client is not late.
                self._body_since = self._body_seen = now
            earned = self._body_bytes / limits.body_rate
            is_silent = now > self._body_seen + limits.body_pause_seconds
            if is_silent or now > self._body_since + limits.body_seconds + earned:
                message = f"only {self._body_bytes} bytes of the body arrived in time"
                self.refuse_request(408, "Request Timeout", message)

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers held by this process until the client reads."""
        return self.transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_since, self._unread_then = time.monotonic(), self.unread_bytes

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_since = None

    def shutdown(self) -> None:
        """End with the server, which does not wait for an incomplete request."""
        incoming = self._incoming
        if incoming is not None and not incoming.response_started:
            self.refuse_request(503, "Service Unavailable", STOPS)
        else:
            super().shutdown()

    def give_way(self) -> None:
        """Close the connection at once and drop unread answers."""
        self.transport.abort()

    # The base class takes any transport, but servers pass only these.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._listener.add_connection(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unparsed = b""
        for cycle in (self._answered, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._listener.remove_connection(self)

    def data_received(self, data: bytes) -> None:
        if self._has_refused:
            return
        self._unparsed += data
        if self._is_parsing:
            return
        self._is_parsing = True
        if not self._turns.run_step(self._parse_until):
            self.flow.is_behind = True
            self.transport.pause_reading()

    def _parse_until(self, end: float) -> bool:
        """Parse received bytes until ``end``. Returns whether none are left."""
        start, is_late = 0, False
        while start < len(self._unparsed) and not (is_late or self._has_refused):
            part = self._unparsed[start : start + _PART_BYTES]
            start += len(part)
            self._parse_part(part)
            is_late = time.monotonic() >= end
        self._unparsed = b"" if self._has_refused else self._unparsed[start:]
        if self._unparsed:
            return False
        self._is_parsing = False
        if self.flow.is_behind:
            self.flow.is_behind = False
            if not (self.flow.read_paused or self.transport.is_closing()):
                self.transport.resume_reading()
        return True

    def _parse_part(self, data: bytes) -> None:
        if self._head_since is None and self._body_since is None:
            self._head_since = time.monotonic()
        self._head_bytes += len(data)
        if self._body_since is not None:
            self._framed_bytes += len(data)
        self._feed_parser(data)
        if self._body_since is not None:
            self._head_bytes = 0
            around = self._framed_bytes - self._body_bytes
            if around > self._body_bytes + self._limits.framing_bytes:
                self.send_400_response(
                    f"framing of {self._body_bytes} body bytes: {around} bytes; send larger chunks"
                )
        if self._head_bytes > self._limits.head_bytes and not self.transport.is_closing():
            message = f"the request's headers exceed {self._limits.head_bytes} bytes"
            self.refuse_request(431, "Request Header Fields Too Large", message)

    def _feed_parser(self, data: bytes) -> None:
        """Feed the parser as uvicorn does, but remove an offer of another protocol.

        We feed such a request again without the offer. Otherwise the parser would treat its body as
        that protocol, and then as further requests.
        """
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
                    data = self._render_head_without_offer() + data[upgrade.args[0] :]
                    self._is_offer = False
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _render_head_without_offer(self) -> bytes:
        """Render the last head without offers of another protocol."""
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
        self.scope["state"]["connection"] = self

    def assign_owner(self, owner: str) -> None:
        """Count the request being answered as one of ``owner``.

        Raises QueueFullError or UnavailableError if we may not serve it. The connection then closes
        after the error answer.
        """
        try:
            self._listener.assign_owner(self, owner)
        except PDError:
            assert self._answered is not None
            self._answered.keep_alive = False
            raise

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body_since is not None:
            return  # a trailer, which must not count as a header
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
        self._body_seen = self._body_since
        app = self.app
        if not self._has_owners:
            self.app = _OneOwner(self, self._limits.open_paths, app)
        before = self.cycle
        super().on_headers_complete()
        self.app = app
        if self.cycle is not None and self.cycle is not before:
            path = self.scope["path"].removesuffix("/")
            self._body_limit = self._limits.long_bodies.get(path, self._limits.body_bytes)
            # The application has not started yet.
            self.scope["state"]["body_writer"] = BodyWriter(self, self.cycle)
            self._incoming = self.cycle
            if self.cycle is not self._answered:
                # uvicorn has stopped reading, but we must notice if the client leaves.
                self.flow.resume_reading()
                head = sum(len(name) + len(value) for name, value in self.headers)
                self.scope["state"]["head_bytes"] = head + len(self.url)
                self._bound_pipelined()

    def _bound_pipelined(self) -> None:
        """Raise ValueError if requests waiting for the answer to the first are too large."""
        waiting = sum(len(c.body) + c.scope["state"]["head_bytes"] for c, _ in self.pipeline)
        if waiting > MAX_PIPELINED_BYTES:
            self._problem = (
                f"requests waiting for the answer to the first exceed {MAX_PIPELINED_BYTES} bytes"
            )
            raise ValueError(self._problem)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        self._listener.on_request(self)
        if not cycle.more_body:  # it arrived while we answered earlier requests
            self._listener.on_request_complete(self)
        super()._start_asgi_task(cycle, partial(self._run_app, cycle, app))

    async def _run_app(
        self,
        cycle: RequestResponseCycle,
        app: ASGI3Application,
        scope: Any,
        receive: Any,
        send: Any,
    ) -> None:
        """Run the application on a request. Answer 503 if we cancel it because the server stops.

        uvicorn would log a traceback for each cancelled request instead.
        """
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not cycle.response_started:
                self.transport.write(render_refusal(503, "Service Unavailable", STOPS))
            self.transport.close()
            cycle.disconnected = True  # so that uvicorn sends nothing more

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._body_seen = time.monotonic()
        if self._body_bytes > self._body_limit:
            message = f"the body exceeds {self._body_limit} bytes"
            if not self.transport.is_closing():
                self.refuse_request(413, "Content Too Large", message)
            raise ValueError(message)  # so that the parser stops
        super().on_body(body)
        if self._incoming is self._answered and self._is_answering:
            self._listener.on_body_part(self)
        elif self._incoming is not None and self._incoming is not self._answered:
            self._bound_pipelined()

    def on_message_complete(self) -> None:
        if self._is_offer:
            return
        super().on_message_complete()
        self._incoming, self._body_since, self._head_bytes = None, None, 0
        self._listener.on_request_complete(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._listener.on_idle(self)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self.refuse_request(400, "Bad Request", self._problem or msg)


_ERRORS: dict[int, type[PDError]] = {408: DeadlineExceededError, 503: UnavailableError}


def _render_error(status: int, message: str) -> bytes:
    return msgspec.json.encode(error_body(_ERRORS.get(status, InvalidRequestError)(message)))


def render_refusal(status: int, reason: str, message: str) -> bytes:
    """Render a complete response that ends its connection."""
    body = _render_error(status, message)
    head = (
        f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class _OneOwner:
    """Counts requests outside the open paths as one owner's, and answers 503 to too many."""

    def __init__(
        self, connection: GuardedProtocol, open_paths: frozenset[str], app: ASGIApp
    ) -> None:
        self._connection = connection
        self._open_paths = open_paths
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"].removesuffix("/") not in self._open_paths:
                self._connection.assign_owner("")
        except PDError as error:
            body = _render_error(error.status, error.message)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"retry-after", b"1"),
            ]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)


FULL = "too many connections; try again later"
STOPS = "the server is stopping; send the request again"
