"""Products of fp8 weights with inputs that are converted to fp8 (``float8_e4m3fn``).

A value in fp8 stands for itself times a scale. Scales of inputs follow from each token alone, never
from others of the same step, so a token does not depend on its neighbours.

The layout serves the kernels: groups of 128 inputs that share scales begin at multiples of 128, and
rows of weights are padded to whole groups. So no kernel checks the bounds of a group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from typing import TypeAlias

FP8 = torch.float8_e4m3fn
# The largest number in fp8. torch converts everything above 464 to NaN, so we saturate first.
LARGEST = 448.0
# A token of zeros has this scale.
_SMALLEST_SCALE = 1e-12 / LARGEST
# Rows of matrices without groups are padded to a multiple of this, which tensor cores need.
_ALIGNMENT = 16
# Inputs, and outputs, of a block for which cuBLAS multiplies, on GPUs of this generation alone.
_BLOCK = 128
_BLOCKS_GENERATION = 9
# GPUs with tensor cores for fp8, from Ada on.
_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Fp8Inputs:
    """How the inputs of a weight are converted.

    Attributes:
        size: number of inputs.
        group: inputs that share a scale, 128; 0 if all of a token do.
        lead: zeros before the first input in the padded layout. A rank whose part begins in the
            middle of a group of the whole model has them.
        scale: float32 ``[1]``, one scale for all tokens, from the checkpoint. None if each token
            has its own.
        rounds_scales: whether scales are rounded up to powers of two.
    """

    size: int
    group: int = 0
    lead: int = 0
    scale: torch.Tensor | None = None
    rounds_scales: bool = False

    @property
    def width(self) -> int:
        """Width of the padded layout."""
        unit = self.group or _ALIGNMENT
        return -(-(self.lead + self.size) // unit) * unit

    @property
    def num_groups(self) -> int:
        """Number of scales of a token."""
        return self.width // self.group if self.group else 1


class Fp8Rows(NamedTuple):
    """Inputs in fp8.

    Attributes:
        values: fp8 ``[rows, width]`` in the padded layout.
        scales: float32 ``[rows, num_groups]``, the scales of a group next to each other. If
            ``stride(1)`` is more than the number of rows, memory of ``values`` and ``scales`` goes
            on up to that many rows, whose contents do not matter.
        dtype: dtype of the inputs before, which results of products have.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix in fp8, or a stack of matrices.

    Attributes:
        values: fp8 ``[..., outputs, width]``, contiguous, in the padded layout of ``inputs``.
        scales: float32 ``[..., ceil(outputs / rows), num_groups]``, contiguous.
        rows: outputs that share a scale: a power of two up to 128.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rows: int
    inputs: Fp8Inputs

    def dequantize_weight(self) -> torch.Tensor:
        """Return float32 ``[..., outputs, inputs]``."""
        inputs = self.inputs
        by_row = self.scales.repeat_interleave(self.rows, dim=-2)[..., : self.values.shape[-2], :]
        return _scale_groups(self.values, by_row, inputs).contiguous()

    def select(self, index: int) -> Fp8Weight:
        """Return one matrix of a stack."""
        return replace(self, values=self.values[index], scales=self.scales[index])


@dataclass(frozen=True)
class WideWeight:
    """A weight of fp8 in float32, for processors without products of fp8. Inputs are still rounded
    to fp8.

    Attributes:
        values: float32 ``[..., outputs, inputs]``, perhaps from
            :func:`pd.kernels.linear.pack_weight`.
    """

    values: torch.Tensor
    inputs: Fp8Inputs

    def select(self, index: int) -> WideWeight:
        """Return one matrix of a stack."""
        return replace(self, values=self.values[index])


if TYPE_CHECKING:
    Weight: TypeAlias = torch.Tensor | Fp8Weight | WideWeight
    """A matrix ``[outputs, inputs]``, or a stack ``[experts, outputs, inputs]``."""


