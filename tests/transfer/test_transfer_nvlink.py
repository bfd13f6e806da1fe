"""The nvlink backend's protocol, with shared memory for GPUs."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from nvlink_shm import ShmDevice, ShmTicket, shm_pool
from transfer_helpers import (
    SEED,
    Pool,
    hand_off,
    make_pool,
    random_pages,
    reservation,
    settled,
    wait_until,
)

from pd.core.errors import SetupError, TransferError, UsageError
from pd.core.node_info import KVLayout, NodeInfo
from pd.transfer.base import TransferState
from pd.transfer.common import sender as rooms_sender
from pd.transfer.nvlink import launched
from pd.transfer.nvlink import sessions as nvlink_sessions
from pd.transfer.nvlink.manager import NvlinkManager
from pd.transfer.nvlink.messages import NvlinkDestination
from pd.transfer.nvlink.sender import NvlinkSender

if TYPE_CHECKING:
    from pd.transfer.kv_buffer import IntArray

ROOM = bytes(16)


class Node:
    """One side: pool, device, manager."""

    def __init__(self, instance: str, role: str, page_size: int, slots: int, **layout) -> None:
        fields = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 4, "dtype": "float32"}
        self.layout = KVLayout.of_model(**(fields | layout), page_size=page_size)
        self.pool, self.path = shm_pool(self.layout, slots)
        self.device = ShmDevice(self.pool, self.path, f"GPU-{role == 'decode':d}")
        self.manager = NvlinkManager(self.pool, instance, device=self.device)
        self.instance, self.role = instance, role

    def info(self, **changes: str) -> NodeInfo:
        address = self.manager.address() | changes
        return NodeInfo(
            instance_id=self.instance,
            role=self.role,  # type: ignore[arg-type]
            model_id="m",
            kv=self.layout,
            endpoint="",
            bootstrap="",
            transfers={"nvlink": address},
        )

    def close(self) -> None:
        self.manager.close()
        self.path.unlink()


class Pair:
    def __init__(self) -> None:
        print(f"seed {SEED}")
        self.rng = random.Random(SEED)
        self.p = Node("P", "prefill", 4, 160)
        self.d = Node("D", "decode", 16, 320)
        generator = torch.Generator().manual_seed(SEED)
        self.p.pool.buffer.copy_(torch.rand(self.p.pool.buffer.shape, generator=generator))
        self.introduce()
        self._epoch = 0
        self._deck: list[int] = []

    def deal(self, tokens: int) -> IntArray:
        """Pages of D; those of consecutive rooms differ."""
        count = -(-tokens // 16)
        if len(self._deck) < count:
            self._deck = self.rng.sample(range(20), 20)
        dealt, self._deck = self._deck[:count], self._deck[count:]
        return np.array(dealt, dtype=np.int32)

    def introduce(self) -> None:
        self.p.manager.connect(self.d.info())
        self.d.manager.connect(self.p.info())

    def room(self, tokens: int = 50, cached: int = 0) -> Room:
        self._epoch += 1
        return Room(self, tokens, cached, self._epoch)

    def close(self) -> None:
        self.p.device.flows.set()
        self.p.device.computed.set()
        self.p.close()
        self.d.close()


class Room:
    """A reservation, and a sender for it."""

    def __init__(self, pair: Pair, tokens: int, cached: int, epoch: int) -> None:
        p, d = pair.p, pair.d
        self.tokens, self.cached, self._pair = tokens, cached, pair
        self.own = random_pages(pair.rng, p.pool, tokens)
        self.theirs = pair.deal(tokens)
        self.receiver = d.manager.receiver("P", ROOM, epoch, self.theirs, (cached,), tokens)
        self.reservation = reservation(self.receiver, ROOM, epoch, cached)

    def open(self):
        manager = self._pair.p.manager
        self.sender = manager.sender("D", self.reservation, self.own, self.tokens)
        return self.sender

    def send_all(self) -> None:
        self.open().send(self.cached, self.tokens, 0, 3)

    def arrived(self) -> bool:
        span = self.cached, self.tokens
        theirs = self._pair.d.pool.tokens(self.theirs, *span)
        return torch.equal(theirs, self._pair.p.pool.tokens(self.own, *span))


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def test_rooms_arrive_between_pools_of_different_pages(pair: Pair) -> None:
    for tokens, cached in ((1, 0), (50, 0), (50, 17), (64, 48), (33, 33)):
        room = pair.room(tokens, cached)
        before = pair.d.pool.buffer.clone()
        sender = room.open()
        middle = (cached + tokens) // 2
        for start, stop in ((cached, middle), (middle, tokens)):
            for layer in range(3):
                sender.send(start, stop, layer, layer + 1)
        hand_off(sender, room.receiver)
        assert room.arrived()
        assert sender.bytes_sent == (tokens - cached) * pair.p.layout.token_bytes
        assert sender.drained() and room.receiver.drained()
        pair.d.pool.buffer[:, :, _slots(room)] = before[:, :, _slots(room)]
        assert torch.equal(pair.d.pool.buffer, before), "something landed elsewhere"


def _slots(room: Room) -> list[int]:
    return [int(room.theirs[t // 16]) * 16 + t % 16 for t in range(room.cached, room.tokens)]


def test_a_sender_is_done_only_when_the_last_store_was_observed(pair: Pair) -> None:
    pair.p.device.flows.clear()
    room = pair.room()
    room.send_all()
    room.sender.finish()
    wait_until(lambda: pair.p.device.launched == 1, "the launch")
    assert room.sender.poll() is TransferState.ACTIVE
    assert not room.arrived()
    pair.p.device.flows.set()
    assert settled(room.sender) is TransferState.DONE
    assert room.arrived()


def test_a_store_waits_for_the_forward_pass_and_keeps_no_other_waiting(pair: Pair) -> None:
    computed, late_computed = pair.p.device.computed, threading.Event()
    pair.p.device.computed = late_computed
    late, room = pair.room(), pair.room()
    late.send_all()
    late.sender.finish()
    pair.p.device.computed = computed
    room.send_all()
    hand_off(room.sender, room.receiver)
    assert room.arrived()
    assert late.sender.poll() is TransferState.ACTIVE
    assert pair.p.device.launched == 1
    pair.p.pool.buffer += 1
    late_computed.set()
    hand_off(late.sender, late.receiver)
    assert late.arrived()


def test_a_mapping_does_not_outlive_its_link_until_a_step_ends(pair: Pair) -> None:
    pair.p.device.computed.clear()
    room = pair.room()
    room.send_all()
    wait_until(lambda: pair.p.device.mapped == 1, "the mapping")
    pair.p.manager.disconnect("D")
    wait_until(lambda: pair.p.device.mapped == 0, "the end of the mapping")
    assert settled(room.sender) is TransferState.FAILED
    assert room.sender.drained()
    pair.p.device.computed.set()
    time.sleep(0.05)
    assert pair.p.device.launched == 0


def test_what_a_link_does_is_learned_from_its_stores(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only from those of some size, and the best counts: others had to share the link."""
    size = 50 * pair.p.layout.token_bytes
    monkeypatch.setattr(launched, "_TIMED_BYTES", size)

    def transfer(tokens: int, delay: float) -> float:
        """Operations that hide a byte, as the next room sees it."""
        pair.p.device.delay = delay
        room = pair.room(tokens)
        room.send_all()
        hand_off(room.sender, room.receiver)
        pair.room(1).send_all()  # looks at what is complete
        return float(pair.room(1).open().flops_per_byte)

    assert transfer(49, 0.0) == 0.0
    slow = transfer(50, 0.1)
    assert slow > 1e15 * 0.1 / size
    fast = transfer(50, 0.01)
    assert 1e15 * 0.01 / size < fast < slow
    assert transfer(50, 0.1) == fast


