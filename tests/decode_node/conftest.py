"""A decode node that is idle and consistent after each test, and who talks to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster import is_idle, wait_until
from decode_helpers import lose
from prefill_peer import PrefillPeer
from raw_peer import RawPeer, proxy_of
from tiny import tiny_node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.launch import NodeServer


@pytest.fixture(scope="module")
def server() -> Iterator[NodeServer]:
    node = tiny_node("decode", kv_cache_tokens=256, reserved_decode_tokens=8)
    yield node
    node.stop()


@pytest.fixture
def decode(server: NodeServer) -> Iterator[NodeServer]:
    """Idle and consistent after each test."""
    yield server
    with server.node.core.events.event():
        server.node.abort_rid(None)
    wait_until(lambda: is_idle(server), 10, server.node.server_info)
    server.node.check_books()
    server.node.flush_cache()


@pytest.fixture
def prefill(decode: NodeServer) -> Iterator[PrefillPeer]:
    with PrefillPeer(decode) as peer:
        yield peer
        lose(decode, peer)


@pytest.fixture
def proxy(decode: NodeServer) -> Iterator[RawPeer]:
    with proxy_of(decode) as peer:
        yield peer
