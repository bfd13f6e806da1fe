"""A prefill node that is idle and consistent after each test, and who talks to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster import is_idle, wait_until
from decode_peer import DecodePeer
from raw_peer import RawPeer, proxy_of
from tiny import tiny_node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.launch import NodeServer


@pytest.fixture(scope="module")
def server() -> Iterator[NodeServer]:
    node = tiny_node("prefill", chunked_prefill_size=8)
    yield node
    node.stop()


@pytest.fixture
def prefill(server: NodeServer) -> Iterator[NodeServer]:
    """Idle and consistent after each test."""
    yield server
    with server.node.core.events.event():
        server.node.abort_rid(None)
    wait_until(lambda: is_idle(server), 10, server.node.server_info)
    server.node.check_books()
    assert not server.node.sending._early
    server.node.flush_cache()


@pytest.fixture
def proxy(prefill: NodeServer) -> Iterator[RawPeer]:
    with proxy_of(prefill) as peer:
        yield peer


@pytest.fixture
def decode(prefill: NodeServer) -> Iterator[DecodePeer]:
    with DecodePeer(prefill) as peer:
        yield peer
    prefill.node.sending.drop_peer(peer.name, "the test is over")
