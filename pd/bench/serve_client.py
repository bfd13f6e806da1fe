"""Streamed completions over plain sockets: bytes are noted with their time and read afterwards.

A model that makes 48 streams a token every 7 ms sends 7,000 events a second; a client that parsed
each as it comes would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENDPOINT = "/v1/completions"


@dataclass
class BenchCompletion:
    """One streamed answer; times are of ``time.perf_counter``.

    Attributes:
        sent: when the request was written, to a connection that was there.
        times: when the last byte of each event that holds tokens had come.
        counts: tokens in each of these events.
        error: the server's error, or why the stream broke off; None if all is well.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class Reception(asyncio.Protocol):
    """Bytes of one connection as they come.

    Attributes:
        events: lines that begin an event, at least as many as there are whole ones.
        ended: done when the server has closed the connection, or :meth:`cut` has.
    """

    def __init__(self) -> None:
        self.sent = 0.0
        self.events = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pieces: list[tuple[float, bytes]] = []
        self._transport: asyncio.Transport | None = None
        self._was_cut = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        self.events += data.count(b"data: ")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self.sent = time.perf_counter()
        self._transport.write(request)

    def cut(self) -> None:
        """Close the connection; what was received so far counts."""
        assert self._transport is not None
        self._was_cut = True
        self._transport.abort()

    def completion(self) -> BenchCompletion:
        """Parse what was received."""
        found = BenchCompletion(self.sent)
        status, body = _parse_http(self._pieces)
        if status == 0 and self._was_cut:
            return found
        if status != 200:
            text = b"".join(data for _, data in body).decode(errors="replace").strip()
            found.error = f"HTTP status {status}: {text[:300]}" if status else "no answer"
            return found
        done = False
        for at, data in _events(body):
            if data == b"[DONE]":
                done = True
                continue
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                found.error = str(event["error"])
                return found
            for choice in event["choices"]:
                ids = choice.get("token_ids")
                count = bool(choice["text"]) if ids is None else len(ids)
                if count:
                    found.times.append(at)
                    found.counts.append(count)
        if not (done or self._was_cut):
            found.error = "the connection ended in the middle of the stream"
        return found


def _parse_http(pieces: list[tuple[float, bytes]]) -> tuple[int, list[tuple[float, bytes]]]:
    """Status and body of an answer, the body in parts with their times; status 0 without one."""
    raw = b"".join(data for _, data in pieces)
    ends = list(accumulate(len(data) for _, data in pieces))
    head, blank, _ = raw.partition(b"\r\n\r\n")
    if not blank:
        return 0, []
    lines = head.lower().split(b"\r\n")
    status, offset = int(lines[0].split()[1]), len(head) + len(blank)
    if b"transfer-encoding: chunked" not in lines:
        return status, [(pieces[-1][0], raw[offset:])]
    body = []
    while (line_end := raw.find(b"\r\n", offset)) >= 0:
        size, begin = int(raw[offset:line_end].split(b";")[0], 16), line_end + 2
        offset = begin + size + 2
        if size == 0 or offset > len(raw):
            break
        # The end of the chunk came with the first piece that reaches so far.
        body.append((pieces[bisect_left(ends, begin + size)][0], raw[begin : begin + size]))
    return status, body


def _events(body: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Data of each server-sent event, and when it was complete."""
    rest = b""
    for at, data in body:
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield at, event.removeprefix(b"data: ")


class Server:
    """The measured server.

    Raises UsageError for an address that is none.
    """

    def __init__(self, url: str, model: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise UsageError(f"--url is http://HOST:PORT, not {url}")
        self.host, self.port = parts.hostname, parts.port
        self._model = model

    def context_length(self) -> int | None:
        """Tokens of a prompt and its answer at most; None if the server does not say. Raises
        SetupError if no server answers."""
        where = f"{self.host}:{self.port}"
        try:
            models = httpx.get(f"http://{where}/v1/models", timeout=10).json()["data"]
            served = [model for model in models if self._model in (None, model["id"])]
            return int(served[0]["max_model_len"])
        except httpx.HTTPError as error:
            raise SetupError(f"cannot reach {where}: {error}") from error
        except (ValueError, KeyError, TypeError, IndexError):
            return None

    def request(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        ignore_eos: bool = True,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        """A greedy completion of token ids, as it goes over the wire.

        ``more``: further fields of the request.
        """
        fields: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            "return_token_ids": True,
        }
        if self._model is not None:
            fields["model"] = self._model
        fields |= more or {}
        body = json.dumps(fields, separators=(",", ":")).encode()
        head = (
            f"POST {_ENDPOINT} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + body

    async def start(self, request: bytes) -> Reception:
        """Connect, then send. Raises SetupError if no server answers."""
        loop = asyncio.get_running_loop()
        try:
            _, reception = await loop.create_connection(Reception, self.host, self.port)
        except OSError as error:
            raise SetupError(f"cannot reach {self.host}:{self.port}: {error}") from error
        reception.send(request)
        return reception

    async def ask(self, request: bytes) -> BenchCompletion:
        """Send and wait for the end. Raises SetupError if no server answers."""
        reception = await self.start(request)
        await reception.ended
        return reception.completion()
