"""nvlink between processes with real GPUs: two if there are, else one that they share."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from gpu.nvlink_gpu_process import LAYERS, SLOTS, GpuNodeProcess
from transfer.transfer_helpers import SEED, wait_until

from pd.transfer.base import TransferState
from pd.transfer.wire.channel import LAST_WRITE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., GpuNodeProcess]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

TOKENS = 8192
GROUPS = [(layer, layer + 4) for layer in range(0, LAYERS, 4)]
POOL_BYTES = SLOTS * LAYERS * 2 * 8 * 128 * 2


def device_of(role: str) -> str:
    return f"cuda:{min(1, torch.cuda.device_count() - 1)}" if role == "decode" else "cuda:0"


@pytest.fixture
def start() -> Iterator[Start]:
    nodes: list[GpuNodeProcess] = []

    def make(instance: str, role: str, page_size: int = 16) -> GpuNodeProcess:
        nodes.append(GpuNodeProcess(instance, role, device_of(role), page_size))
        return nodes[-1]

    yield make
    for node in nodes:
        node.kill()


def introduce(p: GpuNodeProcess, d: GpuNodeProcess) -> None:
    p.call("connect", d.info)
    d.call("connect", p.info)


def state(node: GpuNodeProcess, room: int) -> TransferState:
    return node.call("state", room)[0]


def is_drained(node: GpuNodeProcess, room: int) -> bool:
    return node.call("state", room)[2]


def failed(node: GpuNodeProcess, room: int) -> str:
    wait_until(lambda: state(node, room) is TransferState.FAILED, "the failure")
    return node.call("state", room)[1]


def complete(p: GpuNodeProcess, d: GpuNodeProcess, room: int, start: int, tokens: int) -> None:
    num_bytes = p.call("finish", room)
    wait_until(lambda: state(p, room) is not TransferState.ACTIVE, "the stores")
    assert state(p, room) is TransferState.DONE, p.call("state", room)[1]
    d.call("commit", room, num_bytes)
    assert state(d, room) is TransferState.DONE, d.call("state", room)[1]
    assert d.call("digest", room, start, tokens) == p.call("digest", room, start, tokens)


def transfer_works(p: GpuNodeProcess, d: GpuNodeProcess, room: int) -> None:
    asked = d.call("receive", p.info.instance_id, room, 0, TOKENS)
    p.call("send", d.info.instance_id, asked, TOKENS, GROUPS)
    complete(p, d, room, 0, TOKENS)


@pytest.mark.parametrize("page_sizes", [(16, 16), (16, 64), (64, 1)])
def test_what_was_sent_arrives_whatever_the_page_sizes(start: Start, page_sizes) -> None:
    p, d = start("P", "prefill", page_sizes[0]), start("D", "decode", page_sizes[1])
    introduce(p, d)
    for room, (first, stop) in enumerate([(0, TOKENS), (1000, 1001), (333, 7777)], start=1):
        asked = d.call("receive", "P", room, first, stop)
        held_up = p.call("send", "D", asked, stop, GROUPS)
        assert held_up < 0.05, "the thread of the forward pass must not wait"
        complete(p, d, room, first, stop)


def test_stores_wait_for_the_kernels_that_write_the_kv(start: Start) -> None:
    p, d = start("P", "prefill"), start("D", "decode")
    introduce(p, d)
    transfer_works(p, d, 1)
    for room in range(2, 6):
        asked = d.call("receive", "P", room, 0, TOKENS)
        p.call("fill_and_send", "D", asked, TOKENS, room, 200_000_000)
        complete(p, d, room, 0, TOKENS)


def test_an_abort_drains_and_other_rooms_go_on(start: Start) -> None:
    p, d = start("P", "prefill"), start("D", "decode")
    introduce(p, d)
    asked = d.call("receive", "P", 1, 0, TOKENS)
    p.call("fill_and_send", "D", asked, TOKENS, 7, 1_000_000_000)
    d.call("abort", 1)
    p.call("abort", 1)
    assert not is_drained(d, 1)
    wait_until(lambda: is_drained(p, 1), "the drain")
    transfer_works(p, d, 2)


def test_kills_of_the_decode_node_free_its_memory_and_leave_the_prefill_node_whole(
    start: Start,
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    p, *lives = start("P", "prefill"), *(start(f"D{life}", "decode") for life in range(4))
    device = device_of("decode")
    # Whoever starts later would take of the memory that is watched here.
    assert all(d.info for d in lives)
    p.call("free_memory", device)
    free = []
    for life, d in enumerate(lives):
        introduce(p, d)
        transfer_works(p, d, 10 * life + 1)
        asked = d.call("receive", "P", 10 * life + 2, 0, TOKENS)
        p.call("fill_and_send", d.info.instance_id, asked, TOKENS, life, 500_000_000)
        time.sleep(rng.uniform(0.0, 0.3))
        before = p.call("free_memory", device)
        d.kill()
        assert "ended" in failed(p, 10 * life + 2)
        wait_until(
            lambda before=before: p.call("free_memory", device) > before + POOL_BYTES * 9 // 10,
            "its memory to be free",
            timeout=5.0,
        )
        assert is_drained(p, 10 * life + 2)
        p.call("disconnect", d.info.instance_id)
        free.append(p.call("free_memory", device))
    freed = [later - earlier for earlier, later in pairwise(free)]
    assert min(freed) > POOL_BYTES * 9 // 10, "a mapping was left"
    assert p.alive()


def test_a_killed_prefill_node_leaves_the_decode_node_whole(start: Start) -> None:
    p, d, again = start("P", "prefill"), start("D", "decode"), start("P-again", "prefill")
    introduce(p, d)
    asked = d.call("receive", "P", 1, 0, TOKENS)
    p.call("fill_and_send", "D", asked, TOKENS, 3, 500_000_000)
    began = time.monotonic()
    p.kill()
    assert "channel from P ended" in failed(d, 1)
    d.call("disconnect", "P")
    wait_until(lambda: is_drained(d, 1), "the end of the last launch")
    assert time.monotonic() - began >= LAST_WRITE_SECONDS
    introduce(again, d)
    transfer_works(again, d, 2)
