"""The gated activations of MLPs (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.nn import functional

from pd.kernels.dispatch import uses_triton

if TYPE_CHECKING:
    import torch


class ClampedGate(NamedTuple):
    """The activation and the biases of gpt-oss's experts.

    Attributes:
        alpha, limit: see :func:`clamped_swiglu`.
        gate_up_bias: ``[experts, 2 * size]``, alternating gate and up like the rows of the weights.
        down_bias: ``[experts, hidden]``.
    """

    alpha: float
    limit: float
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up: ``[..., 2 * size]``, gate then up.

    Returns:
        A new tensor ``[..., size]``.
    """
    if uses_triton(gate_up):
        from pd.kernels import activation_triton

        return activation_triton.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` with ``gate`` up to ``limit`` and ``up`` within
    ``±limit`` (gpt-oss, 2025). The kernels of :mod:`pd.kernels.moe_triton` contain this operation.

    Args:
        gate_up: ``[..., 2 * size]``, alternating gate and up.

    Returns:
        A new tensor ``[..., size]``.
    """
    gate = gate_up[..., ::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * (alpha * gate).sigmoid())