def test_after_an_abort_what_was_launched_completes_and_nothing_more_is(pair: Pair) -> None:
    pair.p.device.flows.clear()
    room = pair.room()
    sender = room.open()
    sender.send(0, 50, 0, 1)
    wait_until(lambda: pair.p.device.launched == 1, "the launch")
    sender.abort()
    room.receiver.abort()
    sender.send(0, 50, 1, 3)
    assert not sender.drained() and not room.receiver.drained()
    pair.p.device.flows.set()
    wait_until(sender.drained, "the drain")
    assert pair.p.device.launched == 1
    assert torch.equal(
        pair.d.pool.tokens(room.theirs, 0, 50)[0], pair.p.pool.tokens(room.own, 0, 50)[0]
    )
    assert not room.receiver.drained()
    room.receiver.on_peer_drained()
    assert room.receiver.drained()
    assert sender.poll() is room.receiver.poll() is TransferState.FAILED


def test_few_stores_are_launched_ahead_since_they_cannot_be_called_back(pair: Pair) -> None:
    pair.p.device.flows.clear()
    room = pair.room()
    sender = room.open()
    for token in range(0, 50, 5):
        sender.send(token, token + 5, 0, 3)
    wait_until(lambda: pair.p.device.launched == launched.LAUNCHED_AHEAD, "the launches")
    time.sleep(0.05)
    sender.abort()
    pair.p.device.flows.set()
    wait_until(sender.drained, "the drain")
    assert pair.p.device.launched == launched.LAUNCHED_AHEAD


