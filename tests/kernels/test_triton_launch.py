"""A kernel is launched as the one that was compiled for such arguments."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from triton_device import DEVICE, ON_GPU, SEED

from pd.kernels.triton_launch import launch_kernel


@triton.jit
def _shift(x, out, count, step, scale, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    """out[i] = x[i * step] * scale, or twice that."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + columns * step, mask=columns < count, other=0.0).to(tl.float32) * scale
    if TWICE:
        values += values
    tl.store(out + columns, values.to(out.dtype.element_ty), mask=columns < count)


def test_every_launch_has_its_own_arguments() -> None:
    """Of every dtype, alignment, and number that Triton makes constants or special cases of, in
    any order."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    dtypes = [torch.float32, torch.float16]
    for _ in range(100 if ON_GPU else 15):
        count, step = rng.choice([1, 2, 16, 17, 64, 100]), rng.choice([1, 2, 3, 16, 32])
        first, twice, block = rng.choice([0, 1, 8, 16]), rng.random() < 0.5, rng.choice([16, 64])
        source, target = rng.choice(dtypes), rng.choice(dtypes)
        x = (torch.arange(4000) % 50).to(source).to(DEVICE)[first:]
        out = torch.full((200,), -1.0, dtype=target, device=DEVICE)
        there = out[rng.choice([0, 1, 16]) :]
        grid = (triton.cdiv(count, block),)
        settings = {"BLOCK": block, "TWICE": twice, "num_warps": rng.choice([1, 2])}
        for _ in range(2):  # the first compiles, if there was none like it
            there[:count] = -1
            launch_kernel(_shift, grid, x.device, x, there, count, step, 0.5, **settings)
        expected = x[: count * step : step].float() * (1.0 if twice else 0.5)
        assert torch.equal(there[:count].float(), expected), (count, step, first, settings)
        assert bool((there[count:] == -1).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_devices_than_the_current_one() -> None:
    for index in (1, 0, 1, 0):
        x = torch.arange(16.0, device=f"cuda:{index}")
        out = torch.empty_like(x)
        launch_kernel(_shift, (1,), x.device, x, out, 16, 1, 1.0, BLOCK=16, TWICE=False)
        assert torch.equal(out, x)
