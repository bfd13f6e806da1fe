"""HTTP plumbing: bodies in, errors and event streams out."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.responses import Response

from pd.core.errors import (
    AbortedError,
    DeadlineExceededError,
    PDError,
    QueueFullError,
    UnavailableError,
    error_body,
)
from pd.proxy import logprobs
from pd.proxy.background import INLINE_BYTES
from pd.proxy.event_stream import EventRenderer, EventWriter, event

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    from pd.core.guarded_protocol import BodyWriter
    from pd.proxy.background import Background
    from pd.proxy.dispatcher import Dispatcher
    from pd.proxy.generation import Choice, Delta, Spec
    from pd.proxy.job import Job
    from pd.proxy.shared import RidClaims

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
# The larger the events of a cumulative stream are, the fewer are sent.
FREE_EVENT_BYTES = 16 << 10
CUMULATIVE_BYTES_PER_SECOND = 4 << 20
DONE = b"data: [DONE]\n\n"
# Names of requests that may stand in a header.
_HEADER_VALUE = re.compile("[!-~]+")

_encoder = msgspec.json.Encoder()


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(_encoder.encode(value), status, headers, "application/json")


def error_response(error: PDError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if isinstance(error, QueueFullError | UnavailableError):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if isinstance(error, DeadlineExceededError):
        # OpenAI's clients send a request again after 408, and it would take as long again.
        headers["X-Should-Retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), error.status, headers)


class Renderer(EventRenderer, Protocol):
    """An API's view of a job. Its events are those of a stream.

    Attributes:
        cumulative: events repeat what was sent before.
    """

    cumulative: bool

    def size(self, choice: Choice, delta: Delta) -> int:
        """About how many bytes :meth:`events` will make of it."""

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
        background: Background,
        name: str,
    ) -> None:
        """``name``: the response's ``X-Request-Id``, if a header can have it."""
        super().__init__()
        self._named = {"X-Request-Id": name} if _HEADER_VALUE.fullmatch(name) else {}
        self._dispatcher = dispatcher
        self._job = job
        self._specs = specs
        self._renderer = renderer
        self._timeout = timeout
        self._background = background
        self._events_of = EventWriter(renderer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        transport = scope.get("state", {}).get("transport")
        job.on_overflow = lambda: self._overflow(transport)
        watcher = None
        try:
            with self._dispatcher.run(job, self._specs, self._timeout):
                watcher = asyncio.create_task(self._watch(receive))
                await self._dispatcher.start(job, self._specs)
                if job.streaming:
                    await self._stream(send, scope, receive)
                else:
                    await job.finished()
                    await (await self._whole())(scope, receive, send)
        except PDError as error:
            if job.outcome is None:
                await error_response(error, self._named)(scope, receive, send)
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _whole(self) -> Response:
        job = self._job
        top = max(spec.params.top_logprobs for spec in self._specs)
        entries = sum(
            len(choice.logprobs) + len(generation.prompt_logprobs)
            for generation in job.generations
            for choice in generation.choices
        )
        # Texts are parsed for reasoning and tool calls.
        size = logprobs.size(entries, top) + sum(
            choice.text_length for generation in job.generations for choice in generation.choices
        )
        return await self._background.run(
            size, lambda: json_response(self._renderer.body(), headers=self._named)
        )

    async def _stream(self, send: Send, scope: Scope, receive: Receive) -> None:
        job = self._job
        news = await job.news()
        if job.error is not None:
            raise job.error
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        headers += [(b"x-request-id", name.encode()) for name in self._named.values()]
        # `send` waits only if the client has not read what it was sent before.
        job.writing = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        job.writing = False
        # What came while the client did not read; later it would not be written before the end.
        news = list(dict.fromkeys([*news, *job.take_news()]))
        writer: NewsWriter | None = None
        body: BodyWriter | None = scope.get("state", {}).get("body_writer")
        if body is not None and body.is_open and not self._renderer.cumulative:
            writer = NewsWriter(job, self._events_of, body)
            job.write_news = writer.write
        while True:
            done = job.done
            error = job.error
            if writer is not None:
                writer.must_wait = True
            data = await self._events(news)
            if error is not None:
                data += event(error_body(error))
            elif done:
                last = [event(value) for value in self._renderer.last_events()]
                data += b"".join([*last, DONE])
            await self._write(send, data, more=not done)
            if writer is not None:
                writer.must_wait = False
            if done:
                return
            if self._renderer.cumulative and len(data) > FREE_EVENT_BYTES:
                await asyncio.sleep(len(data) / CUMULATIVE_BYTES_PER_SECOND)
            news = await job.news()

    async def _events(self, news: list[Choice]) -> bytes:
        """The news as server-sent events."""
        renderer = self._renderer
        # Taken here, since more may come while another thread writes it down.
        deltas = [(choice, choice.take()) for choice in news]
        size = sum(renderer.size(choice, delta) for choice, delta in deltas)
        return await self._background.run(size, self._events_of.write, deltas)

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


class NewsWriter:
    """Writes a job's news at once, without the task of its response.

    Attributes:
        must_wait: the response took news that are not written yet, so nothing may go before them.
    """

    __slots__ = ("_body", "_events_of", "_job", "must_wait")

    def __init__(self, job: Job, events_of: EventWriter, body: BodyWriter) -> None:
        self._job, self._events_of, self._body = job, events_of, body
        self.must_wait = False

    def write(self) -> bool:
        """Write the news, unless that would take long, the client is behind, or the answer ends.
        Returns whether they were written."""
        job = self._job
        if self.must_wait or job.done or job.unread_bytes > INLINE_BYTES or not self._body.ready:
            return False
        data = self._events_of.write([(choice, choice.take()) for choice in job.take_news()])
        if data:
            self._body.write(data)
        return True


class ClaimingResponse(Response):
    """A response whose request has names that its client chose, in a proxy of several processes:
    they are claimed before the job begins, so that no other process has a job of these names."""

    def __init__(
        self, response: JobResponse, job: Job, specs: list[Spec], claims: RidClaims
    ) -> None:
        super().__init__()
        self._response = response
        self._job = job
        self._specs = specs
        self._claims = claims

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        rids = dict.fromkeys([job.rid, *(spec.rid for spec in self._specs)])
        try:
            async with self._claims.held(job.owner, rids):
                await self._response(scope, receive, send)
        except PDError as error:
            await error_response(error)(scope, receive, send)
