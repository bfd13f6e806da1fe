"""What the end of a decode node means for a prefill node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import wait_until
from decode_peer import DecodePeer
from patience import FakePatience
from prefill_helpers import PROMPT, ask, handled
from requests_for_tests import make_generate

from pd.core.messages import AbortRoom, Commit, Drained, Failed, PeerHeartbeat, Reservation

if TYPE_CHECKING:
    from raw_peer import RawPeer

    from pd.launch import NodeServer
    from pd.transfer.base import Sender


def test_a_silent_decode_node_fails_its_requests_and_nothing_else(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.core.leases.LEASE_SECONDS", 2.0)
    with DecodePeer(prefill, "silent") as silent:
        dead = ask(proxy, prefill, silent)
        alive = ask(proxy, prefill, decode)
        silent.reserve(dead, len(PROMPT))
        wait_until(lambda: {dead, alive} <= {request.room for request in prefill.node.requests}, 30)

        def is_dead() -> bool:
            proxy.beat()
            decode.live()
            return dead not in prefill.node.requests

        wait_until(is_dead, 30)
        failed = proxy.receive(Failed)
        assert failed.room == dead
        assert "decode node silent failed: no heartbeat" in failed.error.message
        assert not prefill.node.requests.find_request(alive).state.is_terminal
        assert prefill.node.ready
        assert not silent.answers(Drained, 0.2), "only its own disconnect protects its pages now"
        silent.reserve(b"a later room....", 8)
        assert silent.receive(AbortRoom).error.kind == "handshake"
        silent.live()
        assert silent.receive(AbortRoom).error.kind == "handshake", "before it reserves again"
        assert not prefill.node.sending._early, "it must shake hands again first"
        silent.shake_hands()
        epoch, _ = silent.reserve(room := ask(proxy, prefill, silent), len(PROMPT))
        while silent.receive(Commit).epoch != epoch:
            pass  # of the room that is dead
        silent.acknowledge(room, epoch)
        handled(silent)
        prefill.node.sending.drop_peer(silent.name, "the test is over")


@pytest.mark.usefixtures("unstarved")
def test_a_decode_node_that_never_shakes_hands_fails_the_request_after_a_lease(
    prefill: NodeServer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.prefill_node.sending.LEASE_SECONDS", 0.3)
    message = make_generate(
        PROMPT, to=prefill.instance_id, sender=proxy.name, peer="a-decode-node-nobody-knows"
    )
    proxy.send(message)
    assert "did not shake hands" in proxy.receive(Failed).error.message


def test_a_starved_decode_node_may_be_late_to_shake_hands(
    prefill: NodeServer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P has not met it, so the delay of whoever P knows counts."""
    monkeypatch.setattr("pd.prefill_node.sending.LEASE_SECONDS", 0.3)
    patience = FakePatience()
    monkeypatch.setattr(prefill.node.sending, "_patience", patience)
    room = b"a starved peer's"
    proxy.send(
        make_generate(
            PROMPT, to=prefill.instance_id, sender=proxy.name, room=room, peer="not-met-yet"
        )
    )
    wait_until(lambda: patience.asked, 10)
    time.sleep(0.6)
    assert room in prefill.node.requests
    patience.starved = False
    assert "did not shake hands" in proxy.receive(Failed).error.message
    assert patience.asked == {(0.3, None)}


def test_both_sides_hear_heartbeats(prefill: NodeServer, decode: DecodePeer) -> None:
    handled(decode)
    beat = decode.receive(PeerHeartbeat, 2)
    assert beat.sender == prefill.instance_id
    assert beat.run_delay >= 0.0
    decode.send(PeerHeartbeat(to=prefill.instance_id, sender=decode.name, run_delay=4.0))
    patience = prefill.node.transfers[0].patience
    wait_until(lambda: patience.peer_total(decode.name) == 4.0, 30)


def test_a_lost_decode_nodes_abort_ends_its_room_without_a_drain(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    handled(decode)
    prefill.node.sending.drop_peer(decode.name, "the test said so")
    room = ask(proxy, prefill, decode)
    wait_until(lambda: room in prefill.node.requests, 30)
    decode.give_up(room, 0)
    assert proxy.receive(Failed).room == room
    assert not decode.answers(Drained, 0.2)


@pytest.mark.parametrize("method", ["send", "finish", "poll"])
def test_a_sender_that_raises_fails_its_request_alone(
    prefill: NodeServer,
    proxy: RawPeer,
    decode: DecodePeer,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    bad, good = (f"{name} {method}".ljust(16).encode() for name in ("bad", "good"))
    make = prefill.node.transfers[0].sender

    def broken(*args: Any) -> Any:
        raise RuntimeError("no idea")

    def sender(peer: str, reservation: Reservation, *args: Any) -> Sender:
        made = make(peer, reservation, *args)
        if reservation.room == bad:
            monkeypatch.setattr(made, method, broken)
        return made

    monkeypatch.setattr(prefill.node.transfers[0], "sender", sender)
    for room in (bad, good):
        decode.reserve(room, len(PROMPT))
    handled(decode)
    with prefill.node.core.events.lock:  # so that one step computes both
        for room in (bad, good):
            ask(proxy, prefill, decode, room=room)
    failed = proxy.receive(Failed)
    assert failed.room == bad
    assert failed.error.message == f"cannot send to {decode.name}: no idea"
    assert decode.receive(AbortRoom).room == bad
    commit = decode.receive(Commit)
    assert commit.room == good
    decode.acknowledge(good, commit.epoch)
    assert prefill.node.ready


def test_pages_wait_for_a_sender_that_raises_when_its_request_ends(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = ask(proxy, prefill, decode)
    epoch, _ = decode.reserve(room, len(PROMPT))
    decode.receive(Commit)
    asked = []
    with prefill.node.core.events.lock:
        sender = prefill.node.requests.find_request(room).outgoing.sender
    abort = sender.abort

    def abort_and_raise() -> None:
        abort()
        raise RuntimeError("no idea")

    def drained() -> bool:
        asked.append(True)
        raise RuntimeError("no idea")

    monkeypatch.setattr(sender, "abort", abort_and_raise)
    monkeypatch.setattr(sender, "drained", drained)
    decode.give_up(room, epoch)
    assert proxy.receive(Failed).room == room
    assert decode.receive(AbortRoom).room == room
    wait_until(lambda: len(asked) > 1, 30)
    assert not any(isinstance(seen, Drained) for seen in decode.seen)
    monkeypatch.undo()
    assert decode.receive(Drained).room == room


def test_a_backend_that_cannot_disconnect_keeps_no_request_from_failing(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    disconnect = prefill.node.transfers[0].disconnect

    def broken(instance: str) -> None:
        disconnect(instance)
        raise RuntimeError("no idea")

    monkeypatch.setattr(prefill.node.transfers[0], "disconnect", broken)
    room = ask(proxy, prefill, decode)
    wait_until(lambda: room in prefill.node.requests, 30)
    assert prefill.node.sending.drop_peer(decode.name, "the test said so")
    assert "the test said so" in proxy.receive(Failed).error.message
