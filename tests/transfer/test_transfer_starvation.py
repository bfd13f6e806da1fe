"""Limits on progress wait on for ends that got no CPU, and for no others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from held_mover import HeldPath
from patience import FakePatience
from relay import Relay
from transfer_helpers import (
    introduce,
    make_pool,
    node_info,
    reservation,
    settled,
    wait_until,
)

from pd.core.messages import Reservation
from pd.transfer.base import TransferState
from pd.transfer.common import receiver as counted_receiver
from pd.transfer.common import sender as rooms_sender
from pd.transfer.fake import link as fake_link
from pd.transfer.fake import nic as fake_nic
from pd.transfer.fake.link import FakeLink
from pd.transfer.fake.manager import FakeManager
from pd.transfer.fake.script import FaultScript
from pd.transfer.nvlink import link as nvlink_link
from pd.transfer.nvlink import sender as nvlink_sender
from pd.transfer.pool_shape import MissingTokens, PlaneShape, PoolShape
from pd.transfer.staged.messages import decoder
from pd.transfer.tcp import lane as tcp_lane
from pd.transfer.tcp.manager import TcpManager
from pd.transfer.wire import acceptor
from pd.transfer.wire.greeting import greet_peer
from pd.transfer.wire.hub import ChannelHub

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM = b"r" * 16
LIMIT = 0.2
# So long that a limit which does not wait for starved ends would be noticed.
LONG = 4 * LIMIT


def stays_active(end, patience: FakePatience) -> None:
    """Though the limit was reached, until neither end lacks a CPU."""
    wait_until(lambda: end.poll() is not TransferState.ACTIVE or patience.asked, "the limit")
    time.sleep(LONG)
    assert end.poll() is TransferState.ACTIVE, end.error
    patience.starved = False
    assert settled(end) is TransferState.FAILED


@pytest.fixture
def stuck_tcp(monkeypatch) -> Iterator[tuple[TcpManager, TcpManager, Relay]]:
    """P, D and the wire between them, on which nothing passes any more."""
    for module in (rooms_sender, tcp_lane, counted_receiver):
        monkeypatch.setattr(module, "LEASE_SECONDS", LIMIT)
    source = make_pool(40_000, 4)
    p = TcpManager(source, "P", connections=1, patience=FakePatience())
    d = TcpManager(make_pool(64, 4), "D", patience=FakePatience())
    relay = Relay(int(d.address()["port"]))
    info = node_info("D", "decode", d, source)
    p.connect(msgspec.structs.replace(info, transfers={"tcp": relay.address()}))
    wait_until(lambda: d.counters.connections == 1, "the connection")
    relay.stall()
    yield p, d, relay
    relay.close()
    p.close()
    d.close()


def test_tcp_waits_for_a_starved_peer_to_take_data(stuck_tcp) -> None:
    """On the socket, and behind another room."""
    p, d, _ = stuck_tcp
    receiver = d.receiver("P", ROOM, 1, np.arange(2, dtype=np.int32), (0,), 8)
    pages = np.arange(10_000, dtype=np.int32)
    senders = [
        p.sender("D", reservation(receiver, ROOM, epoch, 0), pages, 40_000) for epoch in (1, 2)
    ]
    for sender in senders:
        for _ in range(8):  # more than kernel buffers take
            sender.send(0, 40_000, 0, 3)
    stays_active(senders[0], p.patience)
    assert settled(senders[1]) is TransferState.FAILED
    assert p.patience.asked == {(LIMIT, "D")}


def test_a_receiver_waits_for_what_a_starved_peer_committed(stuck_tcp) -> None:
    _, d, _ = stuck_tcp
    receiver = d.receiver("P", ROOM, 1, np.arange(2, dtype=np.int32), (0,), 8)
    receiver.commit(8 * 3 * 64)
    stays_active(receiver, d.patience)
    assert "did not arrive within" in str(receiver.error)
    assert d.patience.asked == {(LIMIT, "P")}


def test_a_staged_link_waits_for_a_starved_peer_to_free_slots(pair, monkeypatch) -> None:
    monkeypatch.setattr(rooms_sender, "LEASE_SECONDS", LIMIT)
    patience = FakePatience()
    nodes = pair(patience=patience)
    nodes.introduce()
    nodes.transfer()
    nodes.out.held = True
    sender, receiver, _ = nodes.room()
    sender.send(0, 64, 0, 3)
    stays_active(sender, patience)
    assert "no KV data could be sent to node D" in str(sender.error)
    assert patience.asked == {(LIMIT, "D")}
    receiver.abort()


def test_a_link_is_given_up_before_a_library_that_knows_nothing_of_starvation_does(
    pair, monkeypatch
) -> None:
    monkeypatch.setattr(HeldPath, "stall_seconds", LIMIT)
    patience = FakePatience()
    nodes = pair(patience=patience)
    nodes.introduce()
    nodes.transfer()
    nodes.out.held = True
    sender, receiver, _ = nodes.room()
    sender.send(0, 64, 0, 3)
    wait_until(lambda: patience.asked, "the limit")
    time.sleep(LONG)
    assert sender.poll() is TransferState.ACTIVE
    patience.starved = False
    assert settled(sender) is TransferState.FAILED
    assert "the link to D was lost: nothing was written for" in str(sender.error)
    assert nodes.p.quarantined_buffers > 0, "the library may still write"
    receiver.abort()
    patience.starved = True
    nodes.out.held = False
    nodes.transfer()
    wait_until(lambda: nodes.p.quarantined_buffers == 0, "the library's word")


def test_nvlink_waits_for_a_starved_peer_to_open_its_channel(monkeypatch) -> None:
    monkeypatch.setattr(rooms_sender, "LEASE_SECONDS", LIMIT)
    patience, hub = FakePatience(), Silent()
    hub.patience = patience
    link = nvlink_link.NvlinkLink(hub, "D", hub.pool, Computed())
    try:
        first = Reservation(to="P", sender="D", room=ROOM, epoch=1, cached=(0,))
        shape, tokens = PoolShape(1, 1, (PlaneShape(0, range(1), 64),)), MissingTokens((0,), 1)
        slots = np.zeros((2, 1), np.int32)
        sender = nvlink_sender.NvlinkSender(link, shape, first, tokens, 1, slots)
        link.add_sender(sender)
        sender.send(0, 1, 0, 1)
        stays_active(sender, patience)
        assert patience.asked == {(LIMIT, "D")}
    finally:
        link.stop(nvlink_link.TransferError("the test is over"))


class Computed:
    """A device on which everything is computed."""

    def when_computed(self, call) -> None:
        call("")


class Silent:
    """A hub that reaches nobody."""

    class pool:
        address = ("", 0)

    def dial_peer(self, *_):
        return self

    def cancel(self) -> None:
        pass


@pytest.fixture
def no_answer() -> Iterator[tuple[str, int]]:
    """Address of a node whose kernel accepts connections and which does nothing with them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@contextlib.contextmanager
