"""Weights in MXFP4 (OCP Microscaling Formats, 2023): four bits each, and one scale for 32 inputs.

A code has a sign, two bits of exponent and one of mantissa (E2M1). A scale is a power of two
(E8M0). bfloat16 represents every product of both exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# The largest scale is NaN.
_SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# By code.
_VALUES = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))


class Mxfp4Weight(NamedTuple):
    """A stack of matrices.

    Attributes:
        blocks: uint8 ``[matrices, outputs, inputs / 32, 16]``, contiguous. A byte has the codes of
            two inputs, that of the first in its lower bits.
        scales: uint8 ``[matrices, outputs, inputs / 32]``: exponents plus 127. From
            :func:`allocate_scales`, or contiguous, for which a GPU is slower.
    """

    blocks: torch.Tensor
    scales: torch.Tensor

    def dequantize_matrix(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one matrix of the stack, ``[outputs, inputs]``."""
        return dequantize_mxfp4(self.blocks[index], self.scales[index], dtype)


def allocate_scales(matrices: int, outputs: int, groups: int) -> torch.Tensor:
    """Return memory for the scales of a stack on the default device. Those of neighbouring outputs
    are adjacent, because a program of a kernel reads few groups of many outputs at a time."""
    return torch.empty(matrices, groups, outputs, dtype=torch.uint8).transpose(1, 2)


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``[outputs, inputs]`` of a matrix's blocks and scales."""
    values = torch.tensor(_VALUES, dtype=torch.float32, device=blocks.device)
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2).int()
    exponents = scales.int() - _SCALE_BIAS
    return torch.ldexp(values[codes], exponents[..., None]).flatten(-2).to(dtype)
