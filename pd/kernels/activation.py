"""The gated activation of Llama's MLP (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from pd.kernels.dispatch import uses_triton

if TYPE_CHECKING:
    import torch


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
