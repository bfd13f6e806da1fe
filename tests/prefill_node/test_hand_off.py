"""The prefill node's half of a hand-off, told by a decode node that says whatever it likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cluster import is_idle, random_prompts, wait_until
from decode_peer import DecodePeer
from raw_peer import RawPeer, proxy_of
from requests_for_tests import make_generate
from tiny import TOKEN_BYTES, tiny_node

from pd.core.errors import AbortedError, DeadlineExceededError
from pd.core.messages import (
    Abort,
    AbortRoom,
    Commit,
    Drained,
    ErrorInfo,
    Failed,
    NodeHeartbeat,
    PeerHeartbeat,
    Reservation,
    StepOutputs,
)
from pd.core.request import RequestState
from pd.transfer.base import TransferState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.launch import NodeServer

PROMPT = next(random_prompts(7, [21]))


@pytest.fixture(scope="module")
def server() -> Iterator[NodeServer]:
    node = tiny_node("prefill", chunked_prefill_size=8)
    yield node
    node.stop()


@pytest.fixture
def prefill(server: NodeServer) -> Iterator[NodeServer]:
    """Idle and consistent after each test."""
    yield server
    with server.node.lock:
        server.node.abort(None)
    wait_until(lambda: is_idle(server), 10, server.node.server_info)
    server.node.check()
    assert not server.node.hand_off._early
    server.node.flush_cache()


@pytest.fixture
def proxy(prefill: NodeServer) -> Iterator[RawPeer]:
    with proxy_of(prefill) as peer:
        yield peer


@pytest.fixture
def decode(prefill: NodeServer) -> Iterator[DecodePeer]:
    with DecodePeer(prefill) as peer:
        yield peer
    with prefill.node.lock:
        prefill.node.lose_peer(peer.name, "the test is over")


def ask(proxy: RawPeer, prefill: NodeServer, decode: DecodePeer, **fields: Any) -> bytes:
    message = make_generate(
        PROMPT, to=prefill.instance_id, sender=proxy.name, peer=decode.name, **fields
    )
    proxy.send(message)
    return message.room


def computed(proxy: RawPeer) -> int:
    """Wait for token 1 and return it."""
    (output,) = proxy.receive(StepOutputs).outputs
    assert output.position == 0
    return output.token_ids[0]


def handled(peer: RawPeer) -> None:
    """Everything that this peer sent so far was handled."""
    peer.beat()
    peer.receive(NodeHeartbeat)


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
    wait_until(lambda: prefill.node.queues()["in_flight"] == 1, 5)
    assert prefill.node.requests[room].hand_off.reservation is None


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


# ---- reservations that are not what they should be


def test_a_reservation_of_a_stranger_is_dropped(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    computed(proxy)
    with RawPeer(prefill.node.endpoint, "stranger") as stranger:
        to = prefill.instance_id
        stranger.send(
            Reservation(to=to, sender="stranger", room=room, epoch=1, cached_prefix_len=0)
        )
        handled(stranger)
    assert prefill.node.requests[room].hand_off.reservation is None


@pytest.mark.parametrize("early", [False, True])
def test_a_reservation_of_another_decode_node_is_refused_and_changes_nothing(
    prefill: NodeServer,
    proxy: RawPeer,
    decode: DecodePeer,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pd.prefill_node.hand_off.LEASE_SECONDS", 0.3)
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
        prefill.node.lose_peer(other.name, "the test is over")


def test_a_second_reservation_is_refused_and_a_repeated_one_dropped(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = ask(proxy, prefill, decode)
    epoch, receiver = decode.reserve(room, len(PROMPT))
    decode.receive(Commit)
    other, _ = decode.reserve(room, len(PROMPT))
    assert decode.receive(AbortRoom).epoch == other
    assert decode.receive(Drained).epoch == other
    decode.say(Reservation, room, epoch, cached_prefix_len=0)
    handled(decode)
    aborted = [seen.epoch for seen in decode.seen if isinstance(seen, AbortRoom)]
    assert aborted == [other]
    decode.acknowledge(room, epoch)
    wait_until(lambda: is_idle(prefill), 5)
    assert receiver.bytes_received == len(PROMPT) * TOKEN_BYTES


def test_a_reservation_that_waits_too_long_for_its_request_is_refused(
    prefill: NodeServer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.prefill_node.hand_off.LEASE_SECONDS", 0.2)
    epoch, _ = decode.reserve(b"nobody asked for", 8)
    refusal = decode.receive(AbortRoom, 2)
    assert (refusal.epoch, refusal.error.kind) == (epoch, "node_failed")
    assert decode.receive(Drained).epoch == epoch


@pytest.mark.parametrize("cached", [-1, 22])
def test_more_cached_tokens_than_the_prompt_has_fail_the_request(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, cached: int
) -> None:
    room = ask(proxy, prefill, decode)
    decode.say(Reservation, room, 7, cached_prefix_len=cached)
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
        prefill.node.lose_peer(other.name, "the test is over")
    handled(decode)
    assert prefill.node.requests[room].state is RequestState.SENDING
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
    assert decode.receive(Drained, 1).epoch == epoch
    wait_until(lambda: is_idle(prefill), 1)
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
    assert prefill.node.requests[room].state is RequestState.SENDING
    decode.acknowledge(room, epoch)


def test_an_abort_of_an_unknown_room_is_drained_at_once_and_remembered(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer
) -> None:
    room = b"not here (yet).."
    decode.give_up(room, 3)
    assert decode.receive(Drained, 1).epoch == 3
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
    assert not prefill.node.requests[room].state.terminal
    assert not prefill.node.is_buried(b"an unknown room.")


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
    abort = decode.receive(AbortRoom, 1)
    assert (abort.room, abort.epoch, abort.error.kind) == (room, epoch, "aborted")
    if reserved:
        assert decode.receive(Drained, 1).epoch == epoch


# ---- the end of a peer


def test_a_silent_decode_node_fails_its_requests_and_nothing_else(
    prefill: NodeServer, proxy: RawPeer, decode: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.node.leases.LEASE_SECONDS", 0.5)
    with DecodePeer(prefill, "silent") as silent:
        dead = ask(proxy, prefill, silent)
        alive = ask(proxy, prefill, decode)
        silent.reserve(dead, len(PROMPT))
        wait_until(lambda: {dead, alive} <= set(prefill.node.requests), 5)

        def is_dead() -> bool:
            proxy.beat()
            decode.live()
            return dead not in prefill.node.requests

        wait_until(is_dead, 5)
        failed = proxy.receive(Failed)
        assert failed.room == dead
        assert "decode node silent failed: no heartbeat" in failed.error.message
        assert not prefill.node.requests[alive].state.terminal
        assert prefill.node.ready
        assert not silent.answers(Drained, 0.2), "only its own disconnect protects its pages now"
        silent.reserve(b"a later room....", 8)
        handled(silent)
        assert not prefill.node.hand_off._early, "it must shake hands again first"
        silent.shake_hands()
        epoch, _ = silent.reserve(room := ask(proxy, prefill, silent), len(PROMPT))
        while silent.receive(Commit).epoch != epoch:
            pass  # of the room that is dead
        silent.acknowledge(room, epoch)
        handled(silent)
        prefill.node.lose_peer(silent.name, "the test is over")


def test_a_decode_node_that_never_shakes_hands_fails_the_request_after_a_lease(
    prefill: NodeServer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.prefill_node.hand_off.LEASE_SECONDS", 0.3)
    message = make_generate(
        PROMPT, to=prefill.instance_id, sender=proxy.name, peer="a-decode-node-nobody-knows"
    )
    proxy.send(message)
    assert "did not shake hands" in proxy.receive(Failed).error.message


def test_both_sides_hear_heartbeats(prefill: NodeServer, decode: DecodePeer) -> None:
    handled(decode)
    assert decode.receive(PeerHeartbeat, 2).sender == prefill.instance_id
