"""A proxy under load for minutes: 200 connections, requests of all kinds, clients that leave,
clients that hardly read, and clients that read nothing until the proxy cuts them. Its memory stays
flat, and no request is left.

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
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pd.bench.proxy_processes import Running, proxy_in_front

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


def metric(proxy: Running, name: str) -> float:
    text = httpx.get(f"{proxy.url}/metrics", timeout=30).text
    rows = [row for row in text.splitlines() if row.startswith(name)]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


class Client:
    """One connection at a time, for one request after the other."""

    def __init__(
        self, url: str, rng: random.Random, number: int, pause: float = PAUSE_SECONDS
    ) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._rng = rng
        self._number, self._pause = number, pause
        self.done: dict[str, int] = {}

    async def run(self, until: float) -> None:
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.whole,
            self.stream,
            self.stream,
            self.leave,
            self.read_slowly,
            self.abort,
            self.refused,
        ]
        while time.monotonic() < until:
            kind = self._rng.choice(kinds)
            async with asyncio.timeout(PATIENCE):
                await kind()
            self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1
            await asyncio.sleep(self._rng.random() * self._pause)

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
                request = self.request("/v1/completions", fields | {"rid": rid})
                await loop.sock_sendall(connection, request)
                await asyncio.sleep(DEAF_SECONDS)
            self.done["read_nothing"] = self.done.get("read_nothing", 0) + 1

    async def whole(self) -> None:
        """An answer that is not streamed, in either API."""
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
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), body[-200:]

    async def leave(self) -> None:
        """A client that goes away in the middle of a stream, or before."""
        fields = {"prompt": [7] * 40, "max_tokens": 2000, "stream": True}
        reader, writer = await self.send("/v1/completions", **fields)
        if self._rng.random() < 0.5:
            await reader.read(1)
        await asyncio.sleep(self._rng.random() * 0.3)
        writer.transport.abort()

    async def read_slowly(self) -> None:
        """A client that reads a few bytes now and then, and leaves."""
        body = {"text": "once", "sampling_params": {"max_new_tokens": 2000}, "stream": True}
        reader, writer = await self.send("/generate", **body)
        for _ in range(self._rng.randint(1, 20)):
            await reader.read(64)
            await asyncio.sleep(0.1)
        writer.transport.abort()

    async def abort(self) -> None:
        """A request that is ended by its name."""
        rid = f"soak-{self._number}-{self._rng.random()}"
        reader, writer = await self.send(
            "/generate", input_ids=[5], rid=rid, stream=True, sampling_params={"ignore_eos": True}
        )
        await reader.readuntil(b"data: ")
        await self.post("/abort_request", rid=rid)  # it may have ended just now
        await reader.read()
        writer.transport.abort()

    async def refused(self) -> None:
        status, body = await self.post("/v1/completions", prompt="", max_tokens=1)
        assert status == 400, body

    def prompt(self) -> str:
        """One of few texts, some of them long enough for a thread of their own. With always new
        ones the tree of presumed prefixes would fill for minutes, up to its own bound."""
        words = self._rng.choice([3, 30, 3000])
        return " ".join(str(self._rng.randrange(8) + i) for i in range(3)) + " again" * words

    async def send(
        self, path: str, **body: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 12)
        writer.write(self.request(path, body))
        return reader, writer

    def request(self, path: str, body: dict[str, Any]) -> bytes:
        """A request as it goes over the wire."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def post(self, path: str, **body: Any) -> tuple[int, bytes]:
        """Status and body, as it came."""
        reader, writer = await self.send(path, **body)
        answer = await reader.read()
        writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), content


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 300)
def test_memory_is_flat_and_no_request_is_stuck(seed: int) -> None:
    rng = random.Random(seed)
    with ExitStack() as stack:
        proxy, _ = stack.enter_context(proxy_in_front(STEP_SECONDS))
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
            return clients

        clients = asyncio.run(soak())
        kinds = {kind for client in clients for kind in client.done}
        counts = {kind: sum(c.done.get(kind, 0) for c in clients) for kind in sorted(kinds)}
        third = len(readings) // 3
        before, after = median(readings[third : 2 * third]), median(readings[-third:])
        print(f"{counts}; {before / 2**20:.1f} MiB, then {after / 2**20:.1f} MiB")
        deadline = time.monotonic() + PATIENCE
        while True:
            running = metric(proxy, "pd_proxy_running_requests")
            more = descriptors(pid) - idle_descriptors
            if not running and more <= 4:
                break
            left = f"{running:g} requests and {more} descriptors are left"
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        assert len(kinds) == 7
        assert metric(proxy, 'pd_proxy_aborts_total{reason="slow_reader"}') > 0
        assert after - before < MAX_GROWTH_BYTES