def test_an_abort_leaves_other_rooms_alone(pair: Pair) -> None:
    pair.p.device.delay = 0.02
    rooms = [pair.room(30) for _ in range(4)]
    for layer in range(3):
        for room in rooms:
            if not layer:
                room.open()
            room.sender.send(0, 30, layer, layer + 1)
    rooms[1].sender.abort()
    for room in rooms[:1] + rooms[2:]:
        hand_off(room.sender, room.receiver)
        assert room.arrived()
    wait_until(rooms[1].sender.drained, "the drain")


def test_a_commit_of_another_size_fails(pair: Pair) -> None:
    room = pair.room()
    room.open().send(0, 50, 0, 2)
    room.sender.finish()
    assert settled(room.sender) is TransferState.DONE
    room.receiver.commit(room.sender.bytes_sent)
    assert settled(room.receiver) is TransferState.FAILED
    assert "were reserved" in str(room.receiver.error)
    assert not room.receiver.drained()


def test_disconnect_on_d_quarantines_until_p_has_drained_and_unmapped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvlink_sessions, "LAST_WRITE_SECONDS", 0.05)
    pair.p.device.flows.clear()
    room = pair.room()
    room.send_all()
    wait_until(lambda: pair.p.device.launched == 1, "the launch")
    pair.d.manager.disconnect("P")
    assert settled(room.receiver) is TransferState.FAILED
    assert "disconnected" in str(room.receiver.error)
    assert settled(room.sender) is TransferState.FAILED
    assert "ended" in str(room.sender.error)
    assert not room.receiver.drained() and not room.sender.drained()
    assert pair.p.device.mapped == 1
    pair.p.device.flows.set()
    wait_until(room.receiver.drained, "the proof")
    assert room.sender.drained() and pair.p.device.mapped == 0
    pair.introduce()
    again = pair.room()
    again.send_all()
    hand_off(again.sender, again.receiver)
    assert again.arrived()


def test_a_session_without_a_channel_is_safe_at_once(pair: Pair) -> None:
    receiver = pair.d.manager.receiver("unseen", ROOM, 1, np.array([3], dtype=np.int32), (0,), 5)
    assert not receiver.drained()
    pair.d.manager.disconnect("unseen")
    assert receiver.poll() is TransferState.FAILED and receiver.drained()


def test_a_reservation_of_an_ended_session_is_not_stored(pair: Pair) -> None:
    room = pair.room()
    link = pair.p.manager._links["D"]
    wait_until(lambda: pair.p.device.mapped == 1, "the welcome")
    pair.d.manager.disconnect("P")
    wait_until(lambda: link.stopped is not None, "the end of the link")
    pair.introduce()
    launched = pair.p.device.launched
    # Before the new welcome or after it, the answer is the same.
    try:
        room.send_all()
        assert settled(room.sender) is TransferState.FAILED
        error = str(room.sender.error)
    except TransferError as refused:
        error = str(refused)
    assert "session that has ended" in error
    assert pair.p.device.launched == launched


