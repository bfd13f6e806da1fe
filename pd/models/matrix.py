"""The memory of a weight: in the model's dtype, or in fp8 with scales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from pd.kernels.fp8 import FP8, Fp8Inputs, Fp8Weight, WideWeight
from pd.kernels.linear import pack_weight
from pd.models.config import BLOCK
from pd.models.tensor_parallel import Fp8Destination, WeightDestination

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.kernels.fp8 import Weight
    from pd.models.config import QuantizationConfig


def make_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Allocate a weight to be loaded, in the default dtype on the default device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def computes_wide(device: torch.device) -> bool:
    """Whether the device has no products of fp8, so that weights have to be dequantized."""
    return device.type == "cpu"


class Matrix(nn.Module):
    """A matrix of one or several projections of the same input, or a stack of such matrices.

    Args:
        outputs: number of outputs of each projection, in the order of the rows.
        size: number of inputs.
        quantization: None for weights in the model's dtype.
        stack: number of matrices; None for one without a dimension of its own.
        is_split: whether other ranks have other rows of each projection.
        first_input: place of the first input among those of all ranks.

    Attributes:
        values: ``[..., outputs, size]``; in fp8 in the layout of :class:`pd.kernels.fp8.Fp8Weight`.
        scales: scales of fp8 values; None for values in the model's dtype.
        input_scale: float32 ``[1]``, the largest of the checkpoint's scales of the inputs; None if
            it has none.
        quantization: how the values are quantized; None for values in the model's dtype.
    """

    values: torch.Tensor

    def __init__(
        self,
        outputs: Sequence[int],
        size: int,
        quantization: QuantizationConfig | None = None,
        *,
        stack: int | None = None,
        is_split: bool = False,
        first_input: int = 0,
    ) -> None:
        super().__init__()
        self._size, self._sum = size, sum(outputs)
        self._stack = () if stack is None else (stack,)
        self._dtype = torch.get_default_dtype()
        self._rows = 1
        self._prepared: Fp8Weight | WideWeight | None = None
        self.quantization = quantization
        self.scales: torch.Tensor | None = None
        self.input_scale: torch.Tensor | None = None
        if quantization is None:
            self.values = make_parameter(*self._stack, self._sum, size)
            return
        group = lead = 0
        if quantization.in_blocks:
            group, lead = BLOCK, first_input % BLOCK
            # Blocks may begin between the blocks of this matrix, so fewer rows share a scale.
            is_aligned = len(outputs) == 1 and not is_split
            self._rows = BLOCK if is_aligned else math.gcd(BLOCK, *outputs)
        if quantization.has_input_scales:
            self.input_scale = make_parameter(1, dtype=torch.float32)
            self.input_scale.zero_()
        self._inputs = Fp8Inputs(size, group, lead, self.input_scale, quantization.rounds_scales)
        self.values = make_parameter(*self._stack, self._sum, self._inputs.width, dtype=FP8)
        self.values.zero_()
        shape = -(-self._sum // self._rows), self._inputs.num_groups
        self.scales = make_parameter(*self._stack, *shape, dtype=torch.float32)

    def make_plain(self) -> None:
        """Have values in the model's dtype instead of fp8. Call this before anything is loaded."""
        if self.quantization is not None:
            self.quantization = self.scales = self.input_scale = None
            device = self.values.device
            del self.values  # frees its memory first
            shape = *self._stack, self._sum, self._size
            empty = torch.empty(shape, dtype=self._dtype, device=device)
            self.values = nn.Parameter(empty, requires_grad=False)

    def place_rows(
        self,
        start: int,
        stop: int | None,
        split: int | None,
        index: int | None = None,
        replicas: int = 1,
        groups: int = 1,
    ) -> WeightDestination:
        """Return the place of some rows of the matrix, or of one matrix of the stack.

        Args:
            split: dimension of these rows that the ranks divide.
            replicas, groups: see :class:`pd.models.tensor_parallel.WeightDestination`.
        """
        values = self.values if index is None else self.values[index]
        if self.scales is None:
            return WeightDestination(values[start:stop], split, None, replicas, groups)
        scales = self.scales if index is None else self.scales[index]
        lead = self._inputs.lead
        part = Fp8Destination(
            scales[start // self._rows : None if stop is None else -(-stop // self._rows)],
            self._rows,
            self.input_scale,
            self.make_plain,
        )
        mine = values[start:stop, lead : lead + self._size]
        return WeightDestination(mine, split, part, replicas, groups)

    @property
    def weight(self) -> Weight:
        """The weight as the kernels take it, after :meth:`prepare_weights`."""
        return self.values if self._prepared is None else self._prepared

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """How an operation before this product has to convert its result to fp8; None if it should
        not. After :meth:`prepare_weights`."""
        return self._inputs if isinstance(self._prepared, Fp8Weight) else None

    def prepare_weights(self) -> None:
        """Lay the weight out for the kernels, once it is loaded."""
        if self.scales is not None:
            weight = Fp8Weight(self.values, self.scales, self._rows, self._inputs)
            if computes_wide(weight.values.device):
                wide = weight.dequantize_weight()
                del self.values, self.scales, weight
                wide = wide if self._stack else pack_weight(wide)
                self._prepared = WideWeight(wide, self._inputs)
            else:
                self._prepared = weight
        elif not self._stack:
            self.values = nn.Parameter(pack_weight(self.values), requires_grad=False)
