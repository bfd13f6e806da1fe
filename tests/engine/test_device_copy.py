"""Copies between host and device: kernels take what they are given for contiguous."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pd.engine.device_copy import to_device

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "values",
    [np.array([(1, 2), (3, 4), (5, 6)]).T, np.arange(10)[::3], [[1, 2], [3, 4]], [], np.int64(7)],
    ids=["transposed", "strided", "list", "empty", "one number"],
)
def test_what_arrives_is_contiguous(values: object, device: str) -> None:
    made = to_device(values, torch.int64, torch.device(device))
    assert made.is_contiguous()
    assert made.tolist() == np.asarray(values).tolist()
