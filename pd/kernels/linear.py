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
    from pd.kernels.fp8 import Fp8Inputs, Fp8Rows, Weight

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


def linear(
    x: torch.Tensor | Fp8Rows, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[rows, inputs]``, in fp8 only if the weight is.
        weight: ``[outputs, inputs]``, contiguous, from :func:`pack_weight` or in fp8.
        bias: ``[outputs]``.

    Returns:
        ``[rows, outputs]`` in the dtype of ``x``.
    """
    if isinstance(weight, fp8.Fp8Weight):
        return _multiply_fp8(x, weight, bias)
    assert isinstance(x, torch.Tensor)
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
    x: torch.Tensor | Fp8Rows, weight: fp8.Fp8Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute :func:`linear`. With more than a few rows, torch's kernels are faster."""
    rows = x if isinstance(x, fp8.Fp8Rows) else quantize_rows(x, weight.inputs)
    if not uses_triton(rows.values):
        return fp8.multiply_fp8(rows, weight, bias)
    from pd.kernels import fp8_triton

    if fp8_triton.can_multiply_row(rows, weight):
        return fp8_triton.multiply_row(rows, weight, bias)
    count = len(rows.values)
    if (
        0 < count <= fp8_triton.MAX_SUM_ROWS
        and rows.values.shape[1] >= len(weight.values)
        and fp8.can_multiply_values(rows, weight)
    ):
        return fp8_triton.scale_sums(fp8.multiply_values(rows, weight), rows, weight, bias)
    if count > fp8_triton.MAX_CHANNEL_ROWS and fp8.can_multiply_scaled(rows, weight):
        return fp8.multiply_scaled(rows, weight, bias)
    if count > fp8_triton.MAX_BLOCK_ROWS and fp8.can_multiply_blocks(rows, weight):
        return fp8.multiply_blocks(rows, weight, bias)
    return fp8_triton.multiply_rows(rows, weight, bias)


def quantize_rows(x: torch.Tensor, inputs: Fp8Inputs) -> Fp8Rows:
    """See :func:`pd.kernels.fp8.quantize_rows`."""
    if uses_triton(x):
        from pd.kernels import fp8_rows_triton

        return fp8_rows_triton.quantize_rows(x, inputs)
    return fp8.quantize_rows(x, inputs)


def silu_and_quantize(gate_up: torch.Tensor, inputs: Fp8Inputs) -> Fp8Rows:
    """Convert the result of :func:`pd.kernels.activation.silu_and_mul` to fp8."""
    if uses_triton(gate_up):
        from pd.kernels import fp8_rows_triton

        return fp8_rows_triton.silu_and_quantize(gate_up, inputs)
    return fp8.quantize_rows(silu_and_mul(gate_up), inputs)


def gate_up_silu(
    x: torch.Tensor | Fp8Rows, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`pd.kernels.activation.silu_and_mul` of :func:`linear`.

    Args:
        x: ``[rows, inputs]``, in fp8 only if the weight is.
        weight: ``[2 * size, inputs]``, gate then up, contiguous, from :func:`pack_weight` or in
            fp8.
        bias: ``[2 * size]``.

    Returns:
        ``[rows, size]``.
    """
    if isinstance(weight, torch.Tensor) and isinstance(x, torch.Tensor) and uses_triton(x):
        from pd.kernels import linear_triton

        if linear_triton.can_multiply(x, weight):
            return linear_triton.linear(x, weight, bias, is_gated=True)
        from pd.kernels import gate_up_triton

        if bias is None and gate_up_triton.can_multiply(x, weight):
            return gate_up_triton.gate_up_silu(x, weight)
    return silu_and_mul(linear(x, weight, bias))
