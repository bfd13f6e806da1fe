"""The pool's layout, which transfers and attention rely on, and its page copies."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from pd.core.node_info import KVLayout, Plane
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
    assert KVPool.count_page_bytes(layout) * 4 == total


def test_keys_and_values_are_views(pool: KVPool) -> None:
    assert torch.equal(pool.get_keys(1), pool.planes[0].buffer[1, 0])
    pool.get_values(2)[5] = -1
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


PLANES = KVLayout.of_model(
    2,
    2,
    16,
    "float32",
    8,
    extra_planes=(
        Plane("latent", 1, 1, 24, "bfloat16", vectors=1, ranks="first"),
        Plane("head", 1, 4, 8, "float16"),
    ),
)


@pytest.fixture
def planes() -> KVPool:
    pool = KVPool(PLANES, 6, "cpu")
    pool.memory.random_(generator=torch.Generator().manual_seed(1))
    return pool


def test_planes_lie_in_one_allocation(planes: KVPool) -> None:
    assert [tuple(plane.buffer.shape) for plane in planes.planes] == [
        (2, 2, 56, 2, 16),
        (1, 1, 56, 1, 24),
        (1, 2, 56, 4, 8),
    ]
    assert [plane.first_layer for plane in planes.planes] == [0, 2, 3]
    begin = planes.memory.data_ptr()
    for plane, extent in zip(planes.planes, PLANES.plane_extents(56), strict=True):
        assert plane.buffer.is_contiguous()
        assert plane.buffer.data_ptr() - begin == extent.start
        assert plane.buffer.nbytes == len(extent)
    assert KVPool.count_page_bytes(PLANES) * 7 == sum(
        plane.buffer.nbytes for plane in planes.planes
    )
    assert (planes.device, planes.dtype) == (torch.device("cpu"), torch.float32)


def test_layers_are_numbered_through_all_planes(planes: KVPool) -> None:
    model, latent, head = (plane.buffer.view(torch.int16) for plane in planes.planes)
    assert torch.equal(planes.get_values(1).view(torch.int16), model[1, 1])
    assert torch.equal(planes.get_keys(2).view(torch.int16), latent[0, 0])
    assert torch.equal(planes.get_values(2).view(torch.int16), latent[0, 0]), "of a lone vector"
    assert torch.equal(planes.get_values(3).view(torch.int16), head[0, 1])


def test_a_view_numbers_the_layers_of_its_plane_from_0(planes: KVPool) -> None:
    view = planes.view_plane("head")
    assert (view.page_size, view.num_pages) == (8, 6)
    assert view.get_keys(0).data_ptr() == planes.get_keys(3).data_ptr()
    assert view.get_values(0).data_ptr() == planes.get_values(3).data_ptr()
    with pytest.raises(KeyError, match="tail"):
        planes.view_plane("tail")


@pytest.mark.parametrize("copy_bytes", [1, 1 << 26])
def test_pages_of_all_planes_come_back_from_host_memory(
    planes: KVPool, monkeypatch: pytest.MonkeyPatch, copy_bytes: int
) -> None:
    monkeypatch.setattr("pd.engine.kv_pool._COPY_BYTES", copy_bytes)
    pages = np.array([5, 0, 2], np.int32)
    digest = planes.compute_digest(pages, (0,), 24)
    copies = planes.gather_pages(pages)
    assert [tuple(copy.shape[:4]) for copy in copies] == [(2, 2, 3, 8), (1, 1, 3, 8), (1, 2, 3, 8)]
    planes.memory.zero_()
    planes.scatter_pages(np.array([1, 5, 3], np.int32), copies)
    assert planes.compute_digest(np.array([1, 5, 3], np.int32), (0,), 24) == digest
    assert not any(plane.buffer[:, :, :8].any() for plane in planes.planes)


def test_parts_of_a_rank_lie_where_they_lie_on_rank_0() -> None:
    layout = msgspec.structs.replace(PLANES, tp_size=2)
    first, second = (KVPool(layout.of_rank(rank), 6, "cpu") for rank in range(2))
    assert len(first.common_memory) == len(second.memory) < len(first.memory)
    first.set_parts([pool.memory.data_ptr() for pool in (first, second)], layout)
    model, latent, head = first.planes
    for plane, other in zip((model, head), second.planes, strict=True):
        assert plane.parts == [plane.buffer.data_ptr(), other.buffer.data_ptr()]
    assert latent.parts == (latent.buffer.data_ptr(),)
