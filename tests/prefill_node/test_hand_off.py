"""The prefill node's half of a hand-off, told by a decode node that says whatever it likes."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from cluster import is_idle, wait_until
from decode_peer import DecodePeer
from free_rules import MakeFreeRules
from patience import FakePatience
from prefill_helpers import PROMPT, ask, computed, handled
from raw_peer import SOON, RawPeer
from tiny import TOKEN_BYTES

from pd.core.errors import AbortedError, DeadlineExceededError
from pd.core.grammar import Grammar
from pd.core.messages import (
    Abort,
    AbortRoom,
    Commit,
    Drained,
    ErrorInfo,
    Failed,
    GrammarReady,
    PromptExpected,
    Reservation,
    StepOutputs,
)
from pd.scheduling.request import RequestState
from pd.transfer.base import TransferState

if TYPE_CHECKING:
    from pd.launch import NodeServer

# ---- the good way


@pytest.mark.parametrize("cached", [0, 8, 21])
@pytest.mark.parametrize("reserve_first", [False, True])
def test_d_receives_what_it_lacks_and_token_1(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, cached: int, reserve_first: bool
) -> None:
    room = b"r" * 15 + bytes([cached + 100 * reserve_first])
    if reserve_first:
        epoch, receiver = decode.reserve(room, len(PROMPT), cached=cached)
        handled(decode)
    ask(proxy, prefill, decode, room=room)
    token = computed(proxy)
    if not reserve_first:
        epoch, receiver = decode.reserve(room, len(PROMPT), cached=cached)
    commit = decode.receive(Commit)
    assert (commit.room, commit.epoch) == (room, epoch)
    assert [first.token_id for first in commit.first_tokens] == [token]
    assert commit.num_bytes == (len(PROMPT) - cached) * TOKEN_BYTES
    receiver.commit(commit.num_bytes)
    wait_until(lambda: receiver.poll() is TransferState.DONE, 5)
    decode.acknowledge(room, epoch)
    wait_until(lambda: is_idle(prefill), 5)
    assert not any(isinstance(seen, AbortRoom | Drained) for seen in decode.seen)


def test_token_1_goes_to_the_proxy_though_nothing_is_reserved(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    computed(proxy)
    wait_until(lambda: prefill.node.count_queues()["in_flight"] == 1, 5)
    assert prefill.node.requests.find_request(room).outgoing.reservation is None


def test_a_peer_that_reserves_late_is_told_when_the_prompt_is_expected(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    """An idle node plans a short prompt's only chunk before the reservation can have come."""
    room = ask(proxy, prefill, decode)
    computed(proxy)
    assert prefill.node.sending is not None
    with prefill.node.core.events.lock:
        prefill.node.sending.tell_expected(prefill.node.requests.find_request(room), 60.0)
    epoch, _ = decode.reserve(room, len(PROMPT))
    expected = decode.receive(PromptExpected)
    assert (expected.room, expected.epoch) == (room, epoch)
    assert 0 < expected.seconds < 60.0, "the time since the step was planned is over"


