"""The tcp backend when copies between host buffers and the pool take their time, or fail."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from transfer_helpers import (
    hand_off,
    introduce,
    make_pool,
    reservation,
    settled,
    wait_until,
    watch_limit,
)

from pd.transfer.base import TransferState
from pd.transfer.copier import HostCopier
from pd.transfer.tcp import host_buffers as tcp_staging
from pd.transfer.tcp import sender as tcp_sender
from pd.transfer.tcp.manager import TcpManager

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM = b"r" * 16
PAGES = np.arange(2, dtype=np.int32)
TOKENS = 8
LAYERS = 3


@pytest.fixture
def target():
    return make_pool(64, 4, layers=LAYERS, fill=-1.0)


class GatedCopier(HostCopier):
    """Copies at once, but lets nobody see the end before the gate is opened."""

    gate: threading.Event

    def gather_block(self, table, block, slot):
        super().gather_block(table, block, slot)
        return GatedTicket(self.gate)

    def scatter_block(self, table, block, slot):
        super().scatter_block(table, block, slot)
        return GatedTicket(self.gate)


class GatedTicket:
    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def wait(self) -> None:
        assert self._gate.wait(20.0)


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Managers made after this, with ``staged``, have copies that end when it is set."""
    gate = threading.Event()
    monkeypatch.setattr(GatedCopier, "gate", gate, raising=False)
    monkeypatch.setattr(tcp_staging, "copier_for", GatedCopier)
    monkeypatch.setattr(tcp_sender, "FRAME_BYTES", 256)
    return gate


@contextlib.contextmanager
def pair(
    target, *, p_staged: bool, d_staged: bool, connections: int = 1
) -> Iterator[tuple[TcpManager, TcpManager]]:
    source = make_pool(64, 4, layers=LAYERS)
    p = TcpManager(source, "P", connections=connections, staged=p_staged)
    d = TcpManager(target, "D", staged=d_staged)
    try:
        introduce(p, "P", d, "D", target)
        yield p, d
    finally:
        p.close()
        d.close()


def test_staged_bytes_count_when_the_copy_into_the_pool_is_over(gate, target) -> None:
    """Six frames, two buffers: the connection waits for a buffer and goes on when there is one."""
    with pair(target, p_staged=False, d_staged=True) as (p, d):
        receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
        sender.send(0, TOKENS, 0, LAYERS)
        sender.finish()
        assert settled(sender) is TransferState.DONE
        wait_until(lambda: d.counters.frames == 2, "both buffers to be full")
        receiver.commit(sender.bytes_sent)
        assert receiver.poll() is TransferState.ACTIVE
        assert receiver.bytes_received == 0
        gate.set()
        assert settled(receiver) is TransferState.DONE
        assert receiver.drained()
        wait_until(lambda: d.counters.frames == 6, "the last frame to be counted")


def test_a_paused_connection_that_cannot_be_watched_again_ends_and_the_next_one_is_read(
    gate, target
) -> None:
    with pair(target, p_staged=False, d_staged=True) as (p, d):
        receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
        sender.send(0, TOKENS, 0, LAYERS)
        connections = d._inbox._connections
        wait_until(lambda: any(c.paused for c in list(connections.values())), "a pause")
        watch_limit(d._inbox._selector, lambda data: data in connections.values())
        gate.set()
        assert settled(receiver) is TransferState.FAILED
        assert "No space left on device" in str(receiver.error)
        sender.abort()
        wait_until(lambda: not connections, "the connection to end")
        transfer_works(p, d, target)


def test_an_aborted_room_is_not_drained_while_a_copy_into_its_pages_is_under_way(
    gate, target
) -> None:
    with pair(target, p_staged=False, d_staged=True) as (p, d):
        receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
        sender.send(0, TOKENS, 0, LAYERS)
        wait_until(lambda: d.counters.frames == 2, "both buffers to be full")
        receiver.abort()
        assert not receiver.drained()
        gate.set()
        wait_until(receiver.drained, "the receiver to drain")
        assert receiver.bytes_received == 2 * 256
        # The connection was paused; it discards the rest and carries the next room.
        transfer_works(p, d, target)
        assert d.counters.discarded_frames + d.counters.frames >= 6


def test_source_pages_are_in_hand_until_the_copy_out_of_them_is_over(gate, target) -> None:
    with pair(target, p_staged=True, d_staged=False) as (p, d):
        receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
        sender.send(0, TOKENS, 0, LAYERS)
        wait_until(lambda: sender.reading == 2, "both buffers to be filled")
        sender.abort()
        assert not sender.drained()
        gate.set()
        wait_until(sender.drained, "the sender to drain")
        assert receiver.bytes_received == 0
        receiver.abort()
        transfer_works(p, d, target)


