"""What every backend does with a well-behaved pair of nodes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transfer_helpers import (
    SEED,
    backends,
    hand_off,
    introduce,
    make_pool,
    node_info,
    random_pages,
    reservation,
    settled,
    wait_until,
)

from pd.core.errors import SetupError, TransferError, UsageError
from pd.transfer import make_transfer_manager
from pd.transfer.base import TransferState

if TYPE_CHECKING:
    from pd.transfer.base import TransferManager

BACKENDS = backends("tcp", "fake", "nixl", "mooncake")


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture
def pair(backend):
    """``make(page_size_of_P, page_size_of_D, **pool)`` → pools and connected managers."""
    managers: list[TransferManager] = []

    def make(source_page: int, target_page: int, slots: int = 256, key: bytes | None = None, **kw):
        source = make_pool(slots, source_page, **kw)
        target = make_pool(slots, target_page, fill=-1.0, **kw)
        p = make_transfer_manager(backend, source, "P", cluster_key=key)
        d = make_transfer_manager(backend, target, "D", cluster_key=key)
        managers.extend((p, d))
        introduce(p, "P", d, "D", source)
        return source, target, p, d

    yield make
    for manager in managers:
        manager.close()


# Each pair of page sizes with one type, each type with one pair; the rest is full.
PAGE_SIZES = {(1, 1): "float32", (1, 16): "bfloat16", (16, 4): "float16", (64, 1): "float32"}


@pytest.mark.parametrize(
    ("source_page", "target_page", "dtype"),
    [
        pytest.param(*sizes, dtype, marks=() if dtype == sampled else pytest.mark.full)
        for sizes, sampled in PAGE_SIZES.items()
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_exactly_the_asked_tokens_arrive_whatever_the_page_sizes(
    pair, source_page, target_page, dtype
) -> None:
    rng = random.Random(f"{SEED}/{source_page}/{target_page}")
    source, target, p, d = pair(source_page, target_page, dtype=dtype)
    before = target.buffer.clone()
    for epoch in range(1, 11):
        stop = rng.randint(1, 200)
        start = rng.randint(0, stop)
        pages, into = random_pages(rng, source, stop), random_pages(rng, target, stop)
        room = rng.randbytes(16)
        receiver = d.receiver("P", room, epoch, into, (start,), stop)
        sender = p.sender("D", reservation(receiver, room, epoch, start), pages, stop)
        for a, b in chunks(rng, start, stop):
            for m, n in chunks(rng, 0, 3):
                sender.send(a, b, m, n)
        hand_off(sender, receiver)
        assert sender.bytes_sent == (stop - start) * source.layout.token_bytes
        assert torch.equal(target.tokens(into, start, stop), source.tokens(pages, start, stop))
        # Nothing but those slots changed.
        target.buffer[:, :, slots_of(into, target_page, start, stop)] = -1.0
        assert torch.equal(target.buffer, before)


def chunks(rng: random.Random, start: int, stop: int) -> list[tuple[int, int]]:
    """Parts of a range in order, some of them empty."""
    cuts = sorted(rng.randint(start, stop) for _ in range(rng.randint(0, 3)))
    return list(zip([start, *cuts], [*cuts, stop], strict=True))


def slots_of(pages, page_size: int, start: int, stop: int) -> list[int]:
    return [int(pages[t // page_size]) * page_size + t % page_size for t in range(start, stop)]


def test_only_what_the_decode_node_lacks_is_sent(pair) -> None:
    source, target, p, d = pair(4, 4)
    pages = np.arange(25, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (90,), 100)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 90), pages, 100)
    sender.send(90, 100, 0, 3)
    hand_off(sender, receiver)
    assert sender.bytes_sent == 10 * source.layout.token_bytes
    assert bool((target.tokens(pages, 0, 90) == -1.0).all())


def test_a_room_without_missing_tokens_needs_no_data(pair) -> None:
    _, _, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (8,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 8), pages, 8)
    hand_off(sender, receiver)
    assert sender.bytes_sent == 0
    assert sender.drained()
    assert receiver.drained()


def test_concurrent_rooms_do_not_mix(pair) -> None:
    rng = random.Random(SEED)
    source, target, p, d = pair(2, 4, slots=4096)
    order = rng.sample(range(1024), 1024)
    rooms = []
    for number in range(32):
        tokens = rng.randint(1, 120)
        pages = random_pages(rng, source, tokens)
        into = np.array(order[number * 32 : number * 32 + -(-tokens // 4)], dtype=np.int32)
        room = rng.randbytes(16)
        receiver = d.receiver("P", room, number + 1, into, (0,), tokens)
        sender = p.sender("D", reservation(receiver, room, number + 1, 0), pages, tokens)
        rooms.append((sender, receiver, pages, into, tokens))
    for layer in range(3):
        for sender, _, _, _, tokens in rooms:
            sender.send(0, tokens, layer, layer + 1)
    for sender, receiver, *_ in rooms:
        hand_off(sender, receiver)
    for _, _, pages, into, tokens in rooms:
        assert torch.equal(target.tokens(into, 0, tokens), source.tokens(pages, 0, tokens))


def test_a_commit_of_another_size_fails_the_receiver(pair) -> None:
    source, _, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
    sender.send(0, 7, 0, 3)
    sender.finish()
    assert settled(sender) is TransferState.DONE
    receiver.commit(sender.bytes_sent)
    assert receiver.poll() is TransferState.FAILED
    width = source.layout.token_bytes
    assert str(receiver.error) == f"P committed {7 * width} KV bytes; {8 * width} were reserved"


def test_states_only_move_forward_and_the_first_error_stays(pair) -> None:
    _, _, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
    receiver.commit(1)
    first = str(receiver.error)
    receiver.abort()
    receiver.commit(8)
    assert (receiver.poll(), str(receiver.error)) == (TransferState.FAILED, first)
    sender.abort()
    sender.abort()
    sender.send(0, 8, 0, 3)
    sender.finish()
    assert (sender.poll(), str(sender.error)) == (TransferState.FAILED, "aborted")
    wait_until(sender.drained, "the sender to drain")


def test_done_stays_done_after_abort(pair) -> None:
    _, _, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
    sender.send(0, 8, 0, 3)
    hand_off(sender, receiver)
    sender.abort()
    receiver.abort()
    assert sender.poll() is receiver.poll() is TransferState.DONE
    assert sender.drained()
    assert receiver.drained()


def test_sending_outside_the_reservation_is_an_error_of_ours(pair) -> None:
    _, _, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (4,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 4), pages, 8)
    for bad in [(3, 8, 0, 3), (4, 9, 0, 3), (6, 5, 0, 3), (4, 8, 0, 4), (4, 8, -1, 3)]:
        with pytest.raises(ValueError, match="are not in"):
            sender.send(*bad)


def test_an_unknown_peer_and_an_impossible_prefix_are_refused(pair) -> None:
    _, _, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    with pytest.raises(TransferError, match="X is not connected"):
        p.sender("X", reservation(receiver, bytes(16), 1, 0), pages, 8)
    with pytest.raises(TransferError, match="holds 9 tokens of a prompt of 8"):
        p.sender("D", reservation(receiver, bytes(16), 1, 9), pages, 8)


def test_after_disconnect_nothing_lands_and_both_ends_fail(pair) -> None:
    source, target, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
    sender.send(0, 4, 0, 3)
    d.disconnect("P")
    assert receiver.poll() is TransferState.FAILED
    wait_until(receiver.drained, "a copy that was under way")
    target.buffer.fill_(7.0)
    sender.send(4, 8, 0, 3)
    sender.finish()
    settled(sender)
    wait_until(sender.drained, "the sender to drain")
    assert bool((target.buffer == 7.0).all())
    # Both survive and meet again.
    introduce(p, "P", d, "D", source)
    receiver = d.receiver("P", bytes(16), 2, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 2, 0), pages, 8)
    sender.send(0, 8, 0, 3)
    hand_off(sender, receiver)
    assert torch.equal(target.tokens(pages, 0, 8), source.tokens(pages, 0, 8))


def test_the_sending_side_can_disconnect_too(pair) -> None:
    _, _, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
    sender.send(0, 4, 0, 3)
    p.disconnect("D")
    assert sender.poll() is TransferState.FAILED
    assert "D was disconnected" in str(sender.error)
    wait_until(sender.drained, "what was under way")
    with pytest.raises(TransferError, match="D is not connected"):
        p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)


def test_a_restarted_peer_needs_a_new_connect(pair, backend) -> None:
    source, target, p, d = pair(4, 4)
    d.close()
    again = make_transfer_manager(backend, target, "D2")
    try:
        pages = np.arange(2, dtype=np.int32)
        with pytest.raises(TransferError, match="D2 is not connected"):
            p.sender("D2", reservation_for("D2"), pages, 8)
        p.disconnect("D")
        introduce(p, "P", again, "D2", source)
        receiver = again.receiver("P", bytes(16), 1, pages, (0,), 8)
        sender = p.sender("D2", reservation(receiver, bytes(16), 1, 0), pages, 8)
        sender.send(0, 8, 0, 3)
        hand_off(sender, receiver)
    finally:
        again.close()


def reservation_for(sender: str):
    from pd.core.messages import Reservation

    return Reservation(to="P", sender=sender, room=bytes(16), epoch=1, cached=(0,))


def test_another_instance_behind_the_address_is_noticed(pair, backend) -> None:
    """D restarted on the same port before P heard of it."""
    _, target, p, d = pair(4, 4)
    info = node_info("D-before", "decode", d, target)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    p.connect(info)
    try:
        sender = p.sender("D-before", reservation(receiver, bytes(16), 1, 0), pages, 8)
    except TransferError as error:
        assert "another instance" in str(error)
        return
    sender.send(0, 8, 0, 3)
    assert settled(sender) is TransferState.FAILED
    assert "D-before" in str(sender.error)


def test_connect_again_keeps_what_is_under_way(pair) -> None:
    source, target, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
    sender.send(0, 4, 0, 3)
    introduce(p, "P", d, "D", source)
    sender.send(4, 8, 0, 3)
    hand_off(sender, receiver)
    assert torch.equal(target.tokens(pages, 0, 8), source.tokens(pages, 0, 8))


def test_close_fails_what_is_open(pair) -> None:
    _, _, p, d = pair(4, 4)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
    p.close()
    d.close()
    for end in (sender, receiver):
        assert end.poll() is TransferState.FAILED
        assert end.drained()


@pytest.mark.parametrize(
    "address", [{}, {"host": "h"}, {"host": "127.0.0.1", "port": "x"}, {"host": "", "port": "1"}]
)
def test_a_bad_address_is_refused(pair, address) -> None:
    import msgspec

    _, target, p, d = pair(4, 4)
    info = msgspec.structs.replace(node_info("E", "decode", d, target), transfers={d.name: address})
    with pytest.raises(TransferError, match="E published a bad data address"):
        p.connect(info)


def test_without_a_cluster_key_nothing_leaves_the_machine(pair, backend) -> None:
    import msgspec

    _, target, p, d = pair(4, 4)
    with pytest.raises(UsageError, match="--cluster-key-file"):
        make_transfer_manager(backend, target, "X", "0.0.0.0")
    address = {"host": "192.0.2.1", "port": "9"}
    info = msgspec.structs.replace(node_info("E", "decode", d, target), transfers={d.name: address})
    with pytest.raises(TransferError, match="no cluster key"):
        p.connect(info)


def test_nodes_with_the_same_cluster_key_work_together(pair) -> None:
    source, target, p, d = pair(4, 4, key=b"k" * 16)
    pages = np.arange(2, dtype=np.int32)
    receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
    sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
    sender.send(0, 8, 0, 3)
    hand_off(sender, receiver)
    assert torch.equal(target.tokens(pages, 0, 8), source.tokens(pages, 0, 8))


@pytest.mark.parametrize("keys", [(b"a" * 16, b"b" * 16), (None, b"b" * 16), (b"a" * 16, None)])
def test_nodes_with_different_cluster_keys_do_not(backend, keys) -> None:
    pool = make_pool(16, 4)
    p = make_transfer_manager(backend, pool, "P", cluster_key=keys[0])
    d = make_transfer_manager(backend, pool, "D", cluster_key=keys[1])
    try:
        pages = np.arange(2, dtype=np.int32)
        receiver = d.receiver("P", bytes(16), 1, pages, (0,), 8)
        introduce(p, "P", d, "D", pool)
        try:
            sender = p.sender("D", reservation(receiver, bytes(16), 1, 0), pages, 8)
        except TransferError:
            return
        sender.send(0, 8, 0, 3)
        assert settled(sender) is TransferState.FAILED
        assert receiver.bytes_received == 0
    finally:
        p.close()
        d.close()


def test_the_factory_names_what_cannot_be() -> None:
    pool = make_pool(16, 4)
    with pytest.raises(
        UsageError, match=r"unknown transfer backend 'rdma'; choose one of auto, tcp"
    ):
        make_transfer_manager("rdma", pool, "X")
    with pytest.raises(SetupError, match="nvlink: the KV cache is on the CPU"):
        make_transfer_manager("nvlink", pool, "X")
    with pytest.raises(UsageError, match="--fake-script needs --transfer-backend fake"):
        make_transfer_manager("tcp", pool, "X", fake_script=Path("x"))
    with pytest.raises(SetupError, match=r"cannot listen for KV data on 127\.9\.9\.300"):
        make_transfer_manager("tcp", pool, "X", "127.9.9.300", cluster_key=b"k" * 16)
