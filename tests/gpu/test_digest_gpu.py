"""Digests on a GPU: the same values, beside the forward pass, soon and in little memory."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import torch

from pd.core.node_info import KVLayout
from pd.engine.digests import Digests
from pd.engine.kv_pool import KVPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PAGE_SIZE = 16


def filled(layers: int, tokens: int, dtype: str, heads: int = 8, dim: int = 128) -> KVPool:
    layout = KVLayout.of_model(layers, heads, dim, dtype, PAGE_SIZE)
    pool = KVPool(layout, tokens // PAGE_SIZE, "cuda")
    pool.planes[0].buffer.normal_(generator=torch.Generator("cuda").manual_seed(1))
    return pool


def scattered(pool: KVPool) -> np.ndarray:
    return np.random.default_rng(2).permutation(pool.num_pages).astype(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpu_and_a_cpu_find_the_same(dtype: str) -> None:
    pool = filled(3, 1024, dtype)
    copy = KVPool(pool.layout, pool.num_pages, "cpu")
    copy.planes[0].buffer.copy_(pool.planes[0].buffer)
    pages = scattered(pool)
    digests = Digests(pool, on_done=lambda: None)
    try:
        for start, stop in ((0, 1024), (5, 1000), (700, 701)):
            expected = copy.compute_digest(pages, (start,), stop)
            assert digests.start_digest(pages, (start,), stop).result(30) == expected
    finally:
        digests.close()


def test_it_reads_what_was_queued_before_it_and_delays_nothing_after() -> None:
    pool = filled(4, 4096, "bfloat16")
    pages = scattered(pool)
    digests = Digests(pool, on_done=lambda: None)
    try:
        expected = pool.compute_digest(pages, (0,), 4096)
        values = pool.planes[0].buffer.clone()
        pool.planes[0].buffer.zero_()
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        pool.planes[0].buffer.copy_(values)
        begun = time.perf_counter()
        digest = digests.start_digest(pages, (0,), 4096)
        assert time.perf_counter() - begun < 0.05, "asking must not wait for the GPU"
        assert digest.result(30) == expected
    finally:
        digests.close()


def test_a_gibibyte_takes_tens_of_milliseconds_and_little_memory() -> None:
    """The KV of 8,192 tokens of Llama-3.1-8B."""
    pool = filled(32, 8192, "bfloat16")
    pages = scattered(pool)
    digests = Digests(pool, on_done=lambda: None)
    try:
        digests.start_digest(pages, (0,), 8192).result(60)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            digests.start_digest(pages, (0,), 8192).result(60)
            times.append(time.perf_counter() - begun)
        used = torch.cuda.max_memory_allocated() - before
    finally:
        digests.close()
    print(f"1 GiB in {statistics.median(times) * 1e3:.1f} ms, {used >> 20} MiB")
    assert used < 256 << 20
    assert statistics.median(times) < 0.1
