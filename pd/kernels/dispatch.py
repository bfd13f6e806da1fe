"""Whether an operation runs as a Triton kernel or in plain torch."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def use_triton(x: torch.Tensor) -> bool:
    """True for a tensor on a CUDA device where Triton is installed."""
    return x.is_cuda and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
