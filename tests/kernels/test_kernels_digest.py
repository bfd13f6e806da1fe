"""The digest sees every bit and no arrangement."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pd.kernels.digest import digest_bytes, token_digests

LAYERS, HEADS, DIM, SLOTS = 3, 4, 8, 64


def pool(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(LAYERS, 2, SLOTS, HEADS, DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_does_not_depend_on_where_the_tokens_lie(dtype: torch.dtype) -> None:
    source, target = pool(dtype), torch.zeros(LAYERS, 2, SLOTS, HEADS, DIM, dtype=dtype)
    there, here = np.random.default_rng(0).permutation(SLOTS)[:20], np.arange(30, 50)
    target[:, :, here] = source[:, :, there]
    assert np.array_equal(token_digests(source, there, 5), token_digests(target, here, 5))


def test_ranges_and_shards_add_up() -> None:
    buffer, slots = pool(torch.float32), np.arange(40)
    whole = token_digests(buffer, slots, 0)
    parts = [token_digests(buffer, slots[:17], 0), token_digests(buffer, slots[17:], 17)]
    assert np.array_equal(whole, np.concatenate(parts))
    shards = [
        token_digests(buffer[..., :2, :].contiguous(), slots, 0),
        token_digests(buffer[..., 2:, :].contiguous(), slots, 0, first_head=2),
    ]
    assert digest_bytes(shards[0] + shards[1]) == digest_bytes(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    buffer, slots = pool(dtype), np.arange(SLOTS)
    before = digest_bytes(token_digests(buffer, slots, 0))
    raw = buffer.view(torch.uint8).flatten()
    rng = np.random.default_rng(1)
    for position in rng.integers(0, len(raw), 100):
        bit = 1 << int(rng.integers(8))
        raw[position] ^= bit
        assert digest_bytes(token_digests(buffer, slots, 0)) != before
        raw[position] ^= bit
    assert digest_bytes(token_digests(buffer, slots, 0)) == before


def test_swapped_tokens_layers_heads_or_kinds_change_it() -> None:
    buffer, slots = pool(torch.float32), np.arange(SLOTS)
    before = digest_bytes(token_digests(buffer, slots, 0))
    for dimension in range(4):
        swapped = buffer.roll(1, dims=dimension)
        assert digest_bytes(token_digests(swapped, slots, 0)) != before, dimension
    assert digest_bytes(token_digests(buffer, slots, 1)) != before
