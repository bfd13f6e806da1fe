"""The pool's layout, which transfers and attention rely on, and its page copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pd.core.node_info import KVLayout
from pd.engine.kv_pool import KVPool

LAYOUT = KVLayout.of_model(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", page_size=8)


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool(LAYOUT, 6, "cpu")
    pool.planes[0].buffer.copy_(
        torch.arange(pool.planes[0].buffer.numel()).view(pool.planes[0].buffer.shape)
    )
    return pool


def test_layout_has_one_page_more_for_padding(pool: KVPool) -> None:
    assert pool.planes[0].buffer.shape == (3, 2, 7 * 8, 2, 4)
    assert pool.planes[0].buffer.is_contiguous()
    assert (pool.num_pages, pool.page_size) == (6, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_begins_as_zeros_of_its_dtype(dtype: str) -> None:
    layout = KVLayout.of_model(num_layers=1, num_kv_heads=1, head_dim=2, dtype=dtype, page_size=2)
    pool = KVPool(layout, 3, "cpu")
    assert pool.planes[0].buffer.dtype == getattr(torch, dtype)
    assert not pool.planes[0].buffer.any()
    total = pool.planes[0].buffer.numel() * pool.planes[0].buffer.element_size()
    assert KVPool.page_bytes(layout) * 4 == total


def test_keys_and_values_are_views(pool: KVPool) -> None:
    assert torch.equal(pool.key(1), pool.planes[0].buffer[1, 0])
    pool.value(2)[5] = -1
    assert (pool.planes[0].buffer[2, 1, 5] == -1).all()


@pytest.mark.parametrize("copy_bytes", [1, 5000, 1 << 26])
def test_pages_come_back_from_host_memory_into_other_pages(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch, copy_bytes: int
) -> None:
    monkeypatch.setattr("pd.engine.kv_pool._COPY_BYTES", copy_bytes)
    before = pool.planes[0].buffer.clone()
    (host,) = pool.gather_pages(np.array([5, 0, 2], np.int32))
    assert host.shape == (3, 2, 3, 8, 2, 4)
    pool.planes[0].buffer.zero_()
    pool.scatter_pages(np.array([1, 5, 3], np.int32), [host])
    for source, target in ((5, 1), (0, 5), (2, 3)):
        found = pool.planes[0].buffer[:, :, target * 8 : target * 8 + 8]
        assert torch.equal(found, before[:, :, source * 8 : source * 8 + 8])
    assert not pool.planes[0].buffer[:, :, :8].any()


def test_pages_in_host_memory_are_a_copy(pool: KVPool) -> None:
    (host,) = pool.gather_pages(np.array([0], np.int32))
    pool.planes[0].buffer.zero_()
    assert host.any()
