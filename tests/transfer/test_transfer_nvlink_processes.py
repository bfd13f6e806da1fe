"""nvlink between processes that are killed, stopped and started again, on shared memory."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from nvlink_process import ShmNodeProcess
from transfer_helpers import SEED, wait_until
from transfer_process import LAYERS

from pd.transfer.base import TransferState
from pd.transfer.wire.channel import LAST_WRITE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[[str, str], ShmNodeProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    nodes: list[ShmNodeProcess] = []

    def make(instance: str, role: str) -> ShmNodeProcess:
        nodes.append(ShmNodeProcess(instance, role))
        return nodes[-1]

    yield make
    for node in nodes:
        node.kill()


def introduce(p: ShmNodeProcess, d: ShmNodeProcess) -> None:
    p.call("connect", d.info)
    d.call("connect", p.info)


def state(node: ShmNodeProcess, room: int) -> TransferState:
    return node.call("state", room)[0]


def error(node: ShmNodeProcess, room: int) -> str:
    wait_until(lambda: state(node, room) is not TransferState.ACTIVE, "the end")
    assert state(node, room) is TransferState.FAILED
    return node.call("state", room)[1]


def is_drained(node: ShmNodeProcess, room: int) -> bool:
    return node.call("state", room)[2]


def open_room(p: ShmNodeProcess, d: ShmNodeProcess, room: int, layers: int = LAYERS) -> None:
    asked = d.call("receive", p.info.instance_id, room)
    p.call("send", d.info.instance_id, asked, 0, layers)


def transfer_works(p: ShmNodeProcess, d: ShmNodeProcess, room: int) -> None:
    open_room(p, d, room)
    num_bytes = p.call("finish", room)
    wait_until(lambda: state(p, room) is TransferState.DONE, "the stores")
    d.call("commit", room, num_bytes)
    assert state(d, room) is TransferState.DONE
    assert d.call("checksum") == p.call("checksum")


def test_a_pool_arrives(start: Start) -> None:
    p, d = start("P", "prefill"), start("D", "decode")
    introduce(p, d)
    transfer_works(p, d, 1)


def test_kills_of_the_decode_node_leave_the_prefill_node_whole(start: Start) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    p = start("P", "prefill")
    p.call("slow_down", 0.01)
    for life in range(6):
        d = start(f"D{life}", "decode")
        introduce(p, d)
        transfer_works(p, d, 10 * life + 1)
        asked = d.call("receive", "P", 10 * life + 2)
        for layer in range(LAYERS):
            p.call("send", d.info.instance_id, asked, layer, layer + 1)
        time.sleep(rng.uniform(0.0, 0.05))
        assert d.mapped_by(p)
        d.kill()
        begun = time.monotonic()
        assert "ended" in error(p, 10 * life + 2)
        wait_until(lambda d=d: not d.mapped_by(p), "the mapping to be given up")
        assert time.monotonic() - begun < 1.0, "its memory must be free for its successor"
        assert is_drained(p, 10 * life + 2)
        p.call("disconnect", d.info.instance_id)
    assert p.alive()


def test_a_mapping_is_kept_until_the_last_store_is_complete(start: Start) -> None:
    """Who unmaps too early dies: the memory is gone for a store that is still to come."""
    p, d = start("P", "prefill"), start("D", "decode")
    introduce(p, d)
    p.call("hold")
    open_room(p, d, 1)
    wait_until(lambda: p.call("launched") == 1, "the launch")
    d.kill()
    assert "ended" in error(p, 1)
    time.sleep(0.2)
    assert not is_drained(p, 1) and d.mapped_by(p)
    p.call("release")
    wait_until(lambda: not d.mapped_by(p), "the mapping to be given up")
    wait_until(lambda: is_drained(p, 1), "the drain")
    again = start("D-again", "decode")
    introduce(p, again)
    transfer_works(p, again, 2)


def test_a_killed_prefill_node_fails_its_rooms_only(start: Start) -> None:
    d, p, other = start("D", "decode"), start("P", "prefill"), start("Q", "prefill")
    introduce(p, d)
    introduce(other, d)
    p.call("hold")
    open_room(p, d, 1)
    wait_until(lambda: p.call("launched") == 1, "the launch")
    kept = d.call("receive", "Q", 2)
    other.call("send", "D", kept, 0, LAYERS)
    begun = time.monotonic()
    p.kill()
    assert "channel from P ended" in error(d, 1)
    assert time.monotonic() - begun < 1.0
    assert not is_drained(d, 1), "what it had launched may still land"
    d.call("disconnect", "P")
    wait_until(lambda: is_drained(d, 1), "the end of the last launch")
    assert time.monotonic() - begun >= LAST_WRITE_SECONDS
    num_bytes = other.call("finish", 2)
    wait_until(lambda: state(other, 2) is TransferState.DONE, "the stores")
    d.call("commit", 2, num_bytes)
    assert state(d, 2) is TransferState.DONE
    again = start("P-again", "prefill")
    introduce(again, d)
    transfer_works(again, d, 3)


def test_a_stopped_prefill_node_keeps_the_pages_in_quarantine(start: Start) -> None:
    p, d = start("P", "prefill"), start("D", "decode")
    introduce(p, d)
    p.call("hold")
    open_room(p, d, 1)
    wait_until(lambda: p.call("launched") == 1, "the launch")
    p.stop()
    d.call("disconnect", "P")
    assert "disconnected" in error(d, 1)
    time.sleep(LAST_WRITE_SECONDS + 0.5)
    assert not is_drained(d, 1), "P may still store"
    before = d.call("checksum")
    p.resume()
    p.call("release")
    assert "ended" in error(p, 1)
    wait_until(lambda: is_drained(p, 1), "the late store")
    assert d.call("checksum") != before, "it did land late"
    wait_until(lambda: is_drained(d, 1), "the proof")
    introduce(p, d)
    transfer_works(p, d, 2)


def test_an_abort_waits_for_the_prefill_node_to_drain(start: Start) -> None:
    p, d = start("P", "prefill"), start("D", "decode")
    introduce(p, d)
    p.call("hold")
    open_room(p, d, 1, layers=1)
    wait_until(lambda: p.call("launched") == 1, "the launch")
    d.call("abort", 1)
    p.call("abort", 1)
    assert not is_drained(d, 1) and not is_drained(p, 1)
    p.call("release")
    wait_until(lambda: is_drained(p, 1), "the drain")
    d.call("on_peer_drained", 1)
    assert is_drained(d, 1)
    transfer_works(p, d, 2)
