"""Matrix products with weights."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from pd.kernels import fp8
from pd.kernels.activation import silu_and_mul
from pd.kernels.dispatch import uses_triton

if TYPE_CHECKING:
    from pd.kernels.fp8 import Weight

# Packed weights are laid out for this number of rows. Other numbers use the same layout: none is
# slower than with its own layout, and a few rows are faster.
_PACKED_ROWS = 16
# With so few rows, cuBLASLt chooses faster kernels than cuBLAS for matrices with no more outputs
# than inputs (measured on an H200). Torch calls cuBLASLt if there is a bias.
_LT_ROWS = 64
# Torch and oneDNN cache their preparations for each number of rows, by default for 1,024 of them
# each. So a process that computes prompts of many lengths would grow. They read these variables
# when they are first used.
for _variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "128")


def _has_onednn() -> bool:
    """Whether this build of torch has oneDNN's float32 inner product.

    ``functional.linear`` calls MKL, which uses AVX-512 only on Intel's processors; on others oneDNN
    is faster. ``torch.compile`` emits the same operators for frozen weights. They take plain
    weights or packed ones.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.eye(2, 3, device="cpu")
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        product = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product, torch.eye(2, device="cpu"))


_ONEDNN = _has_onednn()


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in the layout with which :func:`linear` is fastest, or the same tensor.

    Args:
        weight: ``[outputs, inputs]``. Only :func:`linear` may use the result.
    """
    if _ONEDNN and weight.dtype == torch.float32 and weight.device.type == "cpu":
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        return packed
    return weight


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[rows, inputs]``.
        weight: ``[outputs, inputs]``, contiguous, from :func:`pack_weight` or in fp8.
        bias: ``[outputs]``.

    Returns:
        ``[rows, outputs]`` in the dtype of ``x``.
    """
    if isinstance(weight, fp8.Fp8Weight):
        return _multiply_fp8(x, weight, bias, is_gated=False)
    if isinstance(weight, fp8.WideWeight):
        rounded = fp8.round_inputs(x, weight.inputs)
        return linear(rounded, weight.values, None if bias is None else bias.float()).to(x.dtype)
    if _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu":
        if len(x) == 0:
            return x.new_empty(0, weight.shape[0])
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    if uses_triton(x):
        from pd.kernels import linear_triton

        if linear_triton.can_multiply(x, weight):
            return linear_triton.linear(x, weight, bias, is_gated=False)
        outputs, inputs = weight.shape
        if bias is None and x.element_size() == 2 and len(x) <= _LT_ROWS and outputs <= inputs:
            bias = _make_zero_bias(outputs, weight.dtype, weight.device)
    return functional.linear(x, weight, bias)


@functools.cache
def _make_zero_bias(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def _multiply_fp8(
    x: torch.Tensor, weight: fp8.Fp8Weight, bias: torch.Tensor | None, is_gated: bool
) -> torch.Tensor:
    """Compute :func:`linear` or :func:`gate_up_silu`. With many rows, torch's kernel is faster if a
    row of the weight has one scale."""
    is_fused = False
    if not uses_triton(x):
        product = fp8.multiply_fp8(x, weight, bias)
    else:
        from pd.kernels import fp8_triton

        rows = fp8_triton.quantize_rows(x, weight.inputs)
        if len(x) > fp8_triton.MAX_CHANNEL_ROWS and fp8.can_multiply_scaled(x, weight):
            product = fp8.multiply_scaled(rows, weight, bias)
        else:
            is_fused = is_gated and len(x) <= fp8_triton.MAX_GATED_ROWS
            product = fp8_triton.multiply_rows(rows, weight, bias, x.dtype, is_fused)
    return silu_and_mul(product) if is_gated and not is_fused else product


def gate_up_silu(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`pd.kernels.activation.silu_and_mul` of :func:`linear`.

    Args:
        x: ``[rows, inputs]``.
        weight: ``[2 * size, inputs]``, gate then up, contiguous, from :func:`pack_weight` or in
            fp8.
        bias: ``[2 * size]``.

    Returns:
        ``[rows, size]``.
    """
    if isinstance(weight, fp8.Fp8Weight):
        return _multiply_fp8(x, weight, bias, is_gated=True)
    if isinstance(weight, torch.Tensor) and uses_triton(x):
        from pd.kernels import linear_triton

        if linear_triton.can_multiply(x, weight):
            return linear_triton.linear(x, weight, bias, is_gated=True)
        from pd.kernels import gate_up_triton

        if bias is None and gate_up_triton.can_multiply(x, weight):
            return gate_up_triton.gate_up_silu(x, weight)
    return silu_and_mul(linear(x, weight, bias))
