"""The conversion of K and V to fp8 in every place that writes the pool: the reference, and the
kernel that rotates and stores, on a GPU or interpreted."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, ON_GPU, normal, seeded, skip_unless_interpreter_works

from pd.kernels.fp8 import FP8
from pd.kernels.kv_store import KVScales, store_kv, store_rows
from pd.kernels.latent import rotate_and_store_latents
from pd.kernels.rope import compute_rotations, inverse_frequencies, rotate_and_store

INFINITY = float("inf")
# Numbers, and what is stored of them with a scale of 1. Above 464, torch itself makes NaN of them.
LARGE = [(447.0, 448.0), (448.0, 448.0), (464.0, 448.0), (465.0, 448.0), (6e4, 448.0)]
LARGE += [(INFINITY, 448.0), (-470.0, -448.0), (-INFINITY, -448.0), (1.0, 1.0), (0.0, 0.0)]


def make_pool(slots: int, heads: int, size: int, device: str = "cpu") -> torch.Tensor:
    return torch.full((slots, heads, size), float("nan")).to(FP8).to(device)


def test_numbers_beyond_the_range_become_the_largest() -> None:
    rows = torch.tensor([[[number]] for number, _ in LARGE])
    stored = [largest for _, largest in LARGE]
    for scale in (1.0, 0.25, 8.0):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            pool = make_pool(len(rows), 1, 1)
            store_rows(pool, torch.arange(len(rows)), (rows * scale).to(dtype), scale)
            assert pool.float().flatten().tolist() == stored
    pool = make_pool(1, 1, 1)
    store_rows(pool, torch.zeros(1, dtype=torch.int64), torch.full((1, 1, 1), float("nan")))
    assert pool.isnan().all(), "an error of the model stays visible"


def test_slots_without_a_token_keep_their_content() -> None:
    keys, values = make_pool(5, 2, 4), make_pool(5, 2, 4)
    k, v = torch.full((2, 2, 4), 3.0), torch.full((2, 2, 4), -1000.0)
    store_kv(keys, values, torch.tensor([3, 1]), k, v, KVScales(0.5, 2.0))
    assert keys[[1, 3]].float().eq(6).all()
    assert values[[1, 3]].float().eq(-448).all()
    assert keys[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize("norm", [False, True])
def test_the_kernel_stores_the_same_bits_as_the_reference(norm: bool) -> None:
    """Also of K and V that do not fit."""
    skip_unless_interpreter_works()
    from pd.kernels import rope_triton

    generator = seeded()
    tokens, heads, kv_heads, size = 7, 4, 2, 16
    dtype = torch.float16
    qkv = normal(generator, tokens, heads + 2 * kv_heads, size, scale=200.0).to(dtype)
    qkv[0, heads:] = 6e4
    qkv[1, heads + kv_heads :] = -INFINITY
    weights = (normal(generator, size).to(dtype), normal(generator, size).to(dtype) * 300)
    weights = weights if norm else (None, None)
    slots = torch.randperm(20, generator=generator)[:tokens]
    cos_sin = compute_rotations(torch.arange(tokens), inverse_frequencies(size, 1e4))
    scales = KVScales(0.3, 1.7)
    stored = []
    for rotate, device in ((rotate_and_store, "cpu"), (rope_triton.rotate_and_store, DEVICE)):
        pools = [make_pool(20, kv_heads, size, device) for _ in range(2)]
        given = [x if x is None else x.to(device) for x in (cos_sin, *pools, slots, *weights)]
        rotate(qkv.clone().to(device), heads, kv_heads, *given, 1e-6, scales)
        stored.append([pool.float().cpu() for pool in pools])
    (keys, values), (kernel_keys, kernel_values) = (
        [pool[slots] for pool in pools] for pools in stored
    )
    is_right = kernel_values == values
    if not ON_GPU:  # the interpreter loses the carry of numbers that round up to a power of two
        is_right |= values.frexp().mantissa.abs() == 0.5
    assert is_right.all()
    assert kernel_values[0].eq(448).all()
    assert kernel_values[1].eq(-448).all()
    # Keys are rotated, and rounding errors before the conversion may make a number its neighbour.
    assert keys.abs().eq(448).any()
    wrong = (keys - kernel_keys).abs() > 0.13 * keys.abs() + 0.01
    assert ON_GPU or (keys[wrong].frexp().mantissa.abs() == 0.5).all()
    assert wrong.sum() == 0 or not ON_GPU
    assert keys.ne(kernel_keys).float().mean() < 0.1


def test_rows_of_latents_saturate() -> None:
    latents = torch.full((2, 24), 1e6)
    pool = make_pool(4, 1, 24)
    rotate_and_store_latents(
        torch.zeros(2, 3, 16),
        latents,
        torch.full((16,), 1e6),
        1e-6,
        compute_rotations(torch.arange(2), inverse_frequencies(8, 1e4)),
        pool,
        torch.tensor([2, 0]),
        interleaved=True,
        scale=0.5,
    )
    assert pool[[2, 0], :, :16].float().eq(448).all()
    assert not pool[[2, 0]].isnan().any()
    assert pool[[1, 3]].isnan().all()
