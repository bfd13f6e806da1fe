"""What the end of a prefill node means for a decode node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cluster import is_idle, wait_until
from decode_helpers import PROMPT, ask, handled, lose, state_of
from free_rules import MakeFreeRules
from prefill_peer import PrefillPeer
from raw_peer import SOON, proxy_of
from tiny import tiny_node

from pd.core.errors import TransferError
from pd.core.grammar import Grammar
from pd.core.messages import (
    MAX_MEETINGS,
    Abort,
    AbortRoom,
    CommitAck,
    Failed,
    GrammarReady,
    NodeHeartbeat,
    PeerHeartbeat,
    PromptExpected,
    ProxyHeartbeat,
    Reservation,
    StepOutputs,
)
from pd.transfer.base import TransferState

if TYPE_CHECKING:
    from raw_peer import RawPeer

    from pd.launch import NodeServer


def test_a_silent_prefill_node_fails_what_it_had_not_committed_and_nothing_else(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.core.leases.LEASE_SECONDS", 0.5)
    committed = ask(proxy, decode, prefill, params={"max_tokens": 200})
    reservation = prefill.receive(Reservation)
    sender = prefill.push(reservation, len(PROMPT))
    prefill.commit(reservation, sender.bytes_sent)
    receiving = ask(proxy, decode, prefill, [1] * 8)
    with PrefillPeer(decode) as other:
        safe = ask(proxy, decode, other, [2] * 8)
        other.receive(Reservation)
        prefill.receive(Reservation)

        def is_dead() -> bool:
            proxy.beat()
            other.live()
            return receiving not in decode.node.requests

        wait_until(is_dead, 5)
        failed = proxy.receive(Failed)
        assert failed.room == receiving
        assert f"prefill node {prefill.name} failed: no heartbeat" in failed.error.message
        assert not state_of(decode, safe).is_terminal
        assert decode.node.ready
        lose(decode, other)

    def has_finished() -> bool:
        proxy.beat()  # or the node takes the proxy for dead
        return proxy.receive(StepOutputs).outputs[0].finish is not None

    wait_until(has_finished, 10)
    assert committed not in decode.node.requests or is_idle(decode)


def test_after_a_loss_the_next_request_shakes_hands_again(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    ask(proxy, decode, prefill)
    prefill.receive(Reservation)
    lose(decode, prefill)
    assert "the test said so" in proxy.receive(Failed).error.message
    ask(proxy, decode, prefill)
    prefill.receive(Reservation)


def test_a_prefill_node_that_forgot_us_is_asked_again_at_once(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    rooms = {ask(proxy, decode, prefill, [number] * 8) for number in (1, 2)}
    reservation = prefill.receive(Reservation)
    prefill.receive(Reservation)
    prefill.give_up(reservation.room, reservation.epoch, "handshake")
    assert {proxy.receive(Failed, SOON).room for _ in rooms} == rooms, "it knows none of them"
    again = ask(proxy, decode, prefill, [3] * 8)
    assert prefill.receive(Reservation, SOON).room == again


def test_rooms_that_wait_for_memory_are_not_promised_to_a_lost_peer() -> None:
    # One-sided writes: nobody would ever say that pages promised after the loss are safe again.
    decode = tiny_node("decode", kv_cache_tokens=256, transfer_backend="fake")
    try:
        with PrefillPeer(decode, "fake") as prefill, proxy_of(decode) as proxy:
            ask(proxy, decode, prefill, [1] * 100, params={"max_tokens": 100})
            prefill.receive(Reservation)
            for number in (2, 3):
                ask(proxy, decode, prefill, [number] * 200)
            wait_until(lambda: len(decode.node.receiving.preallocation) == 2, 5)
            lose(decode, prefill)
            for _ in range(3):
                proxy.receive(Failed)
            wait_until(lambda: is_idle(decode), 5, decode.node.server_info)
    finally:
        decode.stop()


def test_a_receiver_that_cannot_be_made_fails_its_request_only(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        monkeypatch.undo()
        raise TransferError("no receiver today")

    monkeypatch.setattr(decode.node.transfers[-1], "receiver", broken)
    with decode.node.core.events.lock:
        rooms = [ask(proxy, decode, prefill, [number] * 8) for number in (1, 2)]
    failed = proxy.receive(Failed)
    assert (failed.room, failed.error.message) == (rooms[0], "no receiver today")
    assert prefill.receive(Reservation).room == rooms[1]


@pytest.mark.parametrize("method", ["poll", "commit"])
def test_a_receiver_that_raises_fails_its_request_alone(
    decode: NodeServer,
    prefill: PrefillPeer,
    proxy: RawPeer,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no idea")

    rooms = [ask(proxy, decode, prefill, [number] * 8) for number in (1, 2)]
    reserved = {(r := prefill.receive(Reservation)).room: r for _ in rooms}
    with decode.node.core.events.lock:
        receiver = decode.node.requests.find_request(rooms[0]).incoming.receiver
        monkeypatch.setattr(receiver, method, broken)
    prefill.commit(reserved[rooms[0]], 0)
    failed = proxy.receive(Failed)
    assert failed.room == rooms[0]
    assert failed.error.message == f"cannot receive from {prefill.name}: no idea"
    sender = prefill.push(reserved[rooms[1]], 8)
    prefill.commit(reserved[rooms[1]], sender.bytes_sent)
    assert prefill.receive(CommitAck).room == rooms[1]


def test_a_receiver_that_is_done_before_the_commit_fails_its_request(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = ask(proxy, decode, prefill)
    prefill.receive(Reservation)
    with decode.node.core.events.lock:
        receiver = decode.node.requests.find_request(room).incoming.receiver
        monkeypatch.setattr(receiver, "poll", lambda: TransferState.DONE)
    assert "an end before the commit" in proxy.receive(Failed).error.message


def test_pages_wait_for_a_receiver_that_raises_when_its_request_ends(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = ask(proxy, decode, prefill)
    prefill.receive(Reservation)
    asked = []
    with decode.node.core.events.lock:
        receiver = decode.node.requests.find_request(room).incoming.receiver
    abort = receiver.abort

    def abort_and_raise() -> None:
        abort()
        raise RuntimeError("no idea")

    def drained() -> bool:
        asked.append(True)
        raise RuntimeError("no idea")

    monkeypatch.setattr(receiver, "abort", abort_and_raise)
    monkeypatch.setattr(receiver, "drained", drained)
    proxy.send(Abort(to=decode.instance_id, sender=proxy.name, room=room))
    assert prefill.receive(AbortRoom).room == room
    wait_until(lambda: len(asked) > 1, 5)
    assert decode.node.core.memory.count_pages()["quarantined"] == 6
    monkeypatch.undo()


def test_a_backend_that_cannot_disconnect_keeps_no_request_from_failing(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    disconnect = decode.node.transfers[-1].disconnect

    def broken(instance: str) -> None:
        disconnect(instance)
        raise RuntimeError("no idea")

    monkeypatch.setattr(decode.node.transfers[-1], "disconnect", broken)
    ask(proxy, decode, prefill)
    prefill.receive(Reservation)
    lose(decode, prefill)
    assert "the test said so" in proxy.receive(Failed).error.message


def test_heartbeats_reach_the_prefill_node(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    ask(proxy, decode, prefill)
    prefill.receive(Reservation)
    beat = prefill.receive(PeerHeartbeat, 2)
    assert beat.sender == decode.instance_id
    assert beat.run_delay >= 0.0


def test_delays_of_a_prefill_node_are_known_from_it_and_before_that_from_the_proxy(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    patience = decode.node.transfers[-1].patience
    beat = ProxyHeartbeat(to="", sender=proxy.name, run_delay=1.0, run_delays={prefill.name: 2.0})
    proxy.send(beat)
    wait_until(lambda: patience.peer_total(prefill.name) == 2.0, 5)
    assert patience.peer_total(proxy.name) == 1.0
    ask(proxy, decode, prefill)
    prefill.receive(Reservation)
    own = PeerHeartbeat(to=decode.instance_id, sender=prefill.name, run_delay=4.0)
    prefill.send(own)
    wait_until(lambda: patience.peer_total(prefill.name) == 4.0, 5)
    assert proxy.receive(NodeHeartbeat, 2).run_delay >= 0.0


def test_an_endpoint_that_is_no_address_fails_the_request(
    decode: NodeServer, proxy: RawPeer
) -> None:
    with PrefillPeer(decode, endpoint="not an address") as nowhere:
        for _ in range(2):
            ask(proxy, decode, nowhere)
            assert "not an address" in proxy.receive(Failed).error.message


def test_nodes_that_are_met_before_a_request_names_them_are_bounded(
    decode: NodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, asked = decode.node.receiving.handshakes, []
    monkeypatch.setattr(
        peers, "connect_peer", lambda url, instance, then, ahead: asked.append(instance)
    )
    for turn in range(3):
        names = {f"{turn}-{number}": "http://127.0.0.1:9" for number in range(MAX_MEETINGS - 1)}
        with decode.node.core.events.event():
            peers.meet_peers(names, 1000.0)
    assert len(asked) == len(set(asked)) == MAX_MEETINGS
    with decode.node.core.events.event():
        peers.meet_peers({"later": "http://127.0.0.1:9"}, 1100.0)
    assert asked[-1] == "later"


def test_only_the_peer_of_a_hand_off_says_when_its_prompt_will_be_computed(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    """Steps are cut short for answers that are expected: nobody else may make them be."""
    receiving = decode.node.receiving
    assert receiving is not None

    def expected() -> int:
        with decode.node.core.events.lock:
            return len(list(receiving.iter_expected(60.0)))

    with PrefillPeer(decode) as other:
        ask(proxy, decode, other)
        other.receive(Reservation)
        room = ask(proxy, decode, prefill)
        reservation = prefill.receive(Reservation)
        for epoch, seconds in ((reservation.epoch + 1, 1.0), (reservation.epoch, 100.0)):
            prefill.say(PromptExpected, room, epoch, seconds=seconds)
        other.say(PromptExpected, room, reservation.epoch, seconds=1.0)
        claimed = PromptExpected(
            to=decode.instance_id,
            sender=prefill.name,
            room=room,
            epoch=reservation.epoch,
            seconds=1.0,
        )
        other.send(claimed)
        handled(decode)
        assert expected() == 0
        prefill.say(PromptExpected, room, reservation.epoch, seconds=1.0)
        wait_until(lambda: expected() == 1, 5)


def test_memory_is_reserved_once_the_peer_alone_says_that_it_has_the_grammar(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And prompts without a grammar do not wait for that."""

    def known(grammar: Grammar, done: Any, owner: str = "", **_: Any) -> None:
        done(MakeFreeRules())

    monkeypatch.setattr(decode.node.core.grammars, "request_rules", known)
    params = {"max_tokens": 4, "grammar": Grammar("regex", "a")}
    room = ask(proxy, decode, prefill, params=params)
    for _ in range(2):  # it repeats what may have been lost
        assert prefill.receive(GrammarReady).room == room
    with PrefillPeer(decode) as other:
        ask(proxy, decode, other)
        other.receive(Reservation)
        other.has_grammar(room)
        other.send(GrammarReady(to=decode.instance_id, sender=prefill.name, room=room))
        prefill.has_grammar(b"an unknown room.")
        handled(decode)
        assert decode.node.core.memory.count_pages()["reserved"] == 6, "the other's"
        plain = ask(proxy, decode, prefill, [1] * 8)
        assert prefill.receive(Reservation).room == plain
        for _ in range(3):
            prefill.has_grammar(room)
        assert prefill.receive(Reservation).room == room
        handled(decode)
        assert not any(isinstance(seen, Reservation) for seen in prefill._unread)
        lose(decode, other)
