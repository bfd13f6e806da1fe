"""Fake nodes, proxies on them and clients of these; all end with the test."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import httpx
from fake_node import FakeNode, wait_until
from two_processes import PROCESSES

from pd.proxy.config import ProxyConfig
from pd.proxy.server import Proxy, ProxyThread
from pd.proxy.workers.actions import ListWorkers
from pd.proxy.workers.parent import ProxyProcesses

if TYPE_CHECKING:
    from contextlib import ExitStack

# Proxies by their URL.
_PROXIES: dict[str, ProxyThread] = {}


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
        # As many as the run has, unless the test says how many.
        options.setdefault("workers", PROCESSES)
        make: Any = Proxy if options["workers"] == 1 else ProxyProcesses
        thread = ProxyThread(ProxyConfig(port=0, **options), make)
        self._stack.callback(thread.stop)
        thread.start(wait_ready)
        _PROXIES[thread.url] = thread
        self._stack.callback(_PROXIES.pop, thread.url)
        # A proxy is ready with the first nodes that suffice; tests expect all that can be.
        deadline = time.monotonic() + 1.0
        while wait_ready and not _all_ready(thread) and time.monotonic() < deadline:
            time.sleep(0.005)
        return thread

    def client(self, proxy: ProxyThread | None = None, **options: Any) -> httpx.Client:
        """An HTTP client of a proxy (of a new one)."""
        proxy = proxy or self.proxy(**options)
        return self._stack.enter_context(httpx.Client(base_url=proxy.url, timeout=20))


def nodes_known(proxy: ProxyThread) -> list[list[Any]]:
    """The entries of ``GET /workers``, as each process of the proxy has them."""
    served: Any = proxy.proxy
    if isinstance(served, Proxy):
        return [served.performer.perform_action(ListWorkers())]  # type: ignore[list-item]

    async def ask() -> list[Any]:
        children = [child for child in served.children if child is not None and child.serves]
        return await asyncio.gather(
            *(child.perform_action(ListWorkers(), 5.0) for child in children)
        )

    return [outcome.value for outcome in proxy.run(ask()) if outcome is not None]


def _all_ready(proxy: ProxyThread) -> bool:
    return all(node["ready"] for nodes in nodes_known(proxy) for node in nodes)


def wait_for_all(client: httpx.Client) -> None:
    """Wait until requests may go to every node. A proxy is ready with the first that suffice."""
    wait_until(lambda: _all_ready(_proxy_of(client)))


def wait_for_agreement(proxy: ProxyThread) -> None:
    """Wait until all processes of the proxy use the same nodes. Each notices by itself that a node
    has gone or come."""

    def agree() -> bool:
        known = nodes_known(proxy)
        used = [{node["url"] for node in nodes if node["ready"]} for nodes in known]
        return all(urls == used[0] for urls in used)

    wait_until(agree)


def nodes_of(client: httpx.Client) -> list[Any]:
    """What ``GET /workers`` lists, once all processes use the same nodes."""
    wait_for_agreement(_proxy_of(client))
    return list(client.get("/workers").json()["workers"])


def _proxy_of(client: httpx.Client) -> ProxyThread:
    return _PROXIES[str(client.base_url).rstrip("/")]


def read_events(response: httpx.Response) -> list[Any]:
    """The events of a stream; its end (``[DONE]``) is the string ``DONE``."""
    events: list[Any] = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append("DONE" if data == "[DONE]" else json.loads(data))
    return events