def test_disconnect_on_p_drains_before_it_unmaps(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pd.transfer.nvlink.link")
    pair.room().open()  # nothing is sent of it yet
    pair.p.device.flows.clear()
    room = pair.room()
    room.send_all()
    wait_until(lambda: pair.p.device.launched == 1, "the launch")
    pair.p.manager.disconnect("D")
    assert settled(room.sender) is TransferState.FAILED
    assert not room.sender.drained() and pair.p.device.mapped == 1
    assert room.receiver.poll() is TransferState.ACTIVE, "the channel is still open"
    with pytest.raises(TransferError, match="D is not connected"):
        pair.room().open()
    wait_until(lambda: room.sender._last.waited, "the link to wait for the store")
    pair.p.device.flows.set()
    wait_until(lambda: pair.p.device.mapped == 0, "the mapping to be given up")
    wait_until(lambda: "1 transfers were under way, 1 stores" in caplog.text, "what was cut off")
    assert settled(room.receiver) is TransferState.FAILED
    assert room.sender.drained() and not room.receiver.drained(), "the process may have died"
    wait_until(room.receiver.drained, "the last launch to be over")


def test_d_closes(pair: Pair) -> None:
    room = pair.room()
    room.open().send(0, 50, 0, 1)
    wait_until(lambda: pair.p.device.launched == 1, "the launch")
    pair.d.manager.close()
    assert settled(room.sender) is TransferState.FAILED
    wait_until(lambda: pair.p.device.mapped == 0, "the mapping to be given up")
    late = pair.p.manager
    with pytest.raises(TransferError, match="closed"):
        pair.d.manager.receiver("P", ROOM, 9, room.theirs, (0,), 50)
    sender = late.sender("D", room.reservation, room.own, 50)
    sender.send(0, 50, 0, 3)
    assert settled(sender) is TransferState.FAILED
    assert "nobody listens" in str(sender.error)


def test_a_pool_that_cannot_be_mapped_fails_its_rooms_and_is_tried_again(pair: Pair) -> None:
    pair.p.manager.disconnect("D")
    pair.p.device.refuses = "the peer's KV pool cannot be mapped: out of memory"
    pair.introduce()
    link, sessions = pair.p.manager._links["D"], pair.d.manager._sessions
    wait_until(lambda: link.stopped is not None, "the link to give up")
    wait_until(lambda: sessions.get_session("P").channel is None, "D to notice")
    room = pair.room()
    room.send_all()
    assert settled(room.sender) is TransferState.FAILED
    assert "out of memory" in str(room.sender.error)
    pair.p.device.refuses = ""
    wait_until(lambda: room.receiver.poll() is TransferState.FAILED, "D to notice")
    again = pair.room()
    again.send_all()
    hand_off(again.sender, again.receiver)
    assert again.arrived()


def test_an_error_of_the_gpu_ends_the_rooms(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(NvlinkSender, "launch_store", broken)
    room = pair.room()
    room.send_all()
    assert settled(room.sender) is TransferState.FAILED
    assert "CUDA error" in str(room.sender.error)
    wait_until(lambda: pair.p.device.mapped == 0, "the mapping to be given up")
    assert room.sender.drained()


def test_an_error_while_the_link_waits_for_a_store_ends_the_rooms(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [RuntimeError("CUDA error: unspecified launch failure")]
    wait = ShmTicket.wait

    def broken(ticket: ShmTicket) -> None:
        if errors:
            raise errors.pop()
        wait(ticket)

    monkeypatch.setattr(ShmTicket, "wait", broken)
    pair.p.device.flows.clear()
    room = pair.room()
    sender = room.open()
    for token in range(0, 50, 5):
        sender.send(token, token + 5, 0, 3)
    assert settled(sender) is TransferState.FAILED
    assert "launch failure" in str(sender.error)
    assert not sender.drained() and not room.receiver.drained()
    pair.p.device.flows.set()
    wait_until(lambda: pair.p.device.mapped == 0, "the mapping to be given up")
    assert sender.drained()
    wait_until(room.receiver.drained, "the channel's end")


def test_a_store_that_fails_half_way_has_ended_before_the_peer_hears_of_it(pair: Pair) -> None:
    pair.room().open()
    wait_until(lambda: pair.p.device.mapped == 1, "the mapping")
    pair.p.device.flows.clear()
    pair.p.device.breaks = "CUDA error: the second of three copies"
    room = pair.room()
    sending = threading.Thread(target=room.send_all)
    sending.start()
    wait_until(lambda: pair.p.device.launched == 1, "the store")
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert not room.sender.drained() and not room.receiver.drained()
        assert pair.p.device.mapped == 1
    pair.p.device.flows.set()
    sending.join(5)
    assert settled(room.sender) is TransferState.FAILED
    assert "second of three" in str(room.sender.error)
    wait_until(lambda: pair.p.device.mapped == 0, "the mapping to be given up")
    assert room.arrived(), "before the mapping was given up"


@pytest.mark.usefixtures("unstarved")
def test_a_peer_that_never_answers_fails_the_room_after_a_lease(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms_sender, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(nvlink_sessions.NvlinkSession, "bind_channel", lambda self, channel: None)
    pair.p.manager.disconnect("D")
    pair.p.manager.connect(pair.d.info())
    room = pair.room()
    room.send_all()
    assert settled(room.sender) is TransferState.FAILED
    assert "did not open a channel" in str(room.sender.error)
    assert room.sender.drained()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"page_size": 0}, "page size 0"),
        ({"pages": b"abc"}, "page table of 3 bytes"),
        ({"pages": np.array([0, 20, 2, 3], dtype="<i4").tobytes()}, "outside a pool of 320"),
        ({"pages": np.array([0, -1, 2, 3], dtype="<i4").tobytes()}, "outside a pool of 320"),
        ({"pages": np.array([0], dtype="<i4").tobytes()}, "cannot hold tokens up to 50"),
        ({"page_size": 1 << 31}, "page size"),
        ({"token_stop": 51}, "reserved tokens"),
        ({"token_start": 1}, "reserved tokens"),
    ],
)
def test_a_destination_outside_the_pool_is_refused(
    pair: Pair, changes: dict, complaint: str
) -> None:
    room = pair.room()
    good = msgspec.msgpack.decode(room.receiver.destination, type=NvlinkDestination)
    bad = msgspec.msgpack.encode(msgspec.structs.replace(good, **changes))
    room.reservation = msgspec.structs.replace(room.reservation, destination=bad)
    with pytest.raises(TransferError, match=complaint):
        room.open()


