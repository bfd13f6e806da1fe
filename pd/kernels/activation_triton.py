"""The kernel for :mod:`pd.kernels.activation`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

if TYPE_CHECKING:
    import torch

_BLOCK = 1024


@triton.jit
def apply_gate(gate, up, DTYPE: tl.constexpr):
    """``silu(gate) * up`` of float32. We round after each step, as if its result were stored."""
    gate = gate.to(DTYPE).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    return (silu * up.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def apply_clamped_gate(gate, up, alpha, limit, DTYPE: tl.constexpr):
    """:func:`pd.kernels.activation.clamped_swiglu` of float32, rounded once before and after."""
    gate = tl.minimum(gate.to(DTYPE).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(DTYPE).to(tl.float32), -limit), limit)
    return ((up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))).to(DTYPE)


@triton.jit
def _silu_and_mul(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, apply_gate(gate, up, out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """:func:`pd.kernels.activation.silu_and_mul`."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    rows = out.numel() // size
    if rows:
        grid = rows, triton.cdiv(size, _BLOCK)
        launch_kernel(
            _silu_and_mul, grid, out.device, gate_up, out, size, BLOCK=_BLOCK, num_warps=4
        )
    return out
