"""The tcp backend with pools in GPU memory."""

from __future__ import annotations

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
from pd.transfer.tcp.manager import TcpManager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

ROOM = b"r" * 16
LAYERS, HEADS, DIM = 8, 8, 128


def pool_on(device: str, slots: int, page_size: int, fill: float | None = None) -> Pool:
    pool = make_pool(
        slots, page_size, layers=LAYERS, heads=HEADS, dim=DIM, dtype="bfloat16", fill=fill
    )
    return Pool(pool.buffer.to(device), pool.layout)


def gpus() -> tuple[str, str]:
    return "cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("where", ["gpu to gpu", "gpu to host", "host to gpu"])
def test_bytes_arrive_between_pools_of_any_device_and_page_size(where, connections) -> None:
    rng = random.Random(SEED)
    source_device, target_device = gpus()
    if where == "gpu to host":
        target_device = "cpu"
    if where == "host to gpu":
        source_device = "cpu"
    source, target = pool_on(source_device, 8192, 16), pool_on(target_device, 8192, 4, -1.0)
    p, d = TcpManager(source, "P", connections=connections), TcpManager(target, "D")
    try:
        introduce(p, "P", d, "D", source)
        for epoch in range(1, 4):
            pages, into = random_pages(rng, source, 5000), random_pages(rng, target, 5000)
            target.buffer.fill_(-1.0)
            torch.cuda.synchronize(target_device if target_device != "cpu" else source_device)
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
            used = {int(page) for page in into[37 // 4 :]}
            rest = [s for s in range(8192) if s // 4 not in used]
            assert bool((target.buffer[:, :, rest] == -1.0).all())
    finally:
        p.close()
        d.close()


def test_what_is_still_being_computed_is_sent_when_it_is_there() -> None:
    """``send`` returns at once, and nothing leaves before the stream's work so far is done."""
    source_device, target_device = gpus()
    source, target = pool_on(source_device, 4096, 16), pool_on(target_device, 4096, 16, -1.0)
    p, d = TcpManager(source, "P"), TcpManager(target, "D")
    pages = np.arange(256, dtype=np.int32)
    try:
        introduce(p, "P", d, "D", source)
        for epoch in (1, 2):
            receiver = d.receiver("P", ROOM, epoch, pages, (0,), 4096)
            sender = p.sender("D", reservation(receiver, ROOM, epoch, 0), pages, 4096)
            with torch.cuda.device(source_device):
                computed = torch.cuda.Event()
                # About half a second.
                torch.cuda._sleep(1_000_000_000)
                source.buffer.fill_(float(epoch))
                begun = time.monotonic()
                sender.send(0, 4096, 0, LAYERS)
                took = time.monotonic() - begun
                computed.record()
            sender.finish()
            assert took < 0.1
            time.sleep(0.05)
            received = receiver.bytes_received
            assert computed.query() or received == 0
            hand_off(sender, receiver)
            assert bool((target.buffer == float(epoch)).all())
    finally:
        p.close()
        d.close()


def test_after_an_abort_and_the_drain_nothing_is_written() -> None:
    source_device, target_device = gpus()
    source, target = pool_on(source_device, 16384, 16), pool_on(target_device, 16384, 16, -1.0)
    p, d = TcpManager(source, "P"), TcpManager(target, "D")
    pages = np.arange(1024, dtype=np.int32)
    try:
        introduce(p, "P", d, "D", source)
        for epoch in range(1, 11):
            receiver = d.receiver("P", ROOM, epoch, pages, (0,), 16384)
            sender = p.sender("D", reservation(receiver, ROOM, epoch, 0), pages, 16384)
            for layer in range(LAYERS):
                sender.send(0, 16384, layer, layer + 1)
            least = epoch * (8 << 20)
            wait_until(lambda r=receiver, n=least: r.bytes_received >= n, "some frames")
            receiver.abort()
            wait_until(receiver.drained, "the receiver to drain")
            target.buffer.fill_(5.0)
            sender.abort()
            wait_until(sender.drained, "the sender to drain")
            time.sleep(0.02)
            assert bool((target.buffer == 5.0).all())
        receiver = d.receiver("P", ROOM, 99, pages, (0,), 16384)
        sender = p.sender("D", reservation(receiver, ROOM, 99, 0), pages, 16384)
        sender.send(0, 16384, 0, LAYERS)
        hand_off(sender, receiver)
        assert settled(receiver) is TransferState.DONE
        assert torch.equal(target.buffer.cpu(), source.buffer.cpu())
    finally:
        p.close()
        d.close()
