"""Arrays packed into one copy."""

from __future__ import annotations

import numpy as np
import torch

from pd.kernels.staging import ALIGNMENT, GraphMemory, PinnedStaging, count_packed_bytes

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def some_arrays(seed: int, sizes: tuple[int, ...] = (3, 5, 0, 7)) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    kinds = [np.int64, np.int32, np.int32, np.uint8]
    arrays = [random.integers(0, 200, n).astype(k) for n, k in zip(sizes, kinds, strict=True)]
    return [*arrays, random.integers(0, 200, (4, 3)).astype(np.int32)]


def assert_same(views: list[torch.Tensor], arrays: list[np.ndarray]) -> None:
    for view, array in zip(views, arrays, strict=True):
        assert np.array_equal(view.cpu().numpy(), array)
        assert view.cpu().numpy().dtype == array.dtype


def test_views_have_the_arrays_shapes_and_dtypes() -> None:
    staging = PinnedStaging(DEVICE)
    arrays = some_arrays(0)
    views = staging.upload_arrays(arrays)
    assert_same(views, arrays)
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in views if view.numel())
    assert views[0].device == DEVICE


def test_given_memory_means_fixed_addresses() -> None:
    staging, memory = PinnedStaging(DEVICE), GraphMemory(DEVICE)
    out = memory(count_packed_bytes(some_arrays(0)))
    first = [view.data_ptr() for view in staging.upload_arrays(some_arrays(0), out)]
    arrays = some_arrays(1)
    views = staging.upload_arrays(arrays, out)
    assert [view.data_ptr() for view in views] == first
    assert_same(views, arrays)


def test_reserved_memory_is_sent_as_it_was_written() -> None:
    """Whatever it held from before, in turns with uploads."""
    staging = PinnedStaging(DEVICE)
    sent = []
    for turn in range(6):
        arrays = some_arrays(turn)
        if turn % 3 == 0:
            sent.append((staging.upload_arrays(arrays), arrays))
            continue
        places = staging.reserve_arrays([(array.shape, array.dtype) for array in arrays])
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        sent.append((staging.send_arrays(places), arrays))
    for views, arrays in sent:
        assert_same(views, arrays)


def test_later_uploads_leave_earlier_ones_alone() -> None:
    """Also where they need more memory, and where the device has yet to begin with the first."""
    staging = PinnedStaging(DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda._sleep(10_000_000)
    batches = [some_arrays(i, (10**i, 2, 3, 1)) for i in range(6)]
    uploaded = [staging.upload_arrays(arrays) for arrays in batches]
    for views, arrays in zip(uploaded, batches, strict=True):
        assert_same(views, arrays)


def test_graphs_share_memory_until_one_needs_more() -> None:
    memory = GraphMemory(DEVICE)
    large = memory(1000)
    assert memory(10).data_ptr() == large.data_ptr()
    assert len(memory(2000)) == 2000
    assert len(large) == 1000
