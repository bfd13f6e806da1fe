"""Matrix products with weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


def _onednn_linear() -> Callable[..., torch.Tensor] | None:
    """oneDNN's float32 inner product, if this build of torch has it.

    ``functional.linear`` calls MKL, which does not use AVX-512 on processors that are not Intel's:
    there oneDNN is 1.6 times as fast for 16 rows and twice for 256. It is the operator that
    ``torch.compile`` emits for frozen weights, and takes plain weights as they are.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        operator = torch.ops.mkldnn._linear_pointwise.default
        x, weight = torch.eye(2, 3), torch.eye(2, 3)
        works = torch.equal(operator(x, weight, None, "none", [], ""), torch.eye(2))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return operator if works else None


_ONEDNN = _onednn_linear()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[rows, inputs]``.
        weight: ``[outputs, inputs]``, contiguous.
        bias: ``[outputs]``.

    Returns:
        ``[rows, outputs]``.
    """
    if _ONEDNN is not None and x.dtype == torch.float32 and x.device.type == "cpu" and len(x):
        return _ONEDNN(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)
