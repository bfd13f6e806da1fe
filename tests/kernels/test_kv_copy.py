"""Rows between pools and packed buffers: the CPU reference by definition, the kernel by the
reference."""

from __future__ import annotations

import importlib.util
import os
import random

import numpy as np
import pytest
import torch

from pd.kernels.kv_copy import copy_to_peer, count_row_bytes, gather_rows, scatter_rows

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# (layers, slots, heads, dim, dtype): rows of 2,048, 256, 64, 800, 24 and 2 bytes.
SHAPES = [
    (3, 96, 8, 128, torch.bfloat16),
    (2, 80, 2, 32, torch.float32),
    (4, 64, 1, 16, torch.float32),
    (2, 64, 5, 80, torch.bfloat16),
    (2, 48, 3, 4, torch.float16),
    (2, 32, 1, 1, torch.float16),
]


def make_pool(shape: tuple, slots: int | None = None, device: str = "cpu") -> torch.Tensor:
    layers, num_slots, heads, dim, dtype = shape
    size = (layers, 2, slots or num_slots, heads, dim)
    return torch.randint(1, 120, size, dtype=torch.uint8).to(dtype).to(device)


def some_slots(rng: random.Random, num_slots: int, page_size: int, tokens: int) -> torch.Tensor:
    """Of a sequence that begins inside a page."""
    pages = rng.sample(range(num_slots // page_size), -(-tokens // page_size))
    slots = np.concatenate([np.arange(p * page_size, (p + 1) * page_size) for p in pages])
    skipped = rng.randrange(len(slots) - tokens + 1)
    return torch.from_numpy(slots[skipped : skipped + tokens].astype(np.int32))


@pytest.fixture
def rng() -> random.Random:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    return random.Random(SEED)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_packs_layers_halves_tokens(
    shape: tuple, page_size: int, rng: random.Random
) -> None:
    pool = make_pool(shape)
    for tokens in (1, 7, 16, 29):
        slots = some_slots(rng, pool.shape[2], page_size, tokens)
        out = torch.empty(1 * 2 * tokens * count_row_bytes(pool), dtype=torch.uint8)
        gather_rows(pool, slots, 1, 2, out)
        assert torch.equal(
            out.view(pool.dtype).view(1, 2, tokens, *pool.shape[3:]), pool[1:2][:, :, slots]
        )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_scatter_writes_the_slots_and_nothing_else(
    shape: tuple, page_size: int, rng: random.Random
) -> None:
    pool = make_pool(shape)
    layers = pool.shape[0]
    for tokens in (1, 7, 16, 29):
        slots = some_slots(rng, pool.shape[2], page_size, tokens)
        data = make_pool(shape, tokens)
        expected = pool.clone()
        expected[:, :, slots.long()] = data
        scatter_rows(pool, slots, 0, layers, data)
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_copy_to_peer_between_pools_of_different_sizes_and_pages(
    shape: tuple, rng: random.Random
) -> None:
    pool, peer = make_pool(shape), make_pool(shape, 112)
    slots = some_slots(rng, pool.shape[2], 4, 30)
    theirs = some_slots(rng, 112, 16, 30).long()
    expected = peer.clone()
    expected[1:, :, theirs] = pool[1:, :, slots]
    copy_to_peer(pool, slots.long(), peer.data_ptr(), 112, theirs, 1, pool.shape[0])
    assert torch.equal(peer, expected)


def test_no_tokens_or_no_layers_are_nothing_to_do() -> None:
    pool = make_pool(SHAPES[1])
    before = pool.clone()
    none, some = torch.empty(0, dtype=torch.int32), torch.arange(4)
    gather_rows(pool, none, 0, 2, torch.empty(0, dtype=torch.uint8))
    scatter_rows(pool, some, 1, 1, torch.empty(0, dtype=torch.uint8))
    copy_to_peer(pool, none, pool.data_ptr(), pool.shape[2], none, 0, 2)
    assert torch.equal(pool, before)


def test_what_does_not_fit_is_refused() -> None:
    pool = make_pool(SHAPES[1])
    slots = torch.arange(4)
    data = torch.empty(2 * 2 * 4 * count_row_bytes(pool), dtype=torch.uint8)
    with pytest.raises(ValueError, match="layers"):
        gather_rows(pool, slots, 1, 3, data)
    with pytest.raises(ValueError, match="bytes"):
        gather_rows(pool, slots, 0, 2, data[1:])
    with pytest.raises(ValueError, match="slots are int32"):
        gather_rows(pool, slots.float(), 0, 2, data)
    with pytest.raises(ValueError, match="contiguous"):
        gather_rows(pool[:, :, ::2], slots, 0, 2, data)
    with pytest.raises(IndexError, match="are not of 80"):
        scatter_rows(pool, slots + 77, 0, 2, data)
    with pytest.raises(IndexError, match="are not of 40"):
        copy_to_peer(pool, slots, pool.data_ptr(), 40, slots + 37, 0, 1)
    with pytest.raises(ValueError, match="cannot be copied"):
        copy_to_peer(pool, slots, pool.data_ptr(), 80, slots[:3], 0, 1)
