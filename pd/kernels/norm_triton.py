"""The kernels for :mod:`pd.kernels.norm`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    if ADD:
        there = residual + row * SIZE + columns
        before = tl.load(there, mask=mask, other=0.0)
        values = (before.to(tl.float32) + values.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(there, values, mask=mask)
    wide = values.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = wide.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + row * SIZE + columns, normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`pd.kernels.norm.rms_norm`, or ``add_rms_norm`` with a contiguous ``residual``."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0] == 0:
        return out
    block = triton.next_power_of_2(size)
    launch_kernel(
        _rms_norm,
        (rows.shape[0],),
        x.device,
        rows,
        rows if residual is None else residual,
        weight,
        out,
        rows.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=max(1, min(16, block // 512)),
    )
    return out
