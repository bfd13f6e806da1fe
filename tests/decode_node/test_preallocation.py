"""Memory for prompts that are still computed elsewhere: in order of arrival, with a reserve."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest
from cluster import is_idle, random_prompts, wait_until
from decode_helpers import ask
from raw_peer import SOON, proxy_of
from requests_for_tests import make_generate, make_request
from tiny import TOKEN_BYTES, tiny_cluster, tiny_node

from pd.core.messages import AbortRoom, CommitAck, Failed, Reservation, Returned
from pd.scheduling.reserve import DecodeReserve

if TYPE_CHECKING:
    from prefill_peer import PrefillPeer
    from raw_peer import RawPeer

    from pd.launch import NodeServer


# ---- order


def test_memory_is_reserved_in_the_order_of_arrival(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    large = ask(proxy, decode, prefill, [1] * 150)
    first = prefill.receive(Reservation)
    waiting = [ask(proxy, decode, prefill, [2] * 150), ask(proxy, decode, prefill, [3] * 4)]
    wait_until(lambda: len(decode.node.receiving.preallocation) == 2, 5)
    time.sleep(0.2)
    assert not any(isinstance(seen, Reservation) for seen in prefill._unread), (
        "the small request would fit, but the one before it would then wait for ever"
    )
    prefill.give_up(large, first.epoch, "aborted")
    prefill.drained(large, first.epoch)
    assert [prefill.receive(Reservation).room for _ in range(2)] == waiting


def test_memory_that_a_prefill_node_returns_is_reserved_anew(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    prompts = [[1] * 150, [2] * 150]
    returned, waiting = [ask(proxy, decode, prefill, prompt) for prompt in prompts]
    first = prefill.receive(Reservation)
    for epoch in (first.epoch + 1, first.epoch, first.epoch):  # of another one, its own, repeated
        prefill.say(Returned, returned, epoch)
    again = prefill.receive(Reservation)
    assert (again.room, again.epoch != first.epoch) == (returned, True), "it keeps its turn"
    prefill.say(Returned, returned, first.epoch)
    sender = prefill.push(again, 150)
    prefill.commit(again, sender.bytes_sent)
    assert prefill.receive(CommitAck).epoch == again.epoch
    assert prefill.receive(Reservation).room == waiting
    decode.node.check_books()


def test_memory_that_a_prefill_node_returns_after_its_commit_is_not_used(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    room = ask(proxy, decode, prefill, [1] * 150)
    reservation = prefill.receive(Reservation)
    prefill.commit(reservation, 150 * TOKEN_BYTES)  # of which nothing came
    prefill.say(Returned, room, reservation.epoch)
    failed = proxy.receive(Failed)
    assert (failed.room, "returned memory" in failed.error.message) == (room, True)
    assert prefill.receive(AbortRoom).epoch == reservation.epoch
    prefill.drained(room, reservation.epoch)


def test_a_dead_prefill_node_does_not_hold_up_requests_of_others(
    decode: NodeServer,
    prefill: PrefillPeer,
    proxy: RawPeer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode.node.receiving.handshakes._directory, "_timeout", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # connects, never answers
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        dead = make_generate(
            [1] * 8,
            to=decode.instance_id,
            sender=proxy.name,
            peer="dead-prefill-node",
            peer_bootstrap=url,
        )
        proxy.send(dead)
        wait_until(lambda: dead.room in decode.node.requests, 5)
        room = ask(proxy, decode, prefill, [2] * 8)
        assert prefill.receive(Reservation, SOON).room == room
        assert dead.room in decode.node.requests
    failed = proxy.receive(Failed)  # hung up
    assert (failed.room, "dead-prefill-node" in failed.error.message) == (dead.room, True)


def test_a_restarted_prefill_node_is_not_taken_for_the_old_one(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    message = make_generate(
        [1] * 8,
        to=decode.instance_id,
        sender=proxy.name,
        peer="an-earlier-life",
        peer_bootstrap=prefill.url,
    )
    proxy.send(message)
    failed = proxy.receive(Failed)
    assert failed.room == message.room
    assert "an-earlier-life" in failed.error.message and prefill.name in failed.error.message


def test_a_request_alone_needs_no_reserve() -> None:
    # The pool holds exactly the prompt and the output that was asked for.
    with tiny_cluster(decode_settings={"kv_cache_tokens": 64}) as cluster:
        (prompt,) = random_prompts(0, [40])
        request = cluster.client.generate(prompt, cluster.pair, max_tokens=25)
        assert len(request.tokens(10)) == 25


def test_requests_that_wait_for_memory_get_it_when_others_end() -> None:
    with tiny_cluster(decode_settings={"kv_cache_tokens": 120}) as cluster:
        prompts = list(random_prompts(1, [60] * 6))
        sent = [cluster.client.generate(p, cluster.pair, max_tokens=8) for p in prompts]
        assert [len(request.tokens(20)) for request in sent] == [8] * 6
        cluster.wait_idle()


def test_a_full_decode_node_does_not_delay_token_1() -> None:
    with tiny_cluster(decode_settings={"kv_cache_tokens": 120}) as cluster:
        first, second = random_prompts(2, [60, 60])
        long = cluster.client.generate(first, cluster.pair, max_tokens=60)
        wait_until(lambda: len(long.choices[0].tokens) > 1, 5)
        waiting = cluster.client.generate(second, cluster.pair, max_tokens=4)
        wait_until(lambda: waiting.choices[0].tokens, 5)
        assert len(long.choices[0].tokens) < 60, "the first was over too early for this test"
        waiting.tokens(10)
        cluster.wait_idle()


def test_p_and_d_short_of_memory_do_not_wait_for_each_other() -> None:
    settings = {"kv_cache_tokens": 64, "reserved_decode_tokens": 4}
    with tiny_cluster(2, 2, **settings) as cluster:
        prompts = list(random_prompts(3, [30, 50, 20, 56, 10, 40] * 6))
        sent = [
            cluster.client.generate(
                prompt, (cluster.prefill[i % 2], cluster.decode[i // 2 % 2]), max_tokens=8
            )
            for i, prompt in enumerate(prompts)
        ]
        assert [len(request.tokens(60)) for request in sent] == [8] * len(sent)
        cluster.wait_idle()


# ---- the reserve


def growth(reserve: DecodeReserve, *produced: int, max_tokens: int = 1000) -> int:
    """Pages of 1 token that sequences with so many output tokens will take."""
    sequences = []
    for count in produced:
        sequence = make_request([1, 2], params={"max_tokens": max_tokens}).sequence
        for _ in range(count):
            sequence.append_token(0)
        sequences.append(sequence)
    return reserve.count_growth(sequences, page_size=1)


def test_the_reserve_starts_at_its_limit() -> None:
    assert growth(DecodeReserve(512), 0) == 512
    assert growth(DecodeReserve(512), 0, 100) == 512 + 412


def test_no_more_is_reserved_than_was_asked_for() -> None:
    assert growth(DecodeReserve(512), 0, max_tokens=20) == 20


def test_who_is_longer_than_expected_still_counts() -> None:
    assert growth(DecodeReserve(10), 50, 60) == 2


def test_pages_are_rounded_up_for_each_sequence() -> None:
    reserve = DecodeReserve(9)
    sequences = [make_request([1], params={"max_tokens": 100}).sequence for _ in range(3)]
    assert reserve.count_growth(sequences, page_size=4) == 3 * 3


def test_short_outputs_shrink_the_reserve_and_a_retraction_doubles_it() -> None:
    reserve = DecodeReserve(512)
    for _ in range(100):
        reserve.note_finished(16)
    assert 16 <= reserve.expected < 17
    reserve.note_retracted()
    assert 32 <= reserve.expected < 34
    for _ in range(10):
        reserve.note_retracted()
    assert reserve.expected == 512


def test_outputs_beyond_the_limit_count_as_the_limit() -> None:
    reserve = DecodeReserve(64)
    reserve.note_finished(100_000)
    assert reserve.expected == 64


def test_a_limit_of_nothing_reserves_a_page_each() -> None:
    reserve = DecodeReserve(0)
    reserve.note_retracted()
    reserve.note_finished(10)
    assert growth(reserve, 0, 5) == 2


# ---- a slow answer of the registry


def test_an_abort_during_the_handshake_leaves_nothing() -> None:
    decode = tiny_node("decode")
    try:
        with socket.create_server(("127.0.0.1", 0)) as deaf, proxy_of(decode) as proxy:
            url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            message = make_generate(
                [1] * 8, to=decode.instance_id, sender=proxy.name, peer="p", peer_bootstrap=url
            )
            proxy.send(message)
            wait_until(lambda: message.room in decode.node.requests, 5)
            with decode.node.core.events.event():
                decode.node.abort_rid(None)
            assert is_idle(decode)
            assert proxy.receive(Failed).error.kind == "aborted"
    finally:
        decode.stop()


@pytest.mark.parametrize("address", ["", "not a url", "http://127.0.0.1:1"])
def test_an_address_where_nobody_is_fails_the_request_only(
    decode: NodeServer, proxy: RawPeer, address: str
) -> None:
    message = make_generate(
        [1] * 8, to=decode.instance_id, sender=proxy.name, peer="p", peer_bootstrap=address
    )
    proxy.send(message)
    assert proxy.receive(Failed).room == message.room
    assert decode.node.ready
