"""Server-sent events of an answer, and the stream that writes them."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from pd.core.errors import PDError, error_body
from pd.proxy.dispatch.job import ClientState
from pd.proxy.http.background import INLINE_BYTES
from pd.proxy.http.error_shapes import anthropic_error, ollama_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from pd.net.guarded_protocol import BodyWriter
    from pd.proxy.dispatch.generation import Choice, Delta
    from pd.proxy.dispatch.job import Job
    from pd.proxy.http.background import Background
    from pd.proxy.http.typed_routes import ClientRequest

# A cumulative stream pauses after larger events, because otherwise the rate of bytes would grow
# with the events.
FREE_EVENT_BYTES = 16 << 10
CUMULATIVE_BYTES_PER_SECOND = 4 << 20
# A stream whose API has pings sends one after this many seconds of silence.
PING_SECONDS = 10.0

_encoder = msgspec.json.Encoder()
# JSON strings may hold these characters, but clients that read lines of text (httpx) end a line at
# each of them.
_LINE_BREAKS = {
    char.encode(): f"\\u{ord(char):04x}".encode() for char in ("\x85", "\u2028", "\u2029")
}


class EventForm(NamedTuple):
    """How an API writes the events of a stream.

    Attributes:
        encode: writes one event.
        make_error: makes the event of an error.
        end: bytes after the last event of an answer that did not fail.
        content_type: media type of the stream.
        ping: an event to send while nothing else is; empty if clients expect none.
    """

    encode: Callable[[Any], bytes]
    make_error: Callable[[PDError], object]
    end: bytes
    content_type: bytes = b"text/event-stream; charset=utf-8"
    ping: bytes = b""


class Renderer(Protocol):
    """Turns a job's output into the JSON of an API.

    Attributes:
        is_cumulative: each event repeats the answer so far.
        event_form: form of the events.
    """

    is_cumulative: bool
    event_form: EventForm

    def estimate_bytes(self, choice: Choice, delta: Delta) -> int:
        """Estimate the size of a delta's events in bytes."""

    def render_delta(self, choice: Choice, delta: Delta) -> Iterable[object]:
        """Make the events of a delta. May be called from any thread."""

    def is_plain(self, choice: Choice) -> bool:
        """Tell whether the choice's deltas each make one event and differ only in the text.

        The first delta and the one with the end are exempt.
        """

    def render_end(self) -> Iterable[object]:
        """Make the events after the end of all choices, such as the usage."""

    def render_whole(self) -> object:
        """Make the response of an answer that is not streamed."""


class EventWriter:
    """Encodes the events of one answer.

    The events of a plain choice share the JSON around their texts, so we encode this JSON once.
    """

    __slots__ = ("_after", "_around", "_before", "_choice", "_encode", "_renderer")

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._encode = renderer.event_form.encode
        # JSON before and after a choice's texts; empty if the choice is not plain.
        self._around: dict[Choice, tuple[bytes, bytes]] = {}
        # The last choice and its JSON, so that we need no look-up while one choice is written.
        self._choice: Choice | None = None
        self._before = self._after = b""

    def encode_deltas(self, deltas: Sequence[tuple[Choice, Delta]]) -> bytes:
        """Encode deltas as events, in order. May be called from any thread, one call at a time."""
        parts: list[bytes] = []
        for choice, delta in deltas:
            if delta.is_first or delta.finish is not None:
                parts += map(self._encode, self._renderer.render_delta(choice, delta))
                continue
            if choice is not self._choice:
                self._before, self._after = self._encode_around(choice, delta)
                self._choice = choice
            if self._before:
                parts += (self._before, _encode_json(delta.text), self._after)
            else:
                parts += map(self._encode, self._renderer.render_delta(choice, delta))
        return b"".join(parts)

    def _encode_around(self, choice: Choice, delta: Delta) -> tuple[bytes, bytes]:
        around = self._around.get(choice)
        if around is None:
            around = b"", b""
            if self._renderer.is_plain(choice):
                mark = secrets.token_hex(16)  # occurs nowhere else in the event
                (only,) = self._renderer.render_delta(choice, delta._replace(text=mark))
                before, _, after = self._encode(only).partition(_encode_json(mark))
                around = before, after
            self._around[choice] = around
        return around


def _encode_json(value: object) -> bytes:
    data = _encoder.encode(value)
    if not data.isascii():
        for char, escape in _LINE_BREAKS.items():
            data = data.replace(char, escape)
    return data


def encode_event(value: object) -> bytes:
    """Encode one event with a value in JSON."""
    return b"data: " + _encode_json(value) + b"\n\n"


def encode_named_event(value: dict[str, Any]) -> bytes:
    """Encode one event whose name is the value's ``type``."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + encode_event(value)


def encode_line(value: object) -> bytes:
    """Encode one event as a line."""
    return _encode_json(value) + b"\n"


PLAIN_EVENTS: EventForm = EventForm(encode_event, error_body, b"data: [DONE]\n\n")
"""OpenAI's form."""

