"""Requests at a proxy of scripted nodes that fail, and what the nodes were asked."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from fake_node import wait_until
from proxy_cluster import wait_for_all

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate

PROMPT = [5, 6, 7, 8, 9]
NOT_READY = "the node is not ready or drains"
TOKENS = [10, 11, 12, 13, 14, 15]


class Asked:
    """A streamed request of a client, read by a thread of its own."""

    def __init__(self, client: httpx.Client, params: dict[str, Any], **fields: Any) -> None:
        sampling = {"max_new_tokens": len(TOKENS), "ignore_eos": True} | params
        self._body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True} | fields
        self._client, self.events = client, list[Any]()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._client.stream("POST", "/generate", json=self._body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data:
                    self.events.append("DONE" if data == "[DONE]" else json.loads(data))

    def wait_tokens(self, count: int, index: int = 0) -> None:
        """Wait until the client has so many tokens of an answer."""

        def has() -> bool:
            events = [e for e in self.events if e != "DONE" and e.get("index", 0) == index]
            return bool(events) and len(events[-1]["output_ids"]) >= count

        wait_until(has)

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(20)

    def result(self) -> Any:
        """The last event, which has the whole answer."""
        self._thread.join(20)
        assert self.events[-1] == "DONE", self.events
        return self.events[-2]

    def error(self) -> Any:
        self._thread.join(20)
        return self.events[-1]["error"]


def worker_entries(client: httpx.Client) -> list[Any]:
    return list(client.get("/workers").json()["workers"])


def ready_urls(client: httpx.Client) -> list[str]:
    return [worker["url"] for worker in worker_entries(client) if worker["ready"]]


def two_pairs(cluster: Cluster, node: dict[str, Any] | None = None, **options: Any) -> httpx.Client:
    for _ in range(2):
        cluster.pair(auto=False, **(node or {}))
    options = {"failover": "on", "policy": "round_robin", "text": False} | options
    client = cluster.client(**options)
    wait_for_all(client)
    return client


def asked_of(nodes: list[FakeNode], count: int = 1) -> tuple[FakeNode, Generate]:
    """The node that got a request, among those that got ``count`` in all, and the last of them."""
    wait_until(lambda: sum(len(node.generates) for node in nodes) >= count)
    node = max(nodes, key=lambda node: len(node.generates))
    return node, node.generates[-1]


def next_of(nodes: list[FakeNode], before: FakeNode) -> tuple[FakeNode, Generate]:
    """The other node, once it was asked."""
    (other,) = (node for node in nodes if node is not before)
    return other, other.wait_generate()


def newest_of(nodes: list[FakeNode], seen: set[bytes]) -> tuple[FakeNode, Generate]:
    """The node that was asked for a room that none of those is, and what it was asked."""

    def found() -> list[tuple[FakeNode, Generate]]:
        last = [(node, node.generates[-1]) for node in nodes if node.generates]
        return [pair for pair in last if pair[1].room not in seen]

    wait_until(lambda: bool(found()))
    return found()[0]


def ids_of(request: Generate) -> list[int]:
    return np.frombuffer(request.token_ids, "<i4").tolist()


def problem_of(client: httpx.Client, node: FakeNode) -> str:
    return next(w["problem"] or "" for w in worker_entries(client) if w["url"] == node.url)


def post_to_pairs(
    client: httpx.Client,
    cluster: Cluster,
    body: dict[str, Any],
    finish: Callable[[FakeNode, FakeNode, Generate], None],
    done: set[bytes],
) -> None:
    """Post a request. ``finish`` is called with the prefill node, which has replied, the decode
    node and the request, once for each room that is not in ``done``."""
    thread = threading.Thread(target=client.post, args=("/generate",), kwargs={"json": body})
    thread.start()
    while thread.is_alive():
        for decode in cluster.decode:
            for request in [r for r in decode.generates if r.room not in done]:
                prefill = next(p for p in cluster.prefill if p.instance_id == request.peer)
                if all(r.room != request.room for r in prefill.generates):
                    continue
                done.add(request.room)
                prefill.reply(request)
                finish(prefill, decode, request)
        time.sleep(0.002)


def assert_only_problem(client: httpx.Client, cluster: Cluster, bad: FakeNode) -> None:
    """The other three nodes of two pairs have no problem."""
    others = [node for node in (*cluster.prefill, *cluster.decode) if node is not bad]
    assert [problem_of(client, node) for node in others] == ["", "", ""]