def test_a_peer_is_told_of_a_grammar_once_it_is_compiled_here_too(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it says that it has it, before the request comes and afterwards."""
    held: list[Any] = []

    def want(grammar: Grammar, done: Any, owner: str = "", **_: Any) -> None:
        held.append(partial(done, MakeFreeRules()))

    monkeypatch.setattr(prefill.node.core.grammars, "request_rules", want)
    room = b"a grammar's room"
    decode.has_grammar(room)
    handled(decode)
    ask(proxy, prefill, decode, room=room, params={"grammar": Grammar("regex", "a")})
    wait_until(lambda: held, 5)
    decode.has_grammar(room)
    handled(decode)
    assert not any(isinstance(seen, GrammarReady) for seen in decode.seen)
    held.pop()()
    assert decode.receive(GrammarReady).room == room
    decode.has_grammar(room)
    assert decode.receive(GrammarReady).room == room
    with DecodePeer(prefill, "another") as other:
        other.has_grammar(room)
        assert "for another node" in other.receive(AbortRoom).error.message
        handled(other)
        assert not any(isinstance(seen, GrammarReady | Drained) for seen in other.seen)
        prefill.node.sending.drop_peer(other.name, "the test is over")
    proxy.send(Abort(to=prefill.instance_id, sender=proxy.name, room=room))
    decode.receive(AbortRoom)
    wait_until(lambda: room not in prefill.node.requests, 5)
    decode.has_grammar(room)
    assert decode.receive(AbortRoom).error.kind == "finished"


@pytest.mark.parametrize("has_pages", [False, True])
def test_a_prompt_that_waits_for_the_grammar_of_its_decode_node_gives_up_its_pages(
    prefill: NodeServer,
    proxy: RawPeer,
    decode: DecodePeer,
    monkeypatch: pytest.MonkeyPatch,
    has_pages: bool,
) -> None:
    """But not one whose decode node waits for memory alone."""

    def known(grammar: Grammar, done: Any, owner: str = "", **_: Any) -> None:
        done(MakeFreeRules())

    monkeypatch.setattr(prefill.node.core.grammars, "request_rules", known)
    room = b"pages and grammar"[:15] + bytes([has_pages])
    if has_pages:
        decode.has_grammar(room)
        handled(decode)
    ask(proxy, prefill, decode, room=room, params={"grammar": Grammar("regex", "a")})
    computed(proxy)
    outgoing = prefill.node.requests.find_request(room).outgoing
    wait_until(lambda: time.monotonic() > outgoing.computed_at + 1.0, 5)
    assert outgoing.parked != has_pages
    assert (prefill.node.core.memory.count_pages()["locked"] > 0) == has_pages
    epoch, receiver = decode.reserve(room, len(PROMPT))
    commit = decode.receive(Commit)
    receiver.commit(commit.num_bytes)
    wait_until(lambda: receiver.poll() is TransferState.DONE, 5)
    decode.acknowledge(room, epoch)


@pytest.mark.usefixtures("unstarved")
def test_a_room_of_which_no_request_comes_is_refused_after_a_lease(
    prefill: NodeServer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.prefill_node.sending.LEASE_SECONDS", 0.3)
    room = b"nobody's request"
    decode.has_grammar(room)
    abort = decode.receive(AbortRoom)
    assert (abort.room, abort.epoch) == (room, 0)
    assert "got no request" in abort.error.message
    assert not decode.answers(Drained, 0.1)


def test_prompts_that_wait_for_their_decode_node_keep_no_sampling_state(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    """Penalties have a row of the vocabulary for each choice, until its state is gone."""
    sampler = prefill.node.core.engine.sampler
    params = {"max_tokens": 4, "n": 8, "frequency_penalty": 0.1}
    for number in range(6):
        ask(proxy, prefill, decode, room=bytes([200 + number]) * 16, params=params)
        outputs = list[Any]()
        while len(outputs) < 8:
            outputs += proxy.receive(StepOutputs).outputs
    wait_until(lambda: prefill.node.count_queues()["in_flight"] == 6, 5)
    wait_until(lambda: gc.collect() >= 0 and len(sampler._penalties._free) >= 8, 5)
    assert len(sampler._penalties._counts) <= 16


def test_a_commit_is_repeated_until_it_is_acknowledged(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    epoch, _ = decode.reserve(room, len(PROMPT))
    first, second = decode.receive(Commit), decode.receive(Commit)
    assert first == second
    decode.acknowledge(room, epoch)
    wait_until(lambda: is_idle(prefill), 5)


def test_when_token_1_ends_the_request_d_is_told_so(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    token = computed(proxy)
    decode.reserve(room, len(PROMPT))
    decode.receive(Commit)
    stop = {"stop_token_ids": (token,), "max_tokens": 5}
    ended = ask(proxy, prefill, decode, params=stop)
    (output,) = proxy.receive(StepOutputs).outputs
    assert (output.room, output.finish.matched) == (ended, token)
    abort = decode.receive(AbortRoom)
    assert (abort.room, abort.error.kind) == (ended, "finished")
    decode.reserve(ended, len(PROMPT))  # it crossed the abort
    assert decode.receive(AbortRoom).error.kind == "finished"
    decode.receive(Drained)


def test_a_repeated_reservation_gets_no_word_of_a_drain_that_is_not_over(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained = []
    make = prefill.node.transfers[0].sender

    def stubborn(*args: Any) -> Any:
        sender = make(*args)
        monkeypatch.setattr(sender, "drained", lambda: bool(drained))
        return sender

    monkeypatch.setattr(prefill.node.transfers[0], "sender", stubborn)
    room = ask(proxy, prefill, decode)
    epoch, receiver = decode.reserve(room, len(PROMPT))
    decode.receive(Commit)
    proxy.send(Abort(to=prefill.instance_id, sender=proxy.name, room=room))
    assert decode.receive(AbortRoom).error.kind == "aborted"
    decode.say(Reservation, room, epoch, cached=(0,), destination=receiver.destination)
    assert decode.receive(AbortRoom).error.kind == "aborted"
    assert not any(isinstance(seen, Drained) for seen in decode.seen)
    drained.append(True)
    assert decode.receive(Drained).epoch == epoch
    wait_until(lambda: is_idle(prefill), 5)


# ---- reservations that are not what they should be


def test_a_reservation_of_a_stranger_is_refused(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    computed(proxy)
    with RawPeer(prefill.node.endpoint, "stranger") as stranger:
        to = prefill.instance_id
        stranger.send(Reservation(to=to, sender="stranger", room=room, epoch=1, cached=(0,)))
        refusal = stranger.receive(AbortRoom)
        assert (refusal.epoch, refusal.error.kind) == (1, "handshake")
    assert prefill.node.requests.find_request(room).outgoing.reservation is None


@pytest.mark.usefixtures("unstarved")
@pytest.mark.parametrize("early", [False, True])
def test_a_reservation_of_another_decode_node_is_refused_and_changes_nothing(
    prefill: NodeServer,
    proxy: RawPeer,
    decode: DecodePeer,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pd.prefill_node.sending.LEASE_SECONDS", 0.3)
    room = b"wanted by two..." if early else ask(proxy, prefill, decode)
    with DecodePeer(prefill, "decode-2") as other:
        epoch, receiver = other.reserve(room, len(PROMPT))
        handled(other)
        if early:
            ask(proxy, prefill, decode, room=room)
        computed(proxy)
        refusal = other.receive(AbortRoom)
        assert (refusal.room, refusal.epoch) == (room, epoch)
        assert other.receive(Drained).epoch == epoch
        assert receiver.bytes_received == 0
        mine, _ = decode.reserve(room, len(PROMPT))
        assert decode.receive(Commit).epoch == mine
        prefill.node.sending.drop_peer(other.name, "the test is over")


def test_a_second_reservation_is_refused_and_a_repeated_one_dropped(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    epoch, receiver = decode.reserve(room, len(PROMPT))
    decode.receive(Commit)
    other, _ = decode.reserve(room, len(PROMPT))
    assert decode.receive(AbortRoom).epoch == other
    assert decode.receive(Drained).epoch == other
    decode.say(Reservation, room, epoch, cached=(0,))
    handled(decode)
    aborts = [seen for seen in decode.seen if isinstance(seen, AbortRoom) and seen.room == room]
    assert [abort.epoch for abort in aborts] == [other]
    decode.acknowledge(room, epoch)
    wait_until(lambda: is_idle(prefill), 5)
    assert receiver.bytes_received == len(PROMPT) * TOKEN_BYTES


@pytest.mark.usefixtures("unstarved")
def test_a_reservation_that_waits_too_long_for_its_request_is_refused(
    prefill: NodeServer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.prefill_node.sending.LEASE_SECONDS", 0.2)
    epoch, _ = decode.reserve(b"nobody asked for", 8)
    refusal = decode.receive(AbortRoom, 2)
    assert (refusal.epoch, refusal.error.kind) == (epoch, "node_failed")
    assert decode.receive(Drained).epoch == epoch


def test_a_starved_proxy_may_be_late_with_the_request_of_a_reservation(
    prefill: NodeServer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.prefill_node.sending.LEASE_SECONDS", 0.2)
    patience = FakePatience()
    monkeypatch.setattr(prefill.node.sending, "_patience", patience)
    epoch, _ = decode.reserve(b"nobody asked yet", 8)
    wait_until(lambda: patience.asked, 10)
    assert not [seen for seen in decode.seen if isinstance(seen, AbortRoom)]
    patience.starved = False
    assert decode.receive(AbortRoom, 2).epoch == epoch
    assert patience.asked == {(0.2, None)}


@pytest.mark.parametrize("cached", [-1, 22])
def test_more_cached_tokens_than_the_prompt_has_fail_the_request(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, cached: int
) -> None:
    room = ask(proxy, prefill, decode)
    decode.say(Reservation, room, 7, cached=(cached,))
    failed = proxy.receive(Failed)
    assert failed.error.kind == "transfer"
    assert f"claims {cached} cached" in failed.error.message
    decode.give_up(room, 7)
    assert decode.receive(Drained).epoch == 7


# ---- acknowledgements


def test_only_the_peers_acknowledgement_of_this_epoch_counts(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    computed(proxy)
    decode.acknowledge(room, 0)
    epoch, _ = decode.reserve(room, len(PROMPT))
    decode.receive(Commit)
    decode.acknowledge(room, epoch + 1)
    decode.acknowledge(b"an unknown room.", epoch)
    with DecodePeer(prefill, "decode-2") as other:
        other.acknowledge(room, epoch)
        handled(other)
        prefill.node.sending.drop_peer(other.name, "the test is over")
    handled(decode)
    assert prefill.node.requests.find_request(room).state is RequestState.SENDING
    decode.acknowledge(room, epoch)
    wait_until(lambda: is_idle(prefill), 5)


# ---- aborts


@pytest.mark.parametrize("error", [AbortedError("gone"), DeadlineExceededError("too late")])
@pytest.mark.parametrize("reserved", [False, True])
def test_d_gives_up_and_p_drains_and_tells_the_proxy_the_real_reason(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, error: Any, reserved: bool
) -> None:
    room = ask(proxy, prefill, decode)
    computed(proxy)
    epoch = 0
    if reserved:
        epoch, _ = decode.reserve(room, len(PROMPT))
        decode.receive(Commit)
    decode.give_up(room, epoch, error)
    assert decode.receive(Drained, SOON).epoch == epoch
    wait_until(lambda: is_idle(prefill), SOON)
    if isinstance(error, AbortedError):
        handled(proxy)
        assert not any(isinstance(seen, Failed) for seen in proxy.seen)
    else:
        assert proxy.receive(Failed).error.kind == error.kind


def test_an_abort_of_another_epoch_is_drained_and_changes_nothing(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    epoch, _ = decode.reserve(room, len(PROMPT))
    decode.receive(Commit)
    decode.give_up(room, epoch + 5)
    assert decode.receive(Drained).epoch == epoch + 5
    assert prefill.node.requests.find_request(room).state is RequestState.SENDING
    decode.acknowledge(room, epoch)


def test_an_abort_of_an_unknown_room_is_drained_at_once_and_remembered(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = b"not here (yet).."
    decode.give_up(room, 3)
    assert decode.receive(Drained, SOON).epoch == 3
    ask(proxy, prefill, decode, room=room)
    handled(proxy)
    assert room not in prefill.node.requests


def test_an_abort_of_a_stranger_does_nothing(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    computed(proxy)
    with RawPeer(prefill.node.endpoint, "stranger") as stranger:
        for target in (room, b"an unknown room."):
            message = AbortRoom(
                to=prefill.instance_id,
                sender="stranger",
                room=target,
                epoch=0,
                error=ErrorInfo("aborted", ""),
            )
            stranger.send(message)
        handled(stranger)
        assert not any(isinstance(seen, Drained) for seen in stranger.seen)
    assert not prefill.node.requests.find_request(room).state.is_terminal
    assert not prefill.node.requests.has_tombstone(b"an unknown room.")


@pytest.mark.parametrize("reserved", [False, True])
def test_a_proxys_abort_reaches_d(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, reserved: bool
) -> None:
    room = ask(proxy, prefill, decode)
    computed(proxy)
    epoch = 0
    if reserved:
        epoch, _ = decode.reserve(room, len(PROMPT))
        decode.receive(Commit)
    proxy.send(Abort(to=prefill.instance_id, sender=proxy.name, room=room))
    abort = decode.receive(AbortRoom, SOON)
    assert (abort.room, abort.epoch, abort.error.kind) == (room, epoch, "aborted")
    if reserved:
        assert decode.receive(Drained, SOON).epoch == epoch


def test_an_abort_waits_until_d_can_hear_it(prefill: NodeServer, proxy: RawPeer) -> None:
    with DecodePeer(prefill, "slow to connect", silent=True) as decode:
        room = ask(proxy, prefill, decode)
        proxy.send(Abort(to=prefill.instance_id, sender=proxy.name, room=room))
        wait_until(lambda: prefill.node.requests.has_tombstone(room), 5)
        decode.live()
        assert decode.receive(AbortRoom, SOON).room == room
        prefill.node.sending.drop_peer(decode.name, "the test is over")