NAMED_EVENTS: EventForm = EventForm(
    encode_named_event, anthropic_error, b"", ping=encode_named_event({"type": "ping"})
)
"""Anthropic's form."""

JSON_LINES: EventForm = EventForm(encode_line, ollama_error, b"", b"application/x-ndjson")
"""Ollama's form."""


async def _get_error(work: Awaitable[None]) -> PDError | None:
    """Wait for the work, and return its error."""
    try:
        await work
    except PDError as error:
        return error
    return None


class EventStream:
    """Writes a job's events to its client.

    A task writes the beginning and the end of the answer, large events, and whatever a slow client
    left unread. All other events are written by :meth:`write_news` as soon as a node's messages
    have been read, because waking the task costs more than writing a few tokens.
    """

    def __init__(
        self,
        request: ClientRequest,
        job: Job,
        renderer: Renderer,
        background: Background,
        request_id: str,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``keep``: called before the end of an answer that did not fail. May raise PDError."""
        self._request = request
        self._job = job
        self._renderer = renderer
        self._background = background
        self._request_id = request_id
        self._keep = keep
        self._writer = EventWriter(renderer)
        self._has_started = False
        # Whether nothing was written since we began to wait for the next ping.
        self._is_silent = True
        state = request.scope.get("state", {})
        self._body: BodyWriter | None = state.get("body_writer")
        self._transport: asyncio.Transport | None = state.get("transport")

    async def write_all(self) -> None:
        """Write the events until the answer ends.

        Raises the job's error if it failed before anything was sent, because the response can
        still have its HTTP status then.
        """
        job = self._job
        news = await self._wait_for_news()
        if job.error is not None and not self._has_started:
            raise job.error
        await self._start_response()
        job.set_client(ClientState.ENCODING)
        form = self._renderer.event_form
        # Add what came while the client did not read; it would not be written before the end.
        news = list(dict.fromkeys([*news, *job.take_news()]))
        while True:
            is_done, error = job.is_done, job.error
            job.set_client(ClientState.ENCODING)
            # We take the deltas here, because more tokens may come while another thread encodes
            # these.
            deltas = [(choice, choice.take_delta()) for choice in news]
            size = sum(self._renderer.estimate_bytes(choice, delta) for choice, delta in deltas)
            data = await self._background.run(size, self._writer.encode_deltas, deltas)
            if is_done and error is None and self._keep is not None:
                error = await _get_error(self._keep())
            if error is not None:
                data += form.encode(form.make_error(error))
            elif is_done:
                data += b"".join([*map(form.encode, self._renderer.render_end()), form.end])
            # Sending waits only while the client has not read what was sent before.
            job.set_client(ClientState.SENDING)
            await self._request.send_part(data, is_last=is_done)
            job.set_client(ClientState.IDLE)
            if is_done:
                return
            if self._renderer.is_cumulative and len(data) > FREE_EVENT_BYTES:
                await asyncio.sleep(len(data) / CUMULATIVE_BYTES_PER_SECOND)
            news = await self._wait_for_news()

    async def _start_response(self) -> None:
        """Send the head of the response, unless we already have."""
        if self._has_started:
            return
        self._has_started = True
        headers = [
            (b"content-type", self._renderer.event_form.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._request_id.encode()),
        ]
        self._job.set_client(ClientState.SENDING)
        await self._request.start_response(200, headers)

    async def _wait_for_news(self) -> list[Choice]:
        """Wait for the job's news, and send pings meanwhile if the API has them.

        A client, or a proxy before it, may give up a connection on which nothing comes. The first
        ping sends the head of the response, so a later error is an event.
        """
        ping = self._renderer.event_form.ping
        while ping:
            self._is_silent = True
            try:
                async with asyncio.timeout(PING_SECONDS):
                    return await self._job.wait_for_news()
            except TimeoutError:
                if self._is_silent:
                    await self._start_response()
                    self._job.set_client(ClientState.SENDING)
                    await self._request.send_part(ping, is_last=False)
                    self._job.set_client(ClientState.IDLE)
        return await self._job.wait_for_news()

    def write_news(self) -> bool:
        """Write the news at once and return True.

        Return False and write nothing if writing would take long, the client is slow, or the answer
        ends. The task writes the news then.
        """
        job, body = self._job, self._body
        if (
            body is None
            or self._renderer.is_cumulative
            or not body.is_open
            or job.is_done
            or job.unread_bytes > INLINE_BYTES
            or not body.can_write
        ):
            return False
        data = self._writer.encode_deltas(
            [(choice, choice.take_delta()) for choice in job.take_news()]
        )
        if data:
            body.write_part(data)
            self._is_silent = False
        return True

    def close_client(self) -> None:
        """Close the connection of a client that does not read."""
        if self._transport is not None:
            self._transport.abort()