def test_a_destination_of_another_backend_is_refused(pair: Pair) -> None:
    room = pair.room()
    for data in (b"", b"\x80", b"junk"):
        room.reservation = msgspec.structs.replace(room.reservation, destination=data)
        with pytest.raises(TransferError, match="invalid destination"):
            room.open()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"host_id": "another"}, "not on one host"),
        ({"device": "GPU-7"}, "cannot map the decode node's GPU GPU-7"),
        ({"handle": "xyz"}, "no pool that can be mapped"),
        ({"num_slots": "0"}, "0 slots"),
        ({"offset": "-1"}, "offset -1"),
        ({"port": "none"}, "bad data address"),
        ({"host": "10.0.0.1"}, "not a loopback address"),
    ],
)
def test_peers_that_cannot_be_mapped_are_refused(pair: Pair, changes: dict, complaint: str) -> None:
    with pytest.raises(TransferError, match=complaint):
        pair.p.manager.connect(pair.d.info(**changes))


def test_another_kv_shape_is_refused_naming_both_values(pair: Pair) -> None:
    other = Node("E", "decode", 16, 64, num_layers=4)
    try:
        with pytest.raises(TransferError, match="num_layers differs: 3 here, 4 at E"):
            pair.p.manager.connect(other.info())
    finally:
        other.close()


def test_a_pool_in_host_memory_is_refused_in_one_line() -> None:
    with pytest.raises(SetupError, match="the KV cache is on cpu; use tcp") as caught:
        NvlinkManager(make_pool(16, 4), "P")
    assert "\n" not in str(caught.value)


def test_an_open_address_needs_a_key() -> None:
    pool = make_pool(16, 4)
    with pytest.raises(UsageError, match="cluster-key-file"):
        NvlinkManager(pool, "P", "0.0.0.0")


def test_it_says_what_the_choice_of_a_backend_needs(pair: Pair) -> None:
    address = pair.p.manager.address()
    assert set(address) == {
        "host",
        "port",
        "num_slots",
        "host_id",
        "device",
        "reachable",
        "handle",
        "offset",
    }
    assert isinstance(pair.p.pool, Pool)
    assert address["num_slots"] == "160"