def test_a_copy_out_of_the_pool_that_fails_ends_its_room_only(target, monkeypatch, caplog) -> None:
    class Failing(HostCopier):
        fails = True

        def gather_block(self, table, block, slot):
            if Failing.fails:
                raise RuntimeError("an illegal memory access was encountered")
            return super().gather_block(table, block, slot)

    monkeypatch.setattr(tcp_staging, "copier_for", Failing)
    with pair(target, p_staged=True, d_staged=False) as (p, d):
        receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
        sender.send(0, TOKENS, 0, LAYERS)
        assert settled(sender) is TransferState.FAILED
        assert "cannot read the pool: an illegal memory access" in str(sender.error)
        wait_until(sender.drained, "the sender to drain")
        Failing.fails = False
        receiver.abort()
        transfer_works(p, d, target)


def test_the_sending_sides_disconnect_does_not_wait_for_copies_but_their_pages_do(
    gate, target
) -> None:
    with pair(target, p_staged=True, d_staged=False) as (p, d):
        receiver = d.receiver("P", ROOM, 1, PAGES, (0,), TOKENS)
        sender = p.sender("D", reservation(receiver, ROOM, 1, 0), PAGES, TOKENS)
        sender.send(0, TOKENS, 0, LAYERS)
        wait_until(lambda: sender.reading, "a copy to begin")
        returns(lambda: p.disconnect("D"))
        assert sender.poll() is TransferState.FAILED
        assert not sender.drained(), "a copy is under way"
        gate.set()
        wait_until(sender.drained, "the copies to end")


def test_the_receiving_sides_disconnect_does_not_wait_for_copies_but_their_pages_do(target) -> None:
    with pair(target, p_staged=False, d_staged=True) as (_, d):
        receivers = [d.receiver("P", ROOM, epoch, PAGES, (0,), TOKENS) for epoch in range(10)]
        assert all(receiver.enter_pages() for receiver in receivers)
        returns(lambda: d.disconnect("P"))
        assert all(receiver.poll() is TransferState.FAILED for receiver in receivers)
        assert not any(receiver.drained() for receiver in receivers), "copies are under way"
        for receiver in receivers:
            receiver.leave_pages(0)
        assert all(receiver.drained() for receiver in receivers)


def returns(call) -> None:
    """Before what it might wait for has ended, and well before that of ten rooms, a second each."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive(), "the caller holds the node's lock"


class LackingCopier(HostCopier):
    """Has no memory for the buffers of a link's lanes with these names."""

    lacking: tuple[str, ...] = ()

    def make_buffers(self, *args, **kwargs):
        if threading.current_thread().name in LackingCopier.lacking:
            raise RuntimeError("out of memory")
        return super().make_buffers(*args, **kwargs)


@pytest.fixture
def lacking(monkeypatch) -> type[LackingCopier]:
    monkeypatch.setattr(LackingCopier, "lacking", ("pd-tcp-lane-0",))
    monkeypatch.setattr(tcp_staging, "copier_for", LackingCopier)
    return LackingCopier


def test_no_memory_for_buffers_ends_rooms_for_as_long_as_there_is_none(target, lacking) -> None:
    with pair(target, p_staged=True, d_staged=False) as (p, d):
        for epoch in (1, 2):
            receiver = d.receiver("P", ROOM, epoch, PAGES, (0,), TOKENS)
            sender = p.sender("D", reservation(receiver, ROOM, epoch, 0), PAGES, TOKENS)
            sender.send(0, TOKENS, 0, LAYERS)
            assert settled(sender) is TransferState.FAILED
            assert "cannot stage KV in host memory: out of memory" in str(sender.error)
            receiver.abort()
        lacking.lacking = ()
        transfer_works(p, d, target)


def test_connections_with_buffers_carry_what_those_without_cannot(target, lacking) -> None:
    lacking.lacking = ("pd-tcp-lane-0", "pd-tcp-lane-2")
    with pair(target, p_staged=True, d_staged=False, connections=3) as (p, d):
        lanes = p._links["D"]._lanes
        wait_until(lambda: lanes[1].can_read, "the buffers")
        for epoch in range(20):
            transfer_works(p, d, target, epoch)
        assert [lane.can_read for lane in lanes] == [False, True, False]


def transfer_works(p: TcpManager, d: TcpManager, target, epoch: int = 99) -> None:
    """A good room, after whatever happened."""
    pages = np.array([14, 15], dtype=np.int32)
    receiver = d.receiver("P", b"good" * 4, epoch, pages, (0,), TOKENS)
    sender = p.sender("D", reservation(receiver, b"good" * 4, epoch, 0), PAGES, TOKENS)
    sender.send(0, TOKENS, 0, LAYERS)
    hand_off(sender, receiver)
    assert bool((target.tokens(pages, 0, TOKENS) != -1.0).all())
