"""Transfers that stay alive after their peer was lost: late writes may land for minutes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import is_idle, wait_until
from decode_helpers import PROMPT, ask, lose
from prefill_peer import PrefillPeer
from raw_peer import proxy_of
from tiny import tiny_node

from pd.core.messages import AbortRoom, CommitAck, Drained, Failed, Reservation

if TYPE_CHECKING:
    from raw_peer import RawPeer

    from pd.launch import NodeServer

PAGES = -(-len(PROMPT) // 4)


class Zombies:
    """Makes receivers say that something can still land until ``drained`` is set, as one-sided
    writes over a cut link do; an acknowledged drain sets it too."""

    def __init__(self, decode: NodeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drained = threading.Event()
        self._make, self._patch = decode.node.transfers[-1].receiver, monkeypatch
        monkeypatch.setattr(decode.node.transfers[-1], "receiver", self._receiver)

    def _receiver(self, *args: Any) -> Any:
        receiver = self._make(*args)
        self._patch.setattr(receiver, "drained", self.drained.is_set)
        self._patch.setattr(receiver, "on_peer_drained", self.drained.set)
        return receiver

    def no_more(self, decode: NodeServer) -> None:
        """Receivers from now on are as the backend makes them."""
        self._patch.setattr(decode.node.transfers[-1], "receiver", self._make)


def quarantined(decode: NodeServer) -> int:
    decode.node.check_books()
    return decode.node.core.memory.count_pages()["quarantined"]


def serve(decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, first: int) -> None:
    """One whole request."""
    room = ask(proxy, decode, prefill, [first] * 9, params={"max_tokens": 2})
    reservation = prefill.receive(Reservation)
    while reservation.room != room:
        reservation = prefill.receive(Reservation)
    sender = prefill.push(reservation, 9)
    prefill.commit(reservation, sender.bytes_sent)
    assert prefill.receive(CommitAck).room == room

    def finished() -> bool:
        proxy.beat()
        prefill.live()
        return room not in decode.node.requests

    wait_until(finished, 5)


@pytest.mark.parametrize("end", ["the peer's word", "the backend's proof"])
def test_pages_of_a_lost_peer_stay_in_quarantine_while_it_comes_back_and_works(
    decode: NodeServer,
    prefill: PrefillPeer,
    proxy: RawPeer,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    zombies = Zombies(decode, monkeypatch)
    room = ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    lose(decode, prefill)
    assert proxy.receive(Failed).room == room
    assert quarantined(decode) == PAGES
    zombies.no_more(decode)
    with PrefillPeer(decode) as other:
        serve(decode, other, proxy, first=1)  # another node
        lose(decode, other)
    serve(decode, prefill, proxy, first=2)  # the same instance, after a new handshake
    assert quarantined(decode) == PAGES
    if end == "the peer's word":
        asked = prefill.receive(AbortRoom, 5)
        assert (asked.room, asked.epoch) == (room, reservation.epoch), "D asks again for the drain"
        prefill.say(Drained, room, reservation.epoch)
    else:
        zombies.drained.set()
    wait_until(lambda: is_idle(decode), 5, decode.node.server_info)
    assert quarantined(decode) == 0


def test_a_long_quarantine_costs_no_turns_of_the_control_thread(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.node.node._DRAIN_SECONDS", 0.1)
    zombies = Zombies(decode, monkeypatch)
    ask(proxy, decode, prefill)
    prefill.receive(Reservation)
    lose(decode, prefill)
    proxy.receive(Failed)
    time.sleep(0.3)
    turns: list[float] = []
    poll = decode.node.on_poll

    def counted() -> bool:
        turns.append(time.monotonic())
        return poll()

    monkeypatch.setattr(decode.node, "on_poll", counted)
    time.sleep(0.5)
    assert len(turns) < 100, "it looks for the drain as if it were about to come"
    assert quarantined(decode) == PAGES
    zombies.drained.set()
    wait_until(lambda: is_idle(decode), 2)


def test_a_node_that_drains_does_not_wait_for_a_peer_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = tiny_node("decode", drain_timeout=20.0)
    try:
        zombies = Zombies(decode, monkeypatch)
        with PrefillPeer(decode) as prefill, proxy_of(decode) as proxy:
            ask(proxy, decode, prefill)
            prefill.receive(Reservation)
            lose(decode, prefill)
            proxy.receive(Failed)
            begun = time.monotonic()
            assert decode.drain()
            assert time.monotonic() - begun < 10
            assert quarantined(decode) == PAGES
        assert not zombies.drained.is_set()
    finally:
        decode.stop()
