"""Transfers that stay alive after their peer was lost: source pages may be read for minutes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from cluster import wait_until
from decode_peer import DecodePeer
from prefill_helpers import PROMPT, ask, computed

from pd.core.messages import Commit, Failed

if TYPE_CHECKING:
    import pytest
    from raw_peer import RawPeer

    from pd.launch import NodeServer


def serve(prefill: NodeServer, decode: DecodePeer, proxy: RawPeer) -> None:
    """One whole request."""
    room = ask(proxy, prefill, decode)
    epoch, receiver = decode.reserve(room, len(PROMPT))
    commit = decode.receive(Commit)
    while commit.room != room:
        commit = decode.receive(Commit)
    receiver.commit(commit.num_bytes)
    decode.acknowledge(room, epoch)

    def finished() -> bool:
        proxy.beat()
        decode.live()
        return room not in prefill.node.requests

    wait_until(finished, 5)


def test_pages_of_a_lost_peer_stay_locked_while_it_comes_back_and_works(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained = threading.Event()
    make = prefill.node.transfers[0].sender

    def stubborn(*args: Any) -> Any:
        sender = make(*args)
        monkeypatch.setattr(sender, "drained", drained.is_set)
        return sender

    monkeypatch.setattr(prefill.node.transfers[0], "sender", stubborn)
    room = ask(proxy, prefill, decode)
    decode.reserve(room, len(PROMPT))
    computed(proxy)
    decode.receive(Commit)
    prefill.node.sending.drop_peer(decode.name, "the test said so")
    assert proxy.receive(Failed).room == room
    monkeypatch.setattr(prefill.node.transfers[0], "sender", make)

    def held() -> list[int]:
        prefill.node.check_books()
        with prefill.node.core.events.lock:
            return prefill.node.requests.find_request(room).sequence.pages.tolist()

    before = held()
    assert len(before) == -(-len(PROMPT) // 4)
    with DecodePeer(prefill, "another") as other:
        serve(prefill, other, proxy)
        prefill.node.sending.drop_peer(other.name, "the test is over")
    decode.shake_hands()  # the same instance
    serve(prefill, decode, proxy)
    assert held() == before
    prefill.node.flush_cache()
    assert held() == before
    assert prefill.node.ready
    drained.set()
    wait_until(lambda: room not in prefill.node.requests, 2)
