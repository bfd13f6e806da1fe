"""The digest sees every bit and no arrangement."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from pd.kernels import digest
from pd.kernels.digest import hash_tokens, sum_digests

LAYERS, HEADS, DIM, SLOTS = 3, 4, 8, 64
DEVICE = os.environ.get("PD_TEST_DEVICE", "cpu")


def pool(dtype: torch.dtype, dim: int = DIM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(LAYERS, 2, SLOTS, HEADS, dim, generator=generator)
    return values.to(dtype).to(DEVICE)


def mix(x: int) -> int:
    """Splitmix64's finalizer in plain integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.float16, 3)]
)
def test_it_is_what_the_definition_says(dtype: torch.dtype, dim: int) -> None:
    """Words of a vector are of 8 bytes, or of 2 where that does not divide it."""
    buffer = pool(dtype, dim)
    kind = "<i8" if dim * buffer.element_size() % 8 == 0 else "<i2"
    slots, position = [5, 63, 0], 1000
    expected = []
    for offset, slot in enumerate(slots):
        total = 0
        for layer in range(LAYERS):
            for kv in range(2):
                for head in range(HEADS):
                    row = buffer[layer, kv, slot, head].cpu().view(torch.uint8).numpy()
                    words = [int(word) for word in row.view(kind)]
                    vector = sum((w ^ (w >> 32)) * (mix(n) | 1) for n, w in enumerate(words, 1))
                    place = (((position + offset) * 65536 + head) * 2 + kv) * 4096 + layer
                    total += mix(vector % 2**64 ^ mix(place))
        expected.append(total % 2**64)
    found = hash_tokens(buffer, np.array(slots), position).view(np.uint64)
    assert [int(value) for value in found] == expected


def test_pieces_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, slots = pool(torch.float32), np.arange(SLOTS)
    whole = hash_tokens(buffer, slots, 7)
    for size in (1, 1000, 3000):
        monkeypatch.setitem(digest._PIECE_BYTES, buffer.device.type, size)
        assert np.array_equal(hash_tokens(buffer, slots, 7), whole), size


def test_signs_flipped_in_pairs_change_it() -> None:
    """A plain weighted sum of words would not see two top bits."""
    buffer, slots = pool(torch.float32), np.arange(SLOTS)
    before = sum_digests(hash_tokens(buffer, slots, 0))
    buffer[1, 0, 3, 2, [1, 3]] *= -1
    assert sum_digests(hash_tokens(buffer, slots, 0)) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_does_not_depend_on_where_the_tokens_lie(dtype: torch.dtype) -> None:
    source, target = pool(dtype), pool(dtype) * 0
    there, here = np.random.default_rng(0).permutation(SLOTS)[:20], np.arange(30, 50)
    target[:, :, here] = source[:, :, there]
    assert np.array_equal(hash_tokens(source, there, 5), hash_tokens(target, here, 5))


def test_ranges_and_shards_add_up() -> None:
    buffer, slots = pool(torch.float32), np.arange(40)
    whole = hash_tokens(buffer, slots, 0)
    parts = [hash_tokens(buffer, slots[:17], 0), hash_tokens(buffer, slots[17:], 17)]
    assert np.array_equal(whole, np.concatenate(parts))
    shards = [
        hash_tokens(buffer[..., :2, :].contiguous(), slots, 0),
        hash_tokens(buffer[..., 2:, :].contiguous(), slots, 0, first_head=2),
    ]
    assert sum_digests(shards[0] + shards[1]) == sum_digests(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    buffer, slots = pool(dtype), np.arange(SLOTS)
    before = sum_digests(hash_tokens(buffer, slots, 0))
    raw = buffer.view(torch.uint8).flatten()
    rng = np.random.default_rng(1)
    for position in rng.integers(0, len(raw), 100):
        bit = 1 << int(rng.integers(8))
        raw[position] ^= bit
        assert sum_digests(hash_tokens(buffer, slots, 0)) != before
        raw[position] ^= bit
    assert sum_digests(hash_tokens(buffer, slots, 0)) == before


def test_swapped_tokens_layers_heads_or_kinds_change_it() -> None:
    buffer, slots = pool(torch.float32), np.arange(SLOTS)
    before = sum_digests(hash_tokens(buffer, slots, 0))
    for dimension in range(4):
        swapped = buffer.roll(1, dims=dimension)
        assert sum_digests(hash_tokens(swapped, slots, 0)) != before, dimension
    assert sum_digests(hash_tokens(buffer, slots, 1)) != before