def waits_in_a_thread(call) -> Iterator[threading.Thread]:
    """It still does after a long time, and ends with OSError once no end lacks a CPU."""
    ended: list[bool] = []

    def run() -> None:
        with pytest.raises(OSError):
            call()
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(LONG)
    assert thread.is_alive()
    yield thread
    thread.join(10.0)
    assert ended


def test_a_greeting_waits_for_a_starved_peer(no_answer) -> None:
    patience = FakePatience()
    with socket.create_connection(no_answer, timeout=LIMIT) as sock:
        with waits_in_a_thread(lambda: greet_peer(sock, "test", "P", "D", None, patience)):
            patience.starved = False
        assert patience.asked == {(LIMIT, "D")}


def test_a_fake_link_waits_for_a_starved_peer_to_take_data(monkeypatch) -> None:
    monkeypatch.setattr(fake_link, "LEASE_SECONDS", LIMIT)
    patience = FakePatience()
    link = FakeLink("P", "D", ("127.0.0.1", 1), None, FaultScript(), patience)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(LIMIT / 4)
        with waits_in_a_thread(lambda: link._send_all(ours, bytes(64 << 20))):
            patience.starved = False
    link.close("the test is over")
    assert patience.asked == {(LIMIT, "D")}


def hub_with(patience: FakePatience) -> ChannelHub:
    return ChannelHub("test", "D", "127.0.0.1", None, decoder, lambda _: None, patience)


@pytest.mark.parametrize("backend", ["tcp", "channels", "fake"])
def test_connections_of_starved_peers_may_be_late_to_introduce_themselves(
    backend: str, monkeypatch
) -> None:
    """Nobody knows whose they are, so any peer's delay counts."""
    patience = FakePatience()
    monkeypatch.setattr(acceptor, "GREETING_SECONDS", LIMIT)
    monkeypatch.setattr(fake_nic, "_GREETING_SECONDS", LIMIT)
    pool = make_pool(64, 4)
    if backend == "channels":
        listening = hub_with(patience)
        port = listening.port
    else:
        listening = {"tcp": TcpManager, "fake": FakeManager}[backend](pool, "D", patience=patience)
        port = int(listening.address()["port"])
    try:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.settimeout(10.0)
            wait_until(lambda: patience.asked, "the limit")
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
            sock.settimeout(10.0)
            patience.starved = False
            assert sock.recv(1) == b""
        assert patience.asked == {(LIMIT, None)}
    finally:
        listening.close()


def test_choices_of_backends_share_one_patience() -> None:
    from pd.transfer.chooser import ChoosingManager

    patience = FakePatience()
    pool = make_pool(64, 4)
    both = [TcpManager(pool, "P", patience=patience), FakeManager(pool, "P", patience=patience)]
    chosen = ChoosingManager(both)
    assert chosen.patience is patience
    chosen.close()


def test_a_starved_pair_over_fake_completes() -> None:
    """The slices in which a link waits change nothing about what arrives."""
    source, target = make_pool(64, 4), make_pool(64, 4, fill=-1.0)
    p, d = FakeManager(source, "P"), FakeManager(target, "D")
    introduce(p, "P", d, "D", source)
    pages = np.arange(4, dtype=np.int32)
    receiver = d.receiver("P", ROOM, 1, pages, (0,), 16)
    sender = p.sender("D", reservation(receiver, ROOM, 1, 0), pages, 16)
    sender.send(0, 16, 0, 3)
    sender.finish()
    assert settled(sender) is TransferState.DONE
    time.sleep(2 * fake_link._SLICE_SECONDS)
    again = p.sender("D", reservation(receiver, ROOM, 1, 0), pages, 16)
    again.send(0, 16, 0, 3)
    again.finish()
    assert settled(again) is TransferState.DONE
    p.close()
    d.close()
