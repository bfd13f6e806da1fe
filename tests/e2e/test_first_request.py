"""Nodes behind a proxy meet before the first request, which therefore opens no link."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import httpx
from backends import MOONCAKE, NIXL, TCP, Backend, over
from cluster import wait_until
from tiny import tiny_node

from pd.proxy.config import ProxyConfig
from pd.proxy.server import READY_GRACE_SECONDS, ProxyThread

if TYPE_CHECKING:
    from pd.launch import NodeServer

PROMPT = [7, 5, 3, 2] * 16


def opened(node: NodeServer) -> int:
    """Connections for KV that a decode node has accepted since it started."""
    transfer: Any = node.node.transfers[0]
    counters = transfer.counters
    return int(counters.connections if transfer.name == "tcp" else counters.links)


def ask(proxy: ProxyThread) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    answer = httpx.post(f"{proxy.url}/generate", json=body, timeout=30)
    assert answer.status_code == 200, answer.text


@over([TCP, NIXL, MOONCAKE], sample=[TCP, NIXL])
def test_the_first_request_opens_no_link(backend: Backend) -> None:
    with contextlib.ExitStack() as stack:

        def node(role: str) -> NodeServer:
            server = tiny_node(role, transfer_backend=backend.flag)
            stack.callback(server.stop)
            return server

        prefill, decode = [node("prefill"), node("prefill")], [node("decode"), node("decode")]
        config = ProxyConfig(
            port=0,
            prefill=[server.url for server in prefill],
            decode=[server.url for server in decode],
        )
        # "Ready" waits for the links as long as nodes do not take too long.
        proxy = stack.enter_context(ProxyThread(config))
        everybody = {server.node.instance_id for server in prefill}
        for server in decode:
            wait_until(
                lambda s=server: set(s.node.receiving.list_linked_peers() or ()) == everybody,
                READY_GRACE_SECONDS,
            )
            assert {peer.instance_id for peer in server.node.transfer_peers()} == everybody
        before = [opened(server) for server in decode]
        assert all(before)
        for _ in range(4):
            ask(proxy)
        assert [opened(server) for server in decode] == before


def test_a_prefill_node_that_comes_later_is_met_before_its_first_request() -> None:
    with contextlib.ExitStack() as stack:
        nodes = {role: tiny_node(role) for role in ("prefill", "decode")}
        for server in nodes.values():
            stack.callback(server.stop)
        config = ProxyConfig(port=0, prefill=[nodes["prefill"].url], decode=[nodes["decode"].url])
        proxy = stack.enter_context(ProxyThread(config))
        linked = nodes["decode"].node.receiving.list_linked_peers()
        assert linked == [nodes["prefill"].node.instance_id], "the proxy was ready before the link"
        late = tiny_node("prefill")
        stack.callback(late.stop)
        body = {"role": "prefill", "url": late.url}
        assert httpx.post(f"{proxy.url}/workers", json=body, timeout=10).status_code == 200
        wait_until(
            lambda: (
                late.node.instance_id in (nodes["decode"].node.receiving.list_linked_peers() or ())
            ),
            10.0,
        )
