"""Streamed completions over plain sockets: bytes are noted with their time and read afterwards.

Events may be those of ``/v1/completions``, of ``/v1/chat/completions``, or of ``/generate``, whose
texts may hold those before.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from pd.bench.load import reception as load
from pd.bench.load.client import fetch_from_here
from pd.bench.load.stream import parse_events, parse_http
from pd.bench.load.target import split_url, tls_context
from pd.core.errors import SetupError, UsageError

_ENDPOINT = "/v1/completions"
_CHAT_ENDPOINT = "/v1/chat/completions"


@dataclass
class BenchCompletion:
    """One streamed answer; times are of ``time.perf_counter``.

    Attributes:
        sent: when the request was written, to a connection that was there.
        times: when the last byte of each event that holds tokens had come.
        counts: tokens in each of these events; 1 where the server does not tell.
        characters: of the text of each of these events.
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

    def add(self, at: float, count: int, text: str) -> None:
        """Note an event that holds tokens."""
        self.times.append(at)
        self.counts.append(count)
        self.characters.append(len(text))


class CompletionReception(load.Reception):
    """One connection with one request."""

    def completion(self) -> BenchCompletion:
        """Parse what was received."""
        found = BenchCompletion(self.sent)
        answer = parse_http(self._pieces)
        if answer.status == 0 and self.cut_reason is not None:
            return found
        if answer.status != 200:
            text = f"{answer.content.decode(errors='replace').strip():.300}"
            found.error = f"HTTP status {answer.status}: {text}" if answer.status else "no answer"
            return found
        done = False
        for at, data in parse_events(answer.body):
            if data == b"[DONE]":
                done = True
                continue
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                found.error = str(event["error"])
                return found
            if "meta_info" in event:
                count = event["meta_info"]["completion_tokens"] - found.num_tokens
                if count:
                    found.add(at, count, event["text"])
                continue
            for choice in event["choices"]:
                ids = choice.get("token_ids")
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                count = int(bool(text)) if ids is None else len(ids)
                if count:
                    found.add(at, count, text or "")
        if not (done or self.cut_reason is not None):
            found.error = "the connection ended in the middle of the stream"
        return found


class Server:
    """The measured server, asked with a bearer token if there is an ``api_key``.

    Raises UsageError for an address that is none.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None = None) -> None:
        parts = split_url(url)
        if parts is None or parts.hostname is None or parts.port is None:
            raise UsageError(f"--url is http://HOST:PORT or https://HOST:PORT, not {url}")
        self.host, self.port = parts.hostname, parts.port
        self._scheme = parts.scheme
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._address = f"{host}:{self.port}"
        self._model = model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def context_length(self) -> int | None:
        """Tokens of a prompt and its answer at most; None if the server does not say. Raises
        SetupError if no server answers."""
        url = f"{self._scheme}://{self._address}/v1/models"
        _, text = fetch_from_here(url, headers=self._headers, timeout=10)
        try:
            models = json.loads(text)["data"]
            served = [model for model in models if self._model in (None, model["id"])]
            return int(served[0]["max_model_len"])
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
        return self.post(_ENDPOINT, fields | (more or {}))

    def chat_request(
        self, content: str, max_tokens: int, *, more: dict[str, Any] | None = None
    ) -> bytes:
        """A greedy chat of one message, as it goes over the wire.

        ``more``: further fields of the request.
        """
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        if self._model is not None:
            fields["model"] = self._model
        return self.post(_CHAT_ENDPOINT, fields | (more or {}))

    def post(self, endpoint: str, fields: dict[str, Any]) -> bytes:
        """A request whose answer ends the connection, as it goes over the wire."""
        body = json.dumps(fields, separators=(",", ":")).encode()
        head = (
            f"POST {endpoint} HTTP/1.1\r\nHost: {self._address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n"
        )
        more_head = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        return f"{head}{more_head}\r\n".encode() + body

    async def start(self, request: bytes) -> CompletionReception:
        """Connect, then send. Raises SetupError if no server answers."""
        loop = asyncio.get_running_loop()
        tls = tls_context() if self._scheme == "https" else None
        try:
            _, reception = await loop.create_connection(
                CompletionReception, self.host, self.port, ssl=tls
            )
        except OSError as error:
            raise SetupError(f"cannot reach {self._address}: {error}") from error
        reception.send(request)
        return reception

    async def ask(self, request: bytes) -> BenchCompletion:
        """Send and wait for the end. Raises SetupError if no server answers."""
        reception = await self.start(request)
        await reception.ended
        return reception.completion()
