"""Packed rows of all heads, from and to pools that divide them."""

from __future__ import annotations

import os
import random

import pytest
import torch
from kernels.test_kv_copy import SHAPES, make_pool, some_slots

from pd.kernels.kv_copy import count_row_bytes, gather_parts, scatter_parts

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"


@pytest.fixture
def rng() -> random.Random:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    return random.Random(SEED)


def whole_rows(pools: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """What gathering packs, of layers 1 and up: the heads of all pools, side by side."""
    return torch.cat([pool[1:, :, slots.long()] for pool in pools], dim=3).contiguous()


@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_heads_of_all_parts_in_order(
    shape: tuple, count: int, device: str, rng: random.Random
) -> None:
    pools = [make_pool(shape, device=device) for _ in range(count)]
    parts = [pool.data_ptr() for pool in pools]
    layers = shape[0]
    for tokens in (1, 13, 29):
        slots = some_slots(rng, shape[1], 4, tokens).to(device)
        expected = whole_rows(pools, slots)
        out = torch.full_like(expected, 0)
        gather_parts(pools[0], parts, slots, 1, layers, out)
        assert torch.equal(out, expected)
        data = torch.cat([make_pool(shape, tokens, device)[1:] for _ in pools], dim=3)
        before = [pool.clone() for pool in pools]
        scatter_parts(pools[0], parts, slots, 1, layers, data.contiguous())
        assert torch.equal(whole_rows(pools, slots), data)
        for pool, old in zip(pools, before, strict=True):  # and nothing else was written
            pool[1:, :, slots.long()] = old[1:, :, slots.long()]
            assert torch.equal(pool, old)


def test_what_does_not_fit_is_refused() -> None:
    pools = [make_pool(SHAPES[1]) for _ in range(2)]
    parts = [pool.data_ptr() for pool in pools]
    slots = torch.arange(4, dtype=torch.int32)
    one_rank = torch.empty(2 * 2 * 4 * count_row_bytes(pools[0]), dtype=torch.uint8)
    with pytest.raises(ValueError, match="bytes"):
        gather_parts(pools[0], parts, slots, 0, 2, one_rank)
    with pytest.raises(IndexError, match="are not of 80"):
        scatter_parts(pools[0], parts, slots + 77, 0, 2, one_rank.repeat(2))
