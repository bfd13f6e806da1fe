"""The tcp backend against broken, malicious, dead and stuck peers."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from relay import Relay
from transfer_helpers import (
    SEED,
    hand_off,
    introduce,
    make_pool,
    node_info,
    random_pages,
    reservation,
    settled,
    wait_until,
    watch_limit,
)

from pd.core.errors import TransferError
from pd.transfer.base import TransferState
from pd.transfer.common import receiver as counted_receiver
from pd.transfer.common import sender as rooms_sender
from pd.transfer.ranges import Block
from pd.transfer.tcp import host_buffers as tcp_staging
from pd.transfer.tcp import inbox as tcp_inbox
from pd.transfer.tcp import lane as tcp_lane
from pd.transfer.tcp import sender as tcp_sender
from pd.transfer.tcp.frames import DATA, HEADER, MAGIC, MAX_PAYLOAD, encode_header
from pd.transfer.tcp.manager import TcpManager
from pd.transfer.wire import acceptor, dialler
from pd.transfer.wire.greeting import greet_peer

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM = b"r" * 16
PAGES = np.arange(2, dtype=np.int32)
TOKENS = 8
LAYERS = 3


@pytest.fixture
def target():
    return make_pool(64, 4, layers=LAYERS, fill=-1.0)


@pytest.fixture
def d(target) -> Iterator[TcpManager]:
    manager = TcpManager(target, "D")
    yield manager
    manager.close()


@pytest.fixture
def p(d, target) -> Iterator[TcpManager]:
    manager = TcpManager(make_pool(64, 4, layers=LAYERS), "P", connections=1)
    introduce(manager, "P", d, "D", target)
    yield manager
    manager.close()


@pytest.fixture
def open_socket(d) -> Iterator:
    """A data connection in the hands of the test, introduced as ``peer``."""
    socks = []

    def connect(peer: str = "P") -> socket.socket:
        sock = stranger(d)
        greet_peer(sock, "tcp", peer, "D", None)
        socks.append(sock)
        return sock

    yield connect
    for sock in socks:
        sock.close()


def stranger(d: TcpManager) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(d.address()["port"])), timeout=10.0)


def frame(target, block: Block, room: bytes = ROOM, epoch: int = 1, value: int = 3) -> bytes:
    payload = block.cells * 2 * 8 * 4
    return encode_header(room, epoch, block, payload) + bytes([value]) * payload


def closed_by_peer(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def transfer_works(p: TcpManager, d: TcpManager, target, epoch: int = 99) -> None:
    """A good room, next to whatever else happened."""
    pages = np.array([14, 15], dtype=np.int32)
    receiver = d.receiver("P", b"good" * 4, epoch, pages, (0,), TOKENS)
    sender = p.sender("D", reservation(receiver, b"good" * 4, epoch, 0), PAGES, TOKENS)
    sender.send(0, TOKENS, 0, LAYERS)
    hand_off(sender, receiver)


@pytest.mark.parametrize("threads", [0, 1])
def test_data_connections_for_which_no_thread_can_start_are_opened_later(
    d, target, monkeypatch, threads
) -> None:
    start, left = threading.Thread.start, [threads]

    def few_threads(self: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(self)

    manager = TcpManager(make_pool(64, 4, layers=LAYERS), "P", connections=2)
    with contextlib.closing(manager):
        pages = np.array([12, 13], dtype=np.int32)
        receiver = d.receiver("P", b"poor" * 4, 1, pages, (0,), TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", few_threads)
            introduce(manager, "P", d, "D", target)
            if threads:
                transfer_works(manager, d, target, epoch=98)
            else:
                with pytest.raises(TransferError, match="D could be opened: can't start new"):
                    manager.sender("D", reservation(receiver, b"poor" * 4, 1, 0), PAGES, TOKENS)
        transfer_works(manager, d, target)
        assert len(manager._links["D"]._lanes) == 2
        receiver.abort()


# ---- malformed input


BAD_HEADERS = {
    "magic": dict(magic=b"HTTP"),
    "unknown frame type": dict(kind=7),
    "3 layers have": dict(payload=17),
    "exceeds": dict(tokens=1 << 20, payload=MAX_PAYLOAD + 1),
    "payload of 0 bytes": dict(payload=0),
    "0 tokens": dict(tokens=0, payload=0),
    "0) do not fit a pool of 3 layers": dict(layers=0, payload=0),
    "layers [2, 5)": dict(layer=2),
    "do not fit a pool of 3 layers": dict(layers=1 << 31),
    "outside the reserved [0, 8)": dict(token=1),
    "tokens [4294967295": dict(token=(1 << 32) - 1),
}


@pytest.mark.parametrize("complaint", BAD_HEADERS)
def test_a_bad_header_ends_its_connection_only(
    p, d, target, open_socket, caplog, complaint
) -> None:
    caplog.set_level(logging.INFO)
    fields = dict(
        magic=MAGIC, kind=DATA, room=ROOM, epoch=1, token=0, tokens=TOKENS, layer=0, layers=LAYERS
    )
    fields["payload"] = TOKENS * LAYERS * 64
    fields.update(BAD_HEADERS[complaint])
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    sock = open_socket()
    sock.sendall(HEADER.pack(*fields.values()))
    assert closed_by_peer(sock)
    lines = [r.getMessage() for r in caplog.records if "closed the data connection" in r.message]
    assert len(lines) == 1
    assert complaint in lines[0]
    assert "P (127.0.0.1:" in lines[0]
    transfer_works(p, d, target)
    assert receiver.bytes_received == 0
    assert bool((target.tokens(PAGES, 0, TOKENS) == -1.0).all())


def test_random_bytes_never_hurt_the_node(p, d, target, open_socket) -> None:
    rng = random.Random(SEED)
    d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    for size in (1, 10, 64, 200, 5000):
        for sock in (open_socket(), stranger(d)):
            # The node may hang up before it has read everything.
            with contextlib.suppress(OSError):
                sock.sendall(rng.randbytes(size))
                sock.shutdown(socket.SHUT_WR)
            assert closed_by_peer(sock)
            sock.close()
    transfer_works(p, d, target)
    assert bool((target.tokens(PAGES, 0, TOKENS) == -1.0).all())


def test_a_stranger_that_says_nothing_is_hung_up_on(p, d, target, monkeypatch) -> None:
    monkeypatch.setattr(acceptor, "GREETING_SECONDS", 0.05)
    with stranger(d) as sock:
        assert closed_by_peer(sock)
    transfer_works(p, d, target)


def test_strangers_cannot_use_up_all_connections(p, d, target, monkeypatch) -> None:
    monkeypatch.setattr(acceptor, "MAX_PENDING", 4)
    socks = [stranger(d) for _ in range(12)]
    try:
        assert all(closed_by_peer(sock) for sock in socks[:8])
        transfer_works(p, d, target)
    finally:
        for sock in socks:
            sock.close()


def test_a_connection_for_another_instance_is_refused(d, caplog) -> None:
    from pd.transfer.wire.greeting import PeerRefusedError

    with stranger(d) as sock, pytest.raises(PeerRefusedError, match="another instance"):
        greet_peer(sock, "tcp", "P", "D-before", None)
    wait_until(lambda: "looks for instance 'D-before'" in caplog.text, "the log line")


def test_strangers_fill_no_log(d, caplog) -> None:
    for _ in range(100):
        with stranger(d) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n" * 20)
            assert closed_by_peer(sock)
    assert 1 <= caplog.text.count("closed the data connection of 127.0.0.1") < 50


@pytest.mark.parametrize("is_greeted", [False, True])
def test_a_connection_that_cannot_be_watched_is_closed_and_the_next_one_is_read(
    d, target, open_socket, caplog, is_greeted
) -> None:
    def concerns(data) -> bool:
        return isinstance(data, tcp_inbox._Connection) == is_greeted

    watch_limit(d._inbox._selector, concerns)
    if is_greeted:
        assert closed_by_peer(open_socket())
    else:
        with stranger(d) as refused:
            assert closed_by_peer(refused)
    assert "No space left on device" in caplog.text
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    open_socket().sendall(frame(target, Block(0, TOKENS, 0, LAYERS)))
    wait_until(lambda: d.counters.frames == 1, "the frame")
    receiver.abort()


# ---- frames that are well-formed but not wanted


@pytest.mark.parametrize(("room", "epoch"), [(b"x" * 16, 1), (ROOM, 2), (ROOM, 0)])
def test_unknown_rooms_and_epochs_are_discarded_and_the_connection_survives(
    d, target, open_socket, room, epoch
) -> None:
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    sock = open_socket()
    whole = Block(0, TOKENS, 0, LAYERS)
    sock.sendall(frame(target, whole, room, epoch, value=9) + frame(target, whole))
    receiver.commit(whole.cells * 64)
    assert settled(receiver) is TransferState.DONE
    assert (d.counters.discarded_frames, d.counters.discarded_bytes) == (1, whole.cells * 64)
    assert bool((target.tokens(PAGES, 0, TOKENS).view(torch.uint8) == 3).all())


def test_a_room_takes_data_from_its_own_peer_only(d, target, open_socket) -> None:
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    open_socket("Q").sendall(frame(target, Block(0, TOKENS, 0, LAYERS)))
    wait_until(lambda: d.counters.discarded_bytes > 0, "the frame to be discarded")
    assert receiver.bytes_received == 0
    assert bool((target.buffer == -1.0).all())


def test_a_finished_room_takes_nothing_more(d, target, open_socket) -> None:
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    sock = open_socket()
    whole = Block(0, TOKENS, 0, LAYERS)
    sock.sendall(frame(target, whole))
    receiver.commit(whole.cells * 64)
    assert settled(receiver) is TransferState.DONE
    sock.sendall(frame(target, whole, value=9))
    wait_until(lambda: d.counters.discarded_bytes == whole.cells * 64, "the repeated frame")
    assert bool((target.tokens(PAGES, 0, TOKENS).view(torch.uint8) == 3).all())


@pytest.mark.usefixtures("unstarved")
def test_repeated_ranges_are_counted_once(d, target, open_socket, monkeypatch) -> None:
    monkeypatch.setattr(counted_receiver, "LEASE_SECONDS", 0.2)
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    sock = open_socket()
    half = Block(0, TOKENS // 2, 0, LAYERS)
    overlapping = Block(3, 7, 1, 2)
    sock.sendall(frame(target, half) * 2 + frame(target, overlapping))
    wait_until(lambda: d.counters.discarded_frames == 2, "the repeats to be discarded")
    assert d.counters.duplicate_frames == 2
    assert receiver.bytes_received == half.cells * 64
    receiver.commit(2 * half.cells * 64)
    assert receiver.poll() is TransferState.ACTIVE
    assert settled(receiver) is TransferState.FAILED
    assert f"{half.cells * 64} of {2 * half.cells * 64} KV bytes did not arrive" in str(
        receiver.error
    )


def test_an_abort_in_the_middle_of_a_frame_keeps_the_rest_out(p, d, target, open_socket) -> None:
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    sock = open_socket()
    data = frame(target, Block(0, TOKENS, 0, LAYERS))
    middle = HEADER.size + (len(data) - HEADER.size) // 2
    sock.sendall(data[:middle])
    last_row = target.buffer[LAYERS // 2, 0, 3].view(torch.uint8)
    wait_until(lambda: bool((last_row == 3).all()), "the first half to land")
    receiver.abort()
    wait_until(receiver.drained, "the receiver to drain")
    target.buffer.fill_(5.0)
    sock.sendall(data[middle:] + frame(target, Block(0, TOKENS, 0, LAYERS), epoch=2))
    again = d.receiver("P", b"s" * 16, 3, PAGES, (0,), TOKENS)
    wait_until(lambda: d.counters.discarded_frames == 1, "the next frame")
    assert bool((target.buffer == 5.0).all())
    # The connection carries on with the next room.
    sock.sendall(frame(target, Block(0, TOKENS, 0, LAYERS), b"s" * 16, 3, value=6))
    again.commit(TOKENS * LAYERS * 64)
    assert settled(again) is TransferState.DONE


def test_a_room_and_epoch_has_one_receiver(d) -> None:
    d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    with pytest.raises(TransferError, match="a receiver of this room and epoch exists"):
        d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)


# ---- lost and stuck connections


@pytest.fixture
def relayed(d, target) -> Iterator:
    """A sender node whose connections go through a relay; one connection."""
    relay = Relay(int(d.address()["port"]))
    source = make_pool(40_000, 4, layers=LAYERS)
    manager = TcpManager(source, "P", connections=1)
    info = node_info("D", "decode", d, target)
    manager.connect(msgspec.structs.replace(info, transfers={"tcp": relay.address()}))
    yield relay, manager
    relay.close()
    manager.close()


def test_a_cut_connection_fails_its_rooms_and_later_ones_reconnect(relayed, d, target) -> None:
    relay, p = relayed
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
    idle = p.sender("D", reservation(receiver, b"i" * 16, 2, 0), PAGES, TOKENS)
    sender.send(0, 4, 0, LAYERS)
    wait_until(lambda: receiver.bytes_received > 0, "the first half")
    relay.cut()
    assert settled(receiver) is TransferState.FAILED
    assert "a data connection from node P was lost" in str(receiver.error)
    assert receiver.drained()
    sender.send(4, 8, 0, LAYERS)
    assert settled(sender) is TransferState.FAILED
    assert "the data connection to node D was lost" in str(sender.error)
    wait_until(sender.drained, "the sender to drain")
    # It had nothing on the connection, so it lives on; and new rooms find a new connection.
    assert idle.poll() is TransferState.ACTIVE
    transfer_works(p, d, target)
    assert relay.connections == 2


def test_what_was_complete_survives_the_end_of_its_connection(relayed, d) -> None:
    relay, p = relayed
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
    sender.send(0, TOKENS, 0, LAYERS)
    sender.finish()
    assert settled(sender) is TransferState.DONE
    wait_until(lambda: receiver.bytes_received == sender.bytes_sent, "all bytes")
    relay.cut()
    receiver.commit(sender.bytes_sent)
    assert settled(receiver) is TransferState.DONE


@pytest.mark.usefixtures("unstarved")
def test_a_stuck_connection_fails_its_rooms_after_a_lease(relayed, d, target, monkeypatch) -> None:
    for module in (rooms_sender, tcp_lane):
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.5)
    relay, p = relayed
    transfer_works(p, d, target)
    relay.stall()
    pages = np.arange(10_000, dtype=np.int32)
    receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
    # More than kernel buffers take, so the second room waits behind the first.
    senders = [
        p.sender("D", reservation(receiver, ROOM, epoch, 0), pages, 40_000) for epoch in (1, 2)
    ]
    for sender in senders:
        for _ in range(8):
            sender.send(0, 40_000, 0, LAYERS)
    for sender in senders:
        assert settled(sender) is TransferState.FAILED
        assert "D" in str(sender.error)
        wait_until(sender.drained, "the sender to drain")
    relay.resume()
    transfer_works(p, d, target, epoch=100)


def test_a_lost_connection_gives_back_what_was_copied_ahead(d, target, monkeypatch) -> None:
    """Before the next connection is made, which may take long."""
    relay = Relay(int(d.address()["port"]))
    p = TcpManager(make_pool(40_000, 4, layers=LAYERS), "P", connections=1, staged=True)
    info = node_info("D", "decode", d, target)
    p.connect(msgspec.structs.replace(info, transfers={"tcp": relay.address()}))
    answered = threading.Event()
    try:
        transfer_works(p, d, target)
        relay.stall()
        receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
        pages = np.arange(10_000, dtype=np.int32)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 0), pages, 40_000)
        for _ in range(8):  # more than kernel buffers take
            sender.send(0, 40_000, 0, LAYERS)
        wait_until(lambda: sender.sending == tcp_staging.DEPTH, "a block on the way, one behind it")
        monkeypatch.setattr(dialler, "greet_peer", lambda *_: answered.wait(60))
        relay.cut()
        assert settled(sender) is TransferState.FAILED
        wait_until(sender.drained, "the sender to drain")
        p.disconnect("D")
    finally:
        answered.set()
        relay.close()
        p.close()


@pytest.mark.parametrize(
    ("listening", "complaint"),
    [(True, "no KV data could be sent to node D"), (False, "nobody listens at its address")],
)
@pytest.mark.usefixtures("unstarved")
def test_an_unreachable_peer_fails_its_rooms(d, target, monkeypatch, listening, complaint) -> None:
    """After a lease when it does not answer, at once when its port is closed."""
    monkeypatch.setattr(rooms_sender, "LEASE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as stack:
        address = {"host": "127.0.0.1", "port": str(silent.getsockname()[1])}
        if not listening:
            silent.close()
        p = TcpManager(make_pool(64, 4, layers=LAYERS), "P")
        stack.callback(p.close)
        info = node_info("D", "decode", d, target)
        p.connect(msgspec.structs.replace(info, transfers={"tcp": address}))
        receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
        sender.send(0, TOKENS, 0, LAYERS)
        assert settled(sender) is TransferState.FAILED
        assert complaint in str(sender.error)
        assert sender.drained()


@pytest.mark.usefixtures("unstarved")
def test_a_slow_connection_is_not_a_stuck_one(monkeypatch) -> None:
    """Back-pressure: rooms wait as long as anything moves, longer than a lease in all."""
    for module in (rooms_sender, tcp_lane):
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.5)
    source = make_pool(20_000, 4, layers=LAYERS)
    target = make_pool(20_000, 4, layers=LAYERS, fill=0.0)
    d, p = TcpManager(target, "D"), TcpManager(source, "P", connections=1)
    relay = Relay(int(d.address()["port"]), pause=0.02)
    try:
        info = node_info("D", "decode", d, target)
        p.connect(msgspec.structs.replace(info, transfers={"tcp": relay.address()}))
        rooms = []
        for epoch, pages in enumerate(np.arange(5000, dtype=np.int32).reshape(2, -1)):
            receiver = d.receiver("P", ROOM, epoch, pages, (0,), 10_000)
            sender = p.sender("D", reservation(receiver, ROOM, epoch, 0), pages, 10_000)
            sender.send(0, 10_000, 0, LAYERS)
            rooms.append((sender, receiver))
        for sender, receiver in rooms:
            hand_off(sender, receiver)
        assert torch.equal(target.buffer, source.buffer)
    finally:
        relay.close()
        p.close()
        d.close()


# ---- variants


@pytest.mark.parametrize("connections", [1, 2, 4])
@pytest.mark.parametrize("staged", [False, True])
def test_connections_and_staging_do_not_change_the_bytes(connections, staged, monkeypatch) -> None:
    monkeypatch.setattr(tcp_sender, "FRAME_BYTES", 4096)
    rng = random.Random(SEED)
    source, target = make_pool(600, 2), make_pool(600, 4, fill=-1.0)
    p = TcpManager(source, "P", connections=connections, staged=staged)
    d = TcpManager(target, "D", staged=staged)
    try:
        introduce(p, "P", d, "D", source)
        pages, into = random_pages(rng, source, 500), random_pages(rng, target, 500)
        receiver = d.receiver("P", ROOM, 1, into, (7,), 500)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 7), pages, 500)
        sender.send(7, 300, 0, LAYERS)
        sender.send(300, 500, 0, LAYERS)
        hand_off(sender, receiver)
        assert torch.equal(target.tokens(into, 7, 500), source.tokens(pages, 7, 500))
    finally:
        p.close()
        d.close()
