"""Fake nodes, proxies on them and clients of these; all end with the test."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import httpx
from fake_node import FakeNode, wait_until

from pd.proxy.config import ProxyConfig
from pd.proxy.processes.parent import ProxyProcesses
from pd.proxy.server import Proxy, ProxyThread

if TYPE_CHECKING:
    from contextlib import ExitStack

# Processes of every proxy, unless a test says how many.
PROCESSES = int(os.environ.get("PD_TEST_PROXY_WORKERS", "1"))


class Cluster:
    """Makes nodes, proxies and clients, and ends them."""

    def __init__(self, stack: ExitStack, model_dir: str) -> None:
        self._stack = stack
        self.model_dir = model_dir
        self.prefill: list[FakeNode] = []
        self.decode: list[FakeNode] = []
        self.unified: list[FakeNode] = []

    def node(self, role: str, *args: Any, **options: Any) -> FakeNode:
        node = FakeNode(role, *args, **options)
        getattr(self, role).append(node)
        self._stack.callback(node.kill)
        return node

    def pair(self, *args: Any, **options: Any) -> tuple[FakeNode, FakeNode]:
        return self.node("prefill", *args, **options), self.node("decode", *args, **options)

    def proxy(self, *, wait_ready: float = 10.0, text: bool = True, **options: Any) -> ProxyThread:
        """A proxy on all nodes made so far. Clients hear of failures of nodes unless a test turns
        failover on."""
        options.setdefault("failover", "off")
        options.setdefault("tokenizer", self.model_dir if text else None)
        for role in ("prefill", "decode", "unified"):
            options.setdefault(role, [node.url for node in getattr(self, role)])
        options.setdefault("workers", PROCESSES)
        make: Any = Proxy if options["workers"] == 1 else ProxyProcesses
        thread = ProxyThread(ProxyConfig(port=0, **options), make)
        self._stack.callback(thread.stop)
        thread.start(wait_ready)
        # A proxy is ready with the first nodes that suffice; tests expect all that can be.
        deadline = time.monotonic() + 1.0
        while wait_ready and isinstance(thread.proxy, Proxy) and time.monotonic() < deadline:
            if all(worker.ready for worker in thread.proxy._pool.workers):
                break
            time.sleep(0.005)
        return thread

    def client(self, proxy: ProxyThread | None = None, **options: Any) -> httpx.Client:
        """An HTTP client of a proxy (of a new one)."""
        proxy = proxy or self.proxy(**options)
        return self._stack.enter_context(httpx.Client(base_url=proxy.url, timeout=20))


def wait_for_all(client: httpx.Client) -> None:
    """Wait until requests may go to every node. A proxy is ready with the first that suffice."""
    wait_until(lambda: all(w["ready"] for w in client.get("/workers").json()["workers"]))


def read_events(response: httpx.Response) -> list[Any]:
    """The events of a stream; its end (``[DONE]``) is the string ``DONE``."""
    events: list[Any] = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append("DONE" if data == "[DONE]" else json.loads(data))
    return events
