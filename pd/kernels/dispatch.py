"""Chooses between Triton kernels and plain torch."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def uses_triton(x: torch.Tensor) -> bool:
    """Whether operations on ``x`` run as Triton kernels: on a CUDA device, if Triton is
    installed."""
    return x.is_cuda and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
