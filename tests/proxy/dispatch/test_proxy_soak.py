"""A proxy under load for minutes: 200 clients with a connection each, requests of all kinds,
clients that leave, clients that hardly read, and clients that read nothing until the proxy cuts
them. Half of the clients keep their connections for many requests. The proxy's memory stays flat,
and no request is left.

``PD_TEST_SOAK_SECONDS`` says for how long (600).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from pd.bench.proxy_processes import Running, start_proxy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SECONDS = float(os.environ.get("PD_TEST_SOAK_SECONDS", "600"))
CONNECTIONS = 200
# Those of them that read nothing, and for how long: twice as long as it takes to be cut.
DEAF_CONNECTIONS, DEAF_SECONDS = 8, 140.0
STEP_SECONDS = 0.04
# A client's pause after a request, at most. Without any, two cores have no time left for streams.
PAUSE_SECONDS = 8.0
# A client's own patience: far more than any of its requests takes.
PATIENCE = 120.0
# What the allocator and caches of the process may still gain after a third of the time.
MAX_GROWTH_BYTES = 24 << 20


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def open_files(pid: int) -> list[str]:
    """What a process's descriptors are; of TCP connections their addresses and states, in hex as
    the kernel lists them."""
    connections = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        connections[f"socket:[{columns[9]}]"] = " ".join(columns[1:4])
    targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(connections.get(target, target) for target in targets)


def metric(proxy: Running, name: str) -> float:
    text = httpx.get(f"{proxy.url}/metrics", timeout=30).text
    rows = [row for row in text.splitlines() if row.startswith(name)]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


class Connection(NamedTuple):
    """A connection of a client, with one request at a time on it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def status(self) -> tuple[int, bytes]:
        """Read the head of an answer; returns its status, and the head in lower case."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1]), head.lower()

    async def chunk(self) -> bytes:
        """Read the next chunk of a body that comes in chunks; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def body(self, head: bytes) -> bytes:
        """Read the body that follows a head, to its end."""
        if b"transfer-encoding: chunked" in head:
            chunks = []
            while chunk := await self.chunk():
                chunks.append(chunk)
            return b"".join(chunks)
        length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
        return await self.reader.readexactly(int(length))


