"""Pools of several planes in GPU memory."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch
from transfer.transfer_helpers import SEED, backends, hand_off, node_info, reservation

from pd.core.node_info import KVLayout, Plane
from pd.engine.kv_pool import KVPool
from pd.kernels.paging import find_token_slots
from pd.transfer import make_transfer_manager
from pd.transfer.nvlink.device import CudaLane
from pd.transfer.ranges import Block

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

EXTRA_PLANES = (
    Plane("latent", 1, 1, 24, "bfloat16", vectors=1, ranks="first", group=1),
    Plane("head", 1, 4, 128, "float16", group=2),
)
TOKENS, NUM_LAYERS = 20_000, 6


def make_pool(page_size: int, device: str, ranks: int = 1) -> list[KVPool]:
    """The pools of all ranks, with random content."""
    layout = KVLayout.of_model(4, 8, 128, "bfloat16", page_size, ranks, EXTRA_PLANES)
    pages = 2 * -(-TOKENS // page_size)
    pools = [KVPool(layout.of_rank(rank), pages, device) for rank in range(ranks)]
    generator = torch.Generator(device).manual_seed(SEED + page_size)
    for pool in pools:
        pool.memory.random_(generator=generator)
    pools[0].set_parts([pool.memory.data_ptr() for pool in pools], layout)
    return pools


def some_pages(rng: random.Random, pool: KVPool) -> np.ndarray:
    count = -(-TOKENS // pool.page_size)
    return np.array(rng.sample(range(pool.num_pages), count), dtype=np.int32)


@pytest.mark.parametrize("backend", backends("tcp", "nixl"))
@pytest.mark.parametrize(
    ("source", "target", "ranks"),
    [("cuda", "cuda", (1, 1)), ("cuda", "cpu", (2, 1)), ("cpu", "cuda", (1, 2))],
)
def test_each_plane_arrives_from_its_group_s_cached_length_on(
    backend: str, source: str, target: str, ranks: tuple[int, int]
) -> None:
    rng = random.Random(SEED)
    own, *_ = mine = make_pool(16, source, ranks[0])
    other, *_ = theirs = make_pool(4, target, ranks[1])
    p, d = make_transfer_manager(backend, own, "P"), make_transfer_manager(backend, other, "D")
    try:
        p.connect(node_info("D", "decode", d, other))
        d.connect(node_info("P", "prefill", p, own))
        for epoch, cached in enumerate([(0, 0, 0), (37, 0, 9000)], start=1):
            pages, into = some_pages(rng, own), some_pages(rng, other)
            torch.cuda.synchronize()
            receiver = d.receiver("P", bytes(16), epoch, into, cached, TOKENS)
            asked = reservation(receiver, bytes(16), epoch, 0)
            asked = msgspec.structs.replace(asked, cached=cached)
            sender = p.sender("D", asked, pages, TOKENS)
            for start, stop in ((0, 8192), (8192, TOKENS)):
                sender.send(max(start, min(cached)), stop, 0, 3)
                sender.send(max(start, min(cached)), stop, 3, NUM_LAYERS)
            hand_off(sender, receiver)
            assert own.compute_digest(pages, cached, TOKENS) == other.compute_digest(
                into, cached, TOKENS
            )
    finally:
        p.close()
        d.close()
    assert len(mine) == ranks[0] and len(theirs) == ranks[1]


@pytest.mark.parametrize("run", [1, 1024], ids=["kernel", "copy engine"])
def test_stores_find_each_plane_of_the_peer_s_pool(run: int) -> None:
    """Both pools are on one GPU; the peer has other pages and so other places."""
    (own,), (peer,) = make_pool(16, "cuda"), make_pool(4, "cuda")
    rng = np.random.default_rng(SEED)
    slots = []
    for pool in (own, peer):
        firsts = rng.permutation(pool.num_pages * pool.page_size // run).astype(np.int32) * run
        order = (firsts[:, None] + np.arange(run, dtype=np.int32)).ravel()
        slots.append(order[:TOKENS])
    lane = CudaLane(own)
    table = lane.make_table(np.stack(slots).astype(np.int32))
    torch.cuda.synchronize()
    num_slots = peer.planes[0].buffer.shape[2]
    for plane, extent in zip(own.planes, peer.layout.plane_extents(num_slots), strict=True):
        first, layers = plane.first_layer, plane.spec.num_layers
        block = Block(0, TOKENS, first, first + layers)
        address = peer.memory.data_ptr() + extent.start
        lane.store_block(table, slice(0, TOKENS), address, num_slots, block).wait()
    for plane, stored in zip(own.planes, peer.planes, strict=True):
        sent = plane.buffer.view(torch.int16)[:, :, slots[0]]
        assert torch.equal(stored.buffer.view(torch.int16)[:, :, slots[1]], sent), plane.spec


def test_a_gpu_and_a_cpu_find_the_same_digest() -> None:
    (pool,) = make_pool(16, "cuda")
    copy = KVPool(pool.layout, pool.num_pages, "cpu")
    copy.memory.copy_(pool.memory)
    pages, cached = some_pages(random.Random(SEED), pool), (5, 700, 0)
    assert pool.compute_digest(pages, cached, TOKENS) == copy.compute_digest(pages, cached, TOKENS)
    copies = pool.gather_pages(pages[:9])
    before = pool.compute_digest(pages[:9], (0, 0, 0), 144)
    slots = find_token_slots(pages, np.arange(144), 16)
    for plane in pool.planes:
        plane.buffer[:, :, slots] = 0
    pool.scatter_pages(pages[:9], copies)
    assert pool.compute_digest(pages[:9], (0, 0, 0), 144) == before
