"""The scales of a checkpoint's fp8 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pd.core.errors import UsageError
from pd.kernels.fp8 import compute_scales, convert_saturated
from pd.models.config import BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.models.tensor_parallel import Fp8Destination, TensorParallel, WeightDestination

# Endings of names, in place of that of the weight. A weight is always its fp8 value times the
# scale; DeepSeek's name for the scale means that it is the inverse of the one that was used before.
_SCALES = (".weight_scale", ".weight_scale_inv")
_INPUT_SCALES = (".input_scale", ".activation_scale")
# Ending of the names of scales in MXFP4, which have places of their own.
MXFP4_SCALES = "_scales"
# Scales of a KV cache in fp8, which :mod:`pd.models.kv_scales` reads, and of queries and weights of
# attention, which we do not quantize.
_UNUSED = ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale")


class WeightScale(NamedTuple):
    """The scales of one weight in a checkpoint.

    Attributes:
        name: the tensor's name, for errors.
        scale: float32, for the whole weight: ``[⌈outputs / 128⌉, ⌈inputs / 128⌉]`` with blocks,
            otherwise one scale or ``[outputs, 1]``.
        input_scale: float32 ``[1]``; None if scales follow from the inputs.
    """

    name: str
    scale: torch.Tensor
    input_scale: torch.Tensor | None


class Scales:
    """All scales of a checkpoint.

    Args:
        tensors: scales by the names that they have in the checkpoint.
        in_blocks, has_input_scales: see :class:`pd.models.config.QuantizationConfig`.

    Raises:
        UsageError: a scale is negative or not finite, or one of the inputs is missing.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], in_blocks: bool, has_input_scales: bool
    ) -> None:
        self._in_blocks = in_blocks
        self._names = frozenset(tensors)
        self._by_weight: dict[str, WeightScale] = {}
        inputs: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            weight = find_weight(name)
            if name.endswith(_SCALES):
                self._by_weight[weight] = WeightScale(name, _convert_scale(name, tensor), None)
            elif name.endswith(_INPUT_SCALES) and has_input_scales:
                inputs[weight] = _convert_scale(name, tensor)
        if has_input_scales:
            for weight, found in self._by_weight.items():
                scale = inputs.get(weight)
                if scale is None or scale.numel() != 1:
                    raise UsageError(
                        f"{found.name} needs one scale of the inputs "
                        f"({weight.removesuffix('.weight')}.input_scale), because activations are "
                        f"static; there are {0 if scale is None else scale.numel()}"
                    )
                self._by_weight[weight] = found._replace(input_scale=scale.view(1))

    def has_tensor(self, name: str) -> bool:
        """Whether a tensor with this name is one of the scales."""
        return name in self._names

    def find_scale(self, name: str) -> WeightScale | None:
        """Return the scales of the weight with this name; None if it is not quantized."""
        return self._by_weight.get(name)

    def copy_quantized(
        self, place: WeightDestination, tp: TensorParallel, part: torch.Tensor, scale: WeightScale
    ) -> None:
        """Copy this rank's ``part`` of a weight in fp8 to its place, with its scales. If the place
        is not in fp8, dequantize it."""
        rows, columns = place.slice_part(tp)
        if place.fp8 is None:
            by_value = self._cut_scales(place, tp, scale, rows, columns, 1)
            if self._in_blocks:
                groups = torch.arange(columns.start, columns.stop) // BLOCK
                by_value = by_value[:, groups - groups[0]]
            place.memory.copy_(part.float() * by_value)
            return
        cut = self._cut_scales(place, tp, scale, rows, columns, place.fp8.rows)
        store_values(place.memory, place.fp8, part, cut, scale.input_scale)

    def _cut_scales(
        self,
        place: WeightDestination,
        tp: TensorParallel,
        scale: WeightScale,
        rows: slice,
        columns: slice,
        step: int,
    ) -> torch.Tensor:
        """Return the scales of every ``step`` rows of a part and of its groups of inputs."""
        whole, shape = place.whole_shape(tp), list(scale.scale.shape)
        firsts = torch.arange(rows.start, rows.stop, step)
        if self._in_blocks:
            expected = [-(-size // BLOCK) for size in whole]
            if shape == expected:
                last = (columns.stop - 1) // BLOCK
                return scale.scale[firsts // BLOCK, columns.start // BLOCK : last + 1]
        else:
            expected = [whole[0], 1]
            if scale.scale.numel() == 1:
                return scale.scale.view(1, 1).expand(len(firsts), 1)
            if shape in (expected, expected[:1]):
                return scale.scale.view(-1, 1)[firsts]
        raise UsageError(f"tensor {scale.name} is {shape}, config.json makes it {expected}")


NO_SCALES = Scales({}, False, False)


def store_values(
    memory: torch.Tensor,
    fp8: Fp8Destination,
    values: torch.Tensor,
    scales: torch.Tensor,
    input_scale: torch.Tensor | None = None,
) -> None:
    """Store values in fp8 and their scales. Fused weights have one scale for their common inputs:
    the largest."""
    memory.copy_(values)
    fp8.scales.copy_(scales)
    if input_scale is not None and fp8.input_scale is not None:
        fp8.input_scale.copy_(fp8.input_scale.maximum(input_scale.to(fp8.input_scale.device)))


def quantize_whole(place: WeightDestination, tp: TensorParallel, whole: torch.Tensor) -> None:
    """Quantize a weight with a scale for each row, and store this rank's part. Scales follow from
    whole rows, so the ranks have parts of the same weight."""
    assert place.fp8 is not None
    rows, columns = place.slice_part(tp)
    mine = whole[rows].float()
    scales = compute_scales(mine.abs().amax(1, keepdim=True))
    store_values(place.memory, place.fp8, convert_saturated(mine[:, columns] / scales), scales)


def is_scale(name: str) -> bool:
    """Whether a tensor's name is that of a scale which belongs to a weight."""
    return name.endswith((*_SCALES, *_INPUT_SCALES))


def is_unused(name: str) -> bool:
    """Whether a tensor's name is that of a scale which the weights do not need."""
    return name.rpartition(".")[2] in _UNUSED


def find_weight(name: str) -> str:
    """Return the name of the weight that a scale belongs to."""
    return name.rpartition(".")[0] + ".weight"


def _convert_scale(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float32. Exponents (UE8M0) may be stored as bytes."""
    if tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float8_e8m0fnu)
    scale = tensor.float()
    if not bool(torch.isfinite(scale).all()) or bool((scale < 0).any()):
        raise UsageError(f"tensor {name} holds scales that are negative or not finite")
    return scale