class Client:
    """Sends one request after the other, over one connection or over a new one for each.

    Attributes:
        keeps: whether it keeps its connection for the next request.
        done: how many requests of each kind have ended.
        most: how many requests came over one connection, at most.
    """

    def __init__(
        self, url: str, rng: random.Random, number: int, pause: float = PAUSE_SECONDS
    ) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._rng = rng
        self._number, self._pause = number, pause
        self.keeps = number % 2 == 0
        self.done: dict[str, int] = {}
        self.most = 0
        self._kept: Connection | None = None
        self._sent = 0

    async def run(self, until: float) -> None:
        read_to_the_end: list[Callable[[], Awaitable[None]]] = [
            self.whole,
            self.stream,
            self.stream,
            self.chat,
            self.chat_stream,
            self.logprobs,
            self.batch,
            self.abort,
            self.refused,
        ]
        # A connection that is kept serves a dozen requests before its client leaves.
        kinds = read_to_the_end * (3 if self.keeps else 1) + [self.leave, self.read_slowly]
        while time.monotonic() < until:
            kind = self._rng.choice(kinds)
            async with asyncio.timeout(PATIENCE):
                await kind()
            self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1
            await asyncio.sleep(self._rng.random() * self._pause)
        if self._kept is not None:
            self._kept.writer.close()

    async def read_nothing(self, until: float) -> None:
        """Streams that the proxy cuts when the kernel's buffers and what it holds itself are full.
        The client cannot see that before it has read what is in the buffers."""
        # Every event has the name, so that half a megabyte of buffers is full after 500 tokens.
        fields = {"prompt": [9] * 20, "max_tokens": 100_000, "stream": True, "ignore_eos": True}
        while not self.done or time.monotonic() + DEAF_SECONDS < until:
            rid = f"deaf-{self._number}-{self._rng.random()}-{'🐢' * 200}"
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(connection, (self._host, self._port))
                request = self.request("/v1/completions", fields | {"rid": rid}, keeps=False)
                await loop.sock_sendall(connection, request)
                await asyncio.sleep(DEAF_SECONDS)
            self.done["read_nothing"] = self.done.get("read_nothing", 0) + 1

    async def whole(self) -> None:
        """An answer that is not streamed."""
        tokens = self._rng.randint(1, 30)
        status, body = await self.post("/v1/completions", prompt=self.prompt(), max_tokens=tokens)
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == tokens

    async def stream(self) -> None:
        """A stream that is read to its end."""
        tokens = self._rng.randint(1, 60)
        interval = self._rng.choice([1, 1, 8])
        params = {"max_new_tokens": tokens, "stop": ["never said"], "stream_interval": interval}
        asked = {"text": self.prompt(), "sampling_params": params, "stream": True}
        incremental = self._rng.random() < 0.5
        status, body = await self.post("/generate", **asked, incremental=incremental)
        assert status == 200, body
        assert body.endswith(b"data: [DONE]\n\n"), body[-200:]

    async def chat(self) -> None:
        """A chat with one answer or several, maybe with log probabilities."""
        tokens, asked = self.chat_request()
        status, body = await self.post("/v1/chat/completions", **asked)
        assert status == 200, body
        answer = json.loads(body)
        assert answer["usage"]["completion_tokens"] == asked["n"] * tokens
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "length"
            if asked["logprobs"]:
                assert len(choice["logprobs"]["content"]) == tokens

    async def chat_stream(self) -> None:
        """The same as a stream."""
        tokens, asked = self.chat_request()
        status, body = await self.post("/v1/chat/completions", **asked, stream=True)
        assert status == 200, body
        *events, done = [json_or_none(event) for event in body.split(b"\n\n")[:-1]]
        choices = [choice for event in events for choice in event["choices"]]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert done is None and ends == ["length"] * asked["n"], body[-200:]
        if asked["logprobs"]:
            entries = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
            assert sum(map(len, entries)) == asked["n"] * tokens

    def chat_request(self) -> tuple[int, dict[str, Any]]:
        """The tokens of each answer to a chat, and what to ask for."""
        tokens, logprobs = self._rng.randint(1, 30), self._rng.random() < 0.5
        asked: dict[str, Any] = {"max_tokens": tokens, "n": self._rng.choice([1, 1, 2, 3])}
        asked["messages"] = [{"role": "user", "content": self.prompt()}]
        return tokens, asked | {"logprobs": logprobs, "top_logprobs": 2 if logprobs else None}

    async def logprobs(self) -> None:
        """Log probabilities of answers and of their prompt."""
        tokens = self._rng.randint(1, 30)
        params = {"max_new_tokens": tokens, "n": self._rng.choice([1, 2])}
        asked = {"text": self.prompt(), "sampling_params": params, "return_logprob": True}
        status, body = await self.post(
            "/generate", **asked, logprob_start_len=0, top_logprobs_num=self._rng.choice([0, 2])
        )
        assert status == 200, body
        answers = json.loads(body)
        for meta in [each["meta_info"] for each in (answers if params["n"] > 1 else [answers])]:
            assert len(meta["output_token_logprobs"]) == tokens
            assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]

    async def batch(self) -> None:
        """Several prompts in one request, whose answers are streamed or not."""
        prompts = [self.prompt() for _ in range(self._rng.randint(2, 6))]
        tokens, number = self._rng.randint(1, 20), self._rng.choice([1, 2])
        asked = {"prompt": prompts, "max_tokens": tokens, "n": number}
        if self._rng.random() < 0.5:
            status, body = await self.post("/v1/completions", **asked)
            assert status == 200, body
            choices = json.loads(body)["choices"]
            assert [choice["index"] for choice in choices] == list(range(number * len(prompts)))
        else:
            status, body = await self.post("/v1/completions", **asked, stream=True)
            assert status == 200, body
            assert body.count(b'"finish_reason":"length"') == number * len(prompts), body[-200:]
            assert body.endswith(b"data: [DONE]\n\n"), body[-200:]

    async def leave(self) -> None:
        """A client that goes away in the middle of a stream, or before."""
        fields = {"prompt": [7] * 40, "max_tokens": 2000, "stream": True}
        connection = await self.send("/v1/completions", **fields)
        if self._rng.random() < 0.5:
            await connection.reader.read(1)
        await asyncio.sleep(self._rng.random() * 0.3)
        connection.writer.transport.abort()

    async def read_slowly(self) -> None:
        """A client that reads a few bytes now and then, and leaves."""
        body = {"text": "once", "sampling_params": {"max_new_tokens": 2000}, "stream": True}
        connection = await self.send("/generate", **body)
        for _ in range(self._rng.randint(1, 20)):
            await connection.reader.read(64)
            await asyncio.sleep(0.1)
        connection.writer.transport.abort()

    async def abort(self) -> None:
        """A request that is ended by its name."""
        rid = f"soak-{self._number}-{self._rng.random()}"
        connection = await self.send(
            "/generate", input_ids=[5], rid=rid, stream=True, sampling_params={"ignore_eos": True}
        )
        status, head = await connection.status()
        assert status == 200 and await connection.chunk()
        # It may have ended just now. The connection of the stream is not free for this request.
        other = await self.connect()
        other.writer.write(self.request("/abort_request", {"rid": rid}, keeps=False))
        await other.reader.read()
        other.writer.close()
        body = await connection.body(head)
        assert body.endswith(b"data: [DONE]\n\n"), body[-200:]
        await self.release(connection, head)

    async def refused(self) -> None:
        status, body = await self.post("/v1/completions", prompt="", max_tokens=1)
        assert status == 400, body

    def prompt(self) -> str:
        """One of few texts, some of them long enough for a thread of their own. With always new
        ones the tree of presumed prefixes would fill for minutes, up to its own bound."""
        words = self._rng.choice([3, 30, 3000])
        return " ".join(str(self._rng.randrange(8) + i) for i in range(3)) + " again" * words

    async def connect(self) -> Connection:
        return Connection(*await asyncio.open_connection(self._host, self._port, limit=1 << 12))

    async def send(self, path: str, **body: Any) -> Connection:
        """Send a request over the connection that was kept, or over a new one."""
        connection, self._kept = self._kept, None
        if connection is None:
            connection, self._sent = await self.connect(), 0
        connection.writer.write(self.request(path, body, keeps=self.keeps))
        self._sent += 1
        self.most = max(self.most, self._sent)
        return connection

    async def release(self, connection: Connection, head: bytes) -> None:
        """Keep the connection of an answer that was read, or see that the proxy closes it."""
        if self.keeps:
            assert b"connection: close" not in head
            self._kept = connection
            return
        assert await connection.reader.read() == b""
        connection.writer.close()

    def request(self, path: str, body: dict[str, Any], *, keeps: bool) -> bytes:
        """A request as it goes over the wire."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Connection: {'keep-alive' if keeps else 'close'}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def post(self, path: str, **body: Any) -> tuple[int, bytes]:
        """Status and body of an answer that is read to its end."""
        connection = await self.send(path, **body)
        status, head = await connection.status()
        content = await connection.body(head)
        await self.release(connection, head)
        return status, content


def json_or_none(event: bytes) -> Any:
    """The data of an event; None for the event that ends a stream."""
    data = event.removeprefix(b"data: ")
    return None if data == b"[DONE]" else json.loads(data)


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 300)
def test_memory_is_flat_and_no_request_is_stuck(seed: int) -> None:
    rng = random.Random(seed)
    with ExitStack() as stack:
        proxy, _ = stack.enter_context(start_proxy(STEP_SECONDS))
        pid = proxy.process.pid
        # What the proxy opens once, with its first requests and heartbeats, is no leak.
        first = Client(proxy.url, random.Random(rng.random()), -1, pause=0.0)
        asyncio.run(first.run(time.monotonic() + 3))
        idle_descriptors = descriptors(pid)
        readings: list[int] = []

        async def watch() -> None:
            while True:
                readings.append(rss(pid))
                await asyncio.sleep(SECONDS / 120)

        async def soak() -> list[Client]:
            clients = [
                Client(proxy.url, random.Random(rng.random()), number)
                for number in range(CONNECTIONS)
            ]
            watcher = asyncio.create_task(watch())
            until = time.monotonic() + SECONDS
            await asyncio.gather(
                *(client.read_nothing(until) for client in clients[:DEAF_CONNECTIONS]),
                *(client.run(until) for client in clients[DEAF_CONNECTIONS:]),
            )
            watcher.cancel()
            # Connections that were closed last are closed in the loop's next turns. The proxy would
            # wait for clients that never read.
            await asyncio.sleep(1)
            return clients

        clients = asyncio.run(soak())
        kinds = {kind for client in clients for kind in client.done}
        counts = {kind: sum(c.done.get(kind, 0) for c in clients) for kind in sorted(kinds)}
        third = len(readings) // 3
        before, after = median(readings[third : 2 * third]), median(readings[-third:])
        kept = sorted(client.most for client in clients[DEAF_CONNECTIONS:] if client.keeps)
        print(f"{counts}; {before / 2**20:.1f} MiB, then {after / 2**20:.1f} MiB")
        print(f"most requests over one kept connection, in each client: {kept}")
        deadline = time.monotonic() + PATIENCE
        while True:
            running = metric(proxy, "pd_proxy_running_requests")
            more = descriptors(pid) - idle_descriptors
            if not running and more <= 4:
                break
            left = f"{running:g} requests and {more} descriptors are left"
            assert time.monotonic() < deadline, f"{left}: {open_files(pid)}"
            time.sleep(0.1)
        assert len(kinds) == 11
        assert median(kept) > 1
        assert metric(proxy, 'pd_proxy_aborts_total{reason="slow_reader"}') > 0
        assert after - before < MAX_GROWTH_BYTES