def quantize_rows(x: torch.Tensor, inputs: Fp8Inputs) -> Fp8Rows:
    """Convert inputs to fp8, as the largest of those that share a scale becomes 448. With a scale
    from the checkpoint, larger values saturate.

    Args:
        x: ``[rows, size]``.
    """
    padded = functional.pad(x.float(), (inputs.lead, inputs.width - inputs.lead - inputs.size))
    groups = padded.view(len(x), inputs.num_groups, inputs.width // inputs.num_groups)
    if inputs.scale is not None:
        scales = inputs.scale.expand(len(x), 1).contiguous()
    else:
        scales = compute_scales(groups.abs().amax(-1), inputs.rounds_scales)
    values = convert_saturated(groups / scales[..., None]).flatten(1)
    return Fp8Rows(values, scales.t().contiguous().t(), x.dtype)


def compute_scales(largest: torch.Tensor, rounds: bool = False) -> torch.Tensor:
    """Compute the scales with which numbers up to ``largest`` fit into fp8."""
    scales = (largest / LARGEST).clamp_(min=_SMALLEST_SCALE)
    if rounds:  # the next power of two: a float without a mantissa
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scales


def convert_saturated(x: torch.Tensor) -> torch.Tensor:
    """Convert to fp8. Numbers beyond its range become the largest ones; NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(FP8)


def dequantize_rows(rows: Fp8Rows, inputs: Fp8Inputs) -> torch.Tensor:
    """Return float32 ``[rows, size]``."""
    return _scale_groups(rows.values, rows.scales, inputs)


def _scale_groups(values: torch.Tensor, scales: torch.Tensor, inputs: Fp8Inputs) -> torch.Tensor:
    """Multiply fp8 ``[..., width]`` with scales ``[..., num_groups]``. Returns float32 ``[...,
    size]``."""
    shape = inputs.num_groups, inputs.width // inputs.num_groups
    groups = values.float().view(*values.shape[:-1], *shape)
    wide = groups.mul_(scales[..., None]).view(values.shape)
    return wide[..., inputs.lead : inputs.lead + inputs.size]


def round_inputs(x: torch.Tensor, inputs: Fp8Inputs) -> torch.Tensor:
    """Round ``[rows, size]`` to what fp8 can represent. Returns float32."""
    return dequantize_rows(quantize_rows(x, inputs), inputs)


def has_fp8(device: torch.device) -> bool:
    """Whether products of fp8 run on this device."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= _CAPABILITY


def can_multiply_scaled(rows: Fp8Rows, weight: Fp8Weight) -> bool:
    """Whether :func:`multiply_scaled` supports these: a scale for each row of the weight, and a
    result in bfloat16."""
    is_aligned = weight.values.shape[0] % _ALIGNMENT == 0
    return (
        not weight.inputs.group and weight.rows == 1 and rows.dtype == torch.bfloat16 and is_aligned
    )


def multiply_scaled(rows: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with torch's kernel. Returns bfloat16 ``[rows, outputs]``."""
    by_row = functional.ScalingType.RowWise
    scales = weight.scales.view(1, -1)
    return functional.scaled_mm(
        rows.values,
        weight.values.t(),
        rows.scales,
        by_row,
        scales,
        by_row,
        bias=bias,
        use_fast_accum=True,
    )


def can_multiply_values(rows: Fp8Rows, weight: Fp8Weight) -> bool:
    """Whether :func:`multiply_values` supports these: a scale for each row of the weight."""
    is_aligned = weight.values.shape[0] % _ALIGNMENT == 0
    return not weight.inputs.group and weight.rows == 1 and is_aligned


def multiply_values(rows: Fp8Rows, weight: Fp8Weight) -> torch.Tensor:
    """Multiply values without their scales in cuBLAS. Returns float32 ``[rows, outputs]``."""
    whole = functional.ScalingType.TensorWise
    one = _make_one(rows.values.device)
    return functional.scaled_mm(
        rows.values,
        weight.values.t(),
        one,
        whole,
        one,
        whole,
        output_dtype=torch.float32,
        use_fast_accum=True,
    )


@functools.cache
def _make_one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def can_multiply_blocks(rows: Fp8Rows, weight: Fp8Weight) -> bool:
    """Whether :func:`multiply_blocks` supports these: whole blocks of 128 by 128, a number of rows
    in memory that is a multiple of 4, and a result in bfloat16, on Hopper."""
    outputs, _ = weight.values.shape
    return (
        rows.values.is_cuda
        and torch.cuda.get_device_capability(rows.values.device)[0] == _BLOCKS_GENERATION
        and rows.dtype == torch.bfloat16
        and weight.rows == weight.inputs.group == _BLOCK
        and outputs % _BLOCK == 0
        and weight.inputs.num_groups % 4 == 0
        and rows.scales.stride(1) % 4 == 0
    )


def multiply_blocks(rows: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with cuBLAS. Returns bfloat16 ``[rows, outputs]``."""
    count, width = rows.values.shape
    padded = rows.scales.stride(1)
    out = functional.scaled_mm(
        rows.values.as_strided((padded, width), (width, 1)),
        weight.values.t(),
        rows.scales.as_strided((padded, rows.scales.shape[1]), (1, padded)),
        functional.ScalingType.BlockWise1x128,
        weight.scales.t(),
        functional.ScalingType.BlockWise128x128,
    )[:count]
    return out if bias is None else out.add_(bias)


def multiply_fp8(
    rows: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute :func:`pd.kernels.linear.linear` for inputs and a weight in fp8, in float32."""
    wide = functional.linear(dequantize_rows(rows, weight.inputs), weight.dequantize_weight())
    return (wide if bias is None else wide + bias.float()).to(rows.dtype)
