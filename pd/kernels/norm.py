"""RMS normalization (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch

from pd.kernels import fp8
from pd.kernels.dispatch import uses_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: ``[..., size]``, float32, bfloat16 or float16.
        weight: ``[size]``, same dtype.

    Returns:
        A new tensor like ``x``.
    """
    if uses_triton(x):
        from pd.kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    if x.dtype == torch.float32:
        scale: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        return (x * scale).mul_(weight)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``residual += x`` in place, rounded to its dtype, and :func:`rms_norm` of the sum.

    Args:
        residual: contiguous ``[..., size]``, float32, bfloat16 or float16.
        x: like ``residual``, left as it is.
        weight: ``[size]``, same dtype.

    Returns:
        A new tensor like ``x``.
    """
    if uses_triton(x):
        from pd.kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps, residual)
    residual += x
    return rms_norm(residual, weight, eps)


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inputs: fp8.Fp8Inputs,
    residual: torch.Tensor | None = None,
) -> fp8.Fp8Rows:
    """:func:`rms_norm`, or :func:`add_rms_norm` with a residual, and convert the result to fp8.

    Args:
        inputs: of the product that follows, without a lead.
    """
    if uses_triton(x):
        from pd.kernels import fp8_rows_triton

        return fp8_rows_triton.rms_norm(x, weight, eps, inputs, residual)
    normed = (
        rms_norm(x, weight, eps) if residual is None else add_rms_norm(residual, x, weight, eps)
    )
    return fp8.quantize_rows(normed, inputs)
