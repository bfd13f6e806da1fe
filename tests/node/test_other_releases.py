"""A node that a proxy of another release finds: it answers, takes no requests and says why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import pytest
import recorded_release
from raw_peer import RawPeer
from tiny import tiny_node

from pd.core.messages import NodeHeartbeat, ProxyHeartbeat, encode_message
from pd.core.release import RELEASE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.launch import NodeServer


@pytest.fixture(scope="module")
def unified() -> Iterator[NodeServer]:
    server = tiny_node("unified")
    yield server
    server.stop()


def test_a_proxy_of_the_same_release_is_told_that_the_node_is_ready(unified: NodeServer) -> None:
    with RawPeer(unified.node.endpoint, "same") as peer:
        peer.beat()
        answer = peer.receive(NodeHeartbeat)
        assert (answer.ready, answer.release) == (True, RELEASE)


def test_a_proxy_of_a_later_release_gets_no_requests_served(
    unified: NodeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with RawPeer(unified.node.endpoint, "later") as peer:
        beat = encode_message(ProxyHeartbeat(to="", sender="later", release="9.0 (protocol 7)"))
        beat = msgspec.msgpack.encode(msgspec.msgpack.decode(beat) | {"of_a_later_release": 1})
        for _ in range(3):
            peer.send_bytes(beat)
            answer = peer.receive(NodeHeartbeat)
            assert (answer.ready, answer.release) == (False, RELEASE)
    logged = [record.getMessage() for record in caplog.records if "later" in record.getMessage()]
    assert len(logged) == 1, "once a proxy"
    assert "runs pd 9.0 (protocol 7), this node pd" in logged[0] and RELEASE in logged[0]
    assert "run the same release" in logged[0]


def test_a_proxy_that_states_no_release_gets_an_answer_that_it_takes(
    unified: NodeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It would call a node deaf, and the cluster key wrong, whose answer it does not take."""
    with RawPeer(unified.node.endpoint, "old") as peer, caplog.at_level(logging.WARNING):
        peer.send_bytes(recorded_release.PROXY_HEARTBEAT)
        answer = peer.receive(NodeHeartbeat)
        assert not answer.ready
        fields = set(msgspec.msgpack.decode(encode_message(answer)))
        assert fields <= recorded_release.NODE_HEARTBEAT_FIELDS
        unified.node.drain()  # which tells all proxies
        unified.node.undrain()
        assert peer.receive(NodeHeartbeat).release is msgspec.UNSET
    assert "proxy b'old' runs an earlier pd, which does not state its version" in caplog.text
