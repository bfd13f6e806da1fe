"""nixl with pools in GPU memory: buffers on the device and buffers in pinned host memory."""

from __future__ import annotations

import importlib.util
import random
import time

import numpy as np
import pytest
import torch
from transfer.transfer_helpers import (
    SEED,
    Pool,
    hand_off,
    introduce,
    make_pool,
    random_pages,
    reservation,
    settled,
    wait_until,
)

from pd.transfer.base import TransferState
from pd.transfer.staged import nixl
from pd.transfer.staged.nixl import NixlManager

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the package nixl"),
]

ROOM = b"r" * 16
LAYERS, HEADS, DIM = 8, 8, 128


def pool_on(device: str, slots: int, page_size: int, fill: float | None = None) -> Pool:
    pool = make_pool(
        slots, page_size, layers=LAYERS, heads=HEADS, dim=DIM, dtype="bfloat16", fill=fill
    )
    return Pool(pool.buffer.to(device), pool.layout)


@pytest.fixture(params=["device buffers", "pinned buffers", "gpu to host", "host to gpu"])
def pair(request, monkeypatch):
    last = f"cuda:{torch.cuda.device_count() - 1}"
    devices = {"gpu to host": ("cuda:0", "cpu"), "host to gpu": ("cpu", last)}
    here, there = devices.get(request.param, ("cuda:0", last))
    if request.param != "device buffers":
        monkeypatch.setattr(nixl, "_can_share_device_memory", lambda: False)
    source, target = pool_on(here, 8192, 16), pool_on(there, 8192, 4, -1.0)
    p, d = NixlManager(source, "P", buffer_bytes=4 << 20), NixlManager(target, "D")
    introduce(p, "P", d, "D", source)
    yield source, target, p, d
    p.close()
    d.close()


def test_bytes_arrive_whatever_the_page_sizes(pair) -> None:
    rng = random.Random(SEED)
    source, target, p, d = pair
    for epoch in range(1, 4):
        pages, into = random_pages(rng, source, 5000), random_pages(rng, target, 5000)
        target.buffer.fill_(-1.0)
        torch.cuda.synchronize()
        receiver = d.receiver("P", ROOM, epoch, into, (37,), 5000)
        sender = p.sender("D", reservation(receiver, ROOM, epoch, 37), pages, 5000)
        for start, stop in ((37, 2000), (2000, 5000)):
            for layer in range(0, LAYERS, 4):
                sender.send(start, stop, layer, layer + 4)
        hand_off(sender, receiver)
        assert sender.drained()
        assert receiver.drained()
        sent = source.tokens(pages, 37, 5000).cpu()
        assert torch.equal(target.tokens(into, 37, 5000).cpu(), sent)
        untouched = int((target.buffer == -1.0).all(dim=-1).all(dim=-1).sum())
        assert untouched == LAYERS * 2 * (8192 - (5000 - 37))


def test_a_send_waits_for_what_was_queued_before_it_and_does_not_block(pair) -> None:
    source, target, p, d = pair
    if not source.buffer.is_cuda:
        pytest.skip("host memory is written when it is written")
    pages, into = np.arange(64, dtype=np.int32), np.arange(256, dtype=np.int32)
    receiver = d.receiver("P", ROOM, 1, into, (0,), 1024)
    sender = p.sender("D", reservation(receiver, ROOM, 1, 0), pages, 1024)
    with torch.cuda.device(source.buffer.device):
        torch.cuda.synchronize()
        # About half a second of the compute stream, then the values that are to be sent.
        torch.cuda._sleep(1_000_000_000)
        source.buffer.fill_(5.0)
        begun = time.perf_counter()
        sender.send(0, 1024, 0, LAYERS)
        assert time.perf_counter() - begun < 0.05
        assert not torch.cuda.current_stream().query()
    hand_off(sender, receiver)
    assert bool((target.tokens(into, 0, 1024) == 5.0).all())


def test_pages_are_safe_when_an_aborted_receiver_says_that_it_drained(pair) -> None:
    _, target, p, d = pair
    pages, into = np.arange(256, dtype=np.int32), np.arange(1024, dtype=np.int32)
    for epoch in range(1, 30):
        receiver = d.receiver("P", ROOM, epoch, into, (0,), 4096)
        sender = p.sender("D", reservation(receiver, ROOM, epoch, 0), pages, 4096)
        sender.send(0, 4096, 0, LAYERS)
        sender.finish()
        time.sleep(epoch * 0.0002)
        receiver.abort()
        wait_until(receiver.drained, "the drain")
        target.buffer.fill_(7.0)
        torch.cuda.synchronize()
        assert settled(sender) is TransferState.DONE, sender.error
        assert bool((target.buffer == 7.0).all())
