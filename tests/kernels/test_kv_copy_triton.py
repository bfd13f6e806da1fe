"""The Triton kernel by its numpy reference: on a GPU, or interpreted on the CPU."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from kernels.test_kv_copy import SHAPES, make_pool, some_slots

from pd.kernels.kv_copy import (
    copy_to_peer,
    count_row_bytes,
    gather_parts,
    gather_rows,
    scatter_rows,
)

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from pd.kernels.kv_copy_triton import (  # noqa: E402
    PEER_SHAPE,
    LaunchShape,
    Side,
    copy_rows,
    select_part,
)

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
DEVICE = "cuda:0" if ON_GPU else "cpu"
# Few programs, so that each walks over several tiles; tiles of one row and of many.
LAUNCHES = [LaunchShape(3, 1024, 1), LaunchShape(1, 256, 1), LaunchShape(5, 8192, 4)]
# Interpreted, the second takes seconds.
CASES = [
    LAUNCHES[0],
    pytest.param(LAUNCHES[1], marks=() if ON_GPU else pytest.mark.full),
    LAUNCHES[2],
]


@pytest.fixture
def rng() -> random.Random:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    return random.Random(SEED)


@pytest.fixture(scope="module", autouse=True)
def kernel_runs() -> None:
    pool = make_pool(SHAPES[1], device=DEVICE)
    try:
        run_gather(pool, torch.zeros(1, dtype=torch.int32, device=DEVICE), 0, 1, LAUNCHES[0])
    except Exception as error:
        if ON_GPU or "only 0-dimensional arrays" not in str(error):
            raise
        pytest.skip(f"Triton's interpreter does not work with numpy {np.__version__}")


def run_gather(
    pool: torch.Tensor, slots: torch.Tensor, first: int, stop: int, shape: LaunchShape
) -> torch.Tensor:
    row, count = count_row_bytes(pool), 2 * (stop - first)
    out = torch.zeros(count * len(slots) * row, dtype=torch.uint8, device=pool.device)
    source = Side(pool.data_ptr(), 2 * first, pool.shape[2], slots)
    target = Side(out.data_ptr(), 0, len(slots))
    copy_rows(source, target, len(slots), count, row, pool.device, shape)
    return out.cpu()


@pytest.mark.parametrize("launch", CASES)
@pytest.mark.parametrize(
    "shape",
    # Rows of a power of two bytes, of others, and of the fewest.
    [
        SHAPES[1],
        SHAPES[3],
        SHAPES[5],
        *(
            SHAPES[i] if ON_GPU else pytest.param(SHAPES[i], marks=pytest.mark.full)
            for i in (0, 2, 4)
        ),
    ],
)
def test_gather_and_scatter_are_those_of_the_reference(
    shape: tuple, launch: LaunchShape, rng: random.Random
) -> None:
    pool = make_pool(shape)
    for tokens, kind in ((1, torch.int32), (13, torch.int64), (29, torch.int32)):
        slots = some_slots(rng, pool.shape[2], 4, tokens).to(kind)
        expected = torch.zeros(2 * tokens * count_row_bytes(pool), dtype=torch.uint8)
        gather_rows(pool, slots, 1, 2, expected)
        there, where = pool.to(DEVICE), slots.to(DEVICE)
        assert torch.equal(run_gather(there, where, 1, 2, launch), expected)
        data = expected.flip(0).clone()
        scatter_rows(pool, slots, 1, 2, data)
        packed = data.to(DEVICE)
        source = Side(packed.data_ptr(), 0, tokens)
        target = Side(there.data_ptr(), 2, pool.shape[2], where)
        copy_rows(source, target, tokens, 2, count_row_bytes(pool), there.device, launch)
        assert torch.equal(there.cpu(), pool)


def is_in_sample(params: dict[str, Any]) -> bool:
    """All shapes with the tiles of many rows, and some with few programs."""
    shapes = {LAUNCHES[0]: SHAPES[1::2], LAUNCHES[1]: [], LAUNCHES[2]: SHAPES}
    return ON_GPU or params["shape"] in shapes[params["launch"]]


@pytest.mark.sample(cells=is_in_sample)
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_to_another_pool_are_those_of_the_reference(
    shape: tuple, launch: LaunchShape, rng: random.Random
) -> None:
    pool, peer = make_pool(shape), make_pool(shape, 112)
    slots, theirs = some_slots(rng, pool.shape[2], 4, 30), some_slots(rng, 112, 16, 30)
    there, there_peer = pool.to(DEVICE), peer.to(DEVICE).clone()
    count = 2 * (pool.shape[0] - 1)
    own_slots, peer_slots = slots.to(DEVICE), theirs.to(DEVICE)
    source = Side(there.data_ptr(), 2, pool.shape[2], own_slots)
    target = Side(there_peer.data_ptr(), 2, 112, peer_slots)
    copy_rows(source, target, 30, count, count_row_bytes(pool), there.device, launch)
    copy_to_peer(pool, slots, peer.data_ptr(), 112, theirs, 1, pool.shape[0])
    assert torch.equal(there_peer.cpu(), peer)


def test_memory_that_is_not_aligned_is_copied_all_the_same(rng: random.Random) -> None:
    pool = make_pool(SHAPES[1])
    slots = some_slots(rng, pool.shape[2], 4, 9)
    expected = torch.zeros(4 * 9 * count_row_bytes(pool), dtype=torch.uint8)
    gather_rows(pool, slots, 0, 2, expected)
    there, where = pool.to(DEVICE), slots.to(DEVICE)
    out = torch.zeros(len(expected) + 4, dtype=torch.uint8, device=DEVICE)[4:]
    source = Side(there.data_ptr(), 0, pool.shape[2], where)
    copy_rows(source, Side(out.data_ptr(), 0, 9), 9, 4, count_row_bytes(pool), there.device)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_are_stored_into_another_gpu(rng: random.Random) -> None:
    shape = (4, 4096, 8, 128, torch.bfloat16)
    pool, peer = make_pool(shape, device="cuda:0"), make_pool(shape, 8192, device="cuda:1")
    # torch opens peer access for its own copies.
    peer[0, 0, :1].copy_(pool[0, 0, :1])
    slots = some_slots(rng, 4096, 16, 3000).to("cuda:0")
    theirs = some_slots(rng, 8192, 64, 3000).to("cuda:0")
    expected = peer.clone()
    expected[1:3, :, theirs.long().to("cuda:1")] = pool[1:3, :, slots.long()].to("cuda:1")
    torch.cuda.synchronize("cuda:1")
    copy_to_peer(pool, slots, peer.data_ptr(), 8192, theirs, 1, 3, PEER_SHAPE)
    torch.cuda.synchronize("cuda:0")
    assert torch.equal(peer, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_rows_are_those_of_the_reference(shape: tuple, rng: random.Random) -> None:
    pools = [make_pool(shape) for _ in range(2)]
    slots = some_slots(rng, shape[1], 4, 29)
    width, count = count_row_bytes(pools[0]), 2 * shape[0]
    expected = torch.zeros(count * 29 * 2 * width, dtype=torch.uint8)
    gather_parts(pools[0], [p.data_ptr() for p in pools], slots, 0, shape[0], expected)
    there, where = [pool.to(DEVICE) for pool in pools], slots.to(DEVICE)
    out = torch.zeros_like(expected, device=DEVICE)
    for index, pool in enumerate(there):
        source = Side(pool.data_ptr(), 0, pool.shape[2], where)
        target = select_part(out, where, index, 2)
        copy_rows(source, target, 29, count, width, pool.device)
    assert torch.equal(out.cpu(), expected)
