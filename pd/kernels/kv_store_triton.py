"""The conversion of :mod:`pd.kernels.kv_store` inside other kernels."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from pd.kernels.fp8_rows_triton import convert_saturated


@triton.jit
def convert_stored(x, inverse, TO_FP8: tl.constexpr):
    """Convert keys or values to the dtype of the pool. ``inverse`` is that of the scale of fp8."""
    if TO_FP8:
        x = convert_saturated(x.to(tl.float32) * inverse)
    return x
