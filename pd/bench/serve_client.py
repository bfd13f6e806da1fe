"""Requests and streamed answers of `pd-bench serve` and `pd-bench proxy`.

They use the connections and the parser of the load generator (:mod:`pd.bench.load`). Each piece of
an answer gets its time when it arrives. We parse the pieces after the measurement, because parsing
would delay it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.bench.load.answers import UNFINISHED, read_answer
from pd.bench.load.client import fetch_from_here
from pd.bench.load.endpoints import Chat, Completions
from pd.bench.load.probe import ServerProbe
from pd.bench.load.reception import Reception
from pd.bench.load.stream import parse_http
from pd.bench.load.target import EndpointAddress, split_url
from pd.core.addresses import format_host
from pd.core.errors import NodeFailedError, SetupError, UsageError

if TYPE_CHECKING:
    from pd.bench.load.endpoints import Endpoint


class BenchRequest(NamedTuple):
    """A request as it goes over the wire, and its API."""

    content: bytes
    endpoint: Endpoint


@dataclass
class BenchCompletion:
    """One streamed answer; times are of ``time.perf_counter``.

    Attributes:
        sent: when we wrote the request to an open connection.
        times: when the last byte of each event with tokens had arrived.
        counts: tokens in each of these events; 1 if the server does not say.
        characters: length of the text in each of these events.
        error: the server's error, or why the stream broke off; None if all is well.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class CompletionReception(Reception):
    """One connection with one request to an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint

    def completion(self) -> BenchCompletion:
        """Parse the received pieces. An answer ended by :meth:`cut` has no error."""
        answer = read_answer(self.pieces, self._endpoint)
        error = answer.error
        if self.cut_reason is not None and (
            answer.error_kind in UNFINISHED or not answer.http_status
        ):
            error = None
        elif error is None and answer.counts is None:
            error = "the server's events do not say how many tokens they have"
        return BenchCompletion(
            self.sent, answer.times, answer.counts or [], answer.characters, error
        )


class Server:
    """The measured server; requests carry ``api_key`` as a bearer token.

    Raises UsageError for an invalid address.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None = None) -> None:
        parts = split_url(url)
        if parts is None or parts.port is None:
            raise UsageError(f"--url is http://HOST:PORT or https://HOST:PORT, not {url}")
        self._target = EndpointAddress.parse(url, "", api_key)
        self._address = f"{format_host(self._target.host)}:{self._target.port}"
        self._model = model

    def context_length(self) -> int | None:
        """Return the most tokens of a prompt and its answer; None if the server does not say.

        Raises SetupError if no server answers.
        """
        return ServerProbe(self._target, "", fetch_from_here).find_model(self._model)[1]

    def make_request(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        ignore_eos: bool = True,
        more: dict[str, Any] | None = None,
    ) -> BenchRequest:
        """Make a greedy completion of token ids. ``more``: further fields of the request."""
        fields = {"prompt": prompt, "ignore_eos": ignore_eos, "return_token_ids": True}
        return self._make_openai_request(Completions(), max_tokens, fields | (more or {}))

    def make_chat_request(
        self, content: str, max_tokens: int, *, more: dict[str, Any] | None = None
    ) -> BenchRequest:
        """Make a greedy chat with one message. ``more``: further fields of the request."""
        messages = [{"role": "user", "content": content}]
        fields = {"messages": messages, "ignore_eos": True}
        return self._make_openai_request(Chat(), max_tokens, fields | (more or {}))

    def _make_openai_request(
        self, endpoint: Endpoint, max_tokens: int, fields: dict[str, Any]
    ) -> BenchRequest:
        common = {"max_tokens": max_tokens, "temperature": 0, "stream": True}
        model = {} if self._model is None else {"model": self._model}
        return self.make_post(endpoint, common | model | fields)

    def make_post(self, endpoint: Endpoint, fields: dict[str, Any]) -> BenchRequest:
        """Make a request whose answer ends the connection."""
        target = dataclasses.replace(self._target, path=self._target.path + endpoint.path)
        return BenchRequest(target.make_request(fields), endpoint)

    async def start_request(self, request: BenchRequest) -> CompletionReception:
        """Connect and send a request. Raises SetupError if no server answers."""
        make = partial(CompletionReception, request.endpoint)
        try:
            reception = await self._target.connect_unstamped(make)
        except OSError as error:
            raise SetupError(f"cannot reach {self._address}: {error}") from error
        reception.send_request(request.content)
        return reception

    async def send_request(self, request: BenchRequest) -> BenchCompletion:
        """Send a request and wait for its end. Raises SetupError if no server answers."""
        reception = await self.start_request(request)
        await reception.ended
        return reception.completion()

    async def post_once(self, fields: dict[str, Any]) -> None:
        """Ask for a completion without streaming. Raises NodeFailedError unless the status is
        200."""
        reception = await self.start_request(self.make_post(Completions(), fields))
        await reception.ended
        answer = parse_http(reception.pieces)
        if answer.status != 200:
            raise NodeFailedError(f"{self._address} answered with status {answer.status}")

    async def post_repeatedly(
        self, fields: dict[str, Any], count: int, connections: int, path: str = Completions.path
    ) -> None:
        """Ask ``count`` times for an answer without streaming.

        We keep the connections, because opening one costs more than a short request. Raises
        NodeFailedError unless each status is 200.
        """
        target = dataclasses.replace(self._target, path=self._target.path + path)
        content = target.make_request(fields, keep_alive=True)
        left = iter(range(count))

        async def post() -> None:
            reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
            for _ in left:
                writer.write(content)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise NodeFailedError(f"{self._address} answered {head[:40]!r}")
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length))
            writer.close()

        await asyncio.gather(*(post() for _ in range(connections)))
