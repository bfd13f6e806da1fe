"""Mooncake between processes that are killed, stopped and parted in the middle of writes."""

from __future__ import annotations

import os
import random
import time

import msgspec
import pytest
import torch
from staged_nodes import Nodes, play
from transfer_helpers import SEED, make_pool, wait_until

from pd.core.errors import SetupError
from pd.transfer.base import TransferState
from pd.transfer.staged.mooncake.library import load_library
from pd.transfer.staged.mooncake.mover import MooncakeManager, MooncakeMover
from pd.transfer.staged.mover import MoverError, Target

try:
    load_library()
except SetupError as error:
    if os.environ.get("CI"):
        raise
    pytest.skip(error.message, allow_module_level=True)

HOST = "127.0.0.1"
# Shorter than what nodes set, so that the library gives up while a test waits.
STALL = 5.0


@pytest.fixture
def nodes():
    made = Nodes("mooncake", {"MC_TCP_PROGRESS_TIMEOUT_SEC": f"{STALL:g}"})
    yield made
    made.close()


def test_pages_never_change_after_their_release(nodes) -> None:
    print(f"PD_TEST_SEED={SEED}")
    play(nodes, random.Random(f"{SEED}/mooncake"), 12)


@pytest.mark.full
def test_pages_never_change_after_their_release_in_many_rounds(nodes) -> None:
    print(f"PD_TEST_SEED={SEED}")
    play(nodes, random.Random(f"{SEED}/mooncake/many"), 150)


def test_a_killed_peer_is_noticed_at_once(nodes) -> None:
    nodes.complete(*nodes.begin())
    room, _ = nodes.begin()
    nodes.p.kill()
    begun = time.monotonic()
    assert nodes.end(nodes.d, room) is TransferState.FAILED
    assert time.monotonic() - begun < 2.0


def test_a_peer_that_stands_still_holds_buffers_until_the_library_gives_up(nodes) -> None:
    """Then both sides are at rest without anybody's help, and the next room arrives."""
    nodes.complete(*nodes.begin())
    wait_until(lambda: nodes.p.call("owed") == 0, "buffers to stop with")
    nodes.d.stop()
    room = nodes.room + 1
    asked = reservation_of(room)
    nodes.p.call("send_part", nodes.d.info.instance_id, asked)
    # Nothing tells when the library has the first block; it takes milliseconds.
    time.sleep(1.0)
    nodes.p.call("disconnect", nodes.d.info.instance_id)
    nodes.end(nodes.p, room)
    wait_until(lambda: nodes.p.call("quarantined") > 0, "the link's thread to give up its buffers")
    begun = time.monotonic()
    wait_until(lambda: nodes.p.call("quarantined") == 0, "the library to give up", 4 * STALL)
    assert time.monotonic() - begun < 2 * STALL
    nodes.d.resume()
    nodes.d.call("disconnect", nodes.p.info.instance_id)
    nodes.introduce()
    nodes.at_rest()


def test_idle_nodes_cost_nothing(nodes) -> None:
    nodes.cost_nothing_idle()


# ---- one end at a time


@pytest.fixture
def mover() -> MooncakeMover:
    return MooncakeMover(HOST)


@pytest.fixture
def buffers() -> torch.Tensor:
    return torch.zeros(4, 4096, dtype=torch.uint8)


@pytest.fixture
def target(mover, buffers):
    made = mover.make_target(buffers, "P", HOST)
    yield made
    made.close()


def changed(target: Target, **values: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(target.description) | values)


def test_buffers_arrive_in_the_buffers_that_were_named(mover, target, buffers) -> None:
    own = (torch.arange(4 * 4096) % 251).view(4, 4096).to(torch.uint8)
    path = mover.make_path(own, target.description, "D", lambda: None)
    sources = {2: 2, 0: 3}
    for there, here in sources.items():
        path.begin_write(here, there, 4000)
    over: set[int] = set()
    while len(over) < 2:
        for written in path.poll():
            assert not written.error
            over.add(written.target)
    for buffer in range(4):
        arrived = 4000 if buffer in sources else 0
        assert torch.equal(buffers[buffer, :arrived], own[sources.get(buffer, 0), :arrived])
        assert not buffers[buffer, arrived:].any()
    path.close()


def test_a_write_to_a_closed_target_fails(mover, buffers) -> None:
    target = mover.make_target(buffers, "P", HOST)
    path = mover.make_path(torch.ones_like(buffers), target.description, "D", lambda: None)
    buffers.zero_()
    target.close()
    path.begin_write(1, 1, 4096)
    over = []
    while not over:
        over = path.poll()
    assert "failed to write" in over[0].error
    assert not buffers.any()
    path.close()


@pytest.mark.full
def test_links_one_after_another_use_the_engines_again(mover, buffers) -> None:
    threads = set()
    for _ in range(14):
        target = mover.make_target(buffers, "P", HOST)
        path = mover.make_path(torch.ones_like(buffers), target.description, "D", lambda: None)
        path.close()
        target.close()
        threads.add(len(os.listdir("/proc/self/task")))
    assert max(threads) - min(threads) < 60, "a link has two engines of three threads"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"protocol": "rdma"}, "tcp here and rdma there"),
        ({"version": "0.3.12"}, "0.3.12 there is too old"),
        ({"engine": "a host/../:1"}, "bad name"),
        ({"engine": f"{HOST}:1"}, "does not answer"),
        ({"slots": 4096}, "does not answer"),
        ({"slots": -1}, "bad description"),
        ({"more": 1}, "bad description"),
    ],
)
def test_descriptions_are_checked(mover, target, buffers, values, message) -> None:
    with pytest.raises(MoverError, match=message):
        mover.make_path(buffers, changed(target, **values), "D", lambda: None)


def test_only_the_address_of_the_channel_reaches_the_buffers(mover, buffers) -> None:
    target = mover.make_target(buffers, "P", "127.0.0.9")
    with pytest.raises(MoverError, match="firewall"):
        mover.make_path(torch.ones_like(buffers), target.description, "D", lambda: None)
    assert not buffers.any()
    target.close()


def test_ipv6_is_refused() -> None:
    with pytest.raises(SetupError, match="works over IPv4, not at ::1"):
        MooncakeManager(make_pool(16, 4), "P", "::1")


def reservation_of(room: int):
    from pd.core.messages import Reservation

    return Reservation(to="P", sender="D", room=room.to_bytes(16), epoch=room, cached=(0,))
