"""The mixture of experts of gpt-oss: a router and experts with biases, and a clamped activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pd.kernels.activation import ClampedGate
from pd.kernels.moe import moe_mlp, route_tokens
from pd.kernels.mxfp4 import Mxfp4Weight, allocate_scales
from pd.models.config import MX_BLOCK
from pd.models.layers import MLP, Linear, NamedPlaces, add_prefix, find_local_experts
from pd.models.matrix import make_parameter
from pd.models.scales import MXFP4_SCALES
from pd.models.tensor_parallel import TensorParallel, WeightDestination

if TYPE_CHECKING:
    from pd.models.config import ModelConfig


class ExpertStack(nn.Module):
    """One projection of all experts, in the model's dtype or in MXFP4.

    In the model's dtype, a checkpoint has the inputs before the outputs. We load it into a
    transposed view, because kernels read the inputs of an output in one piece. A CPU has no
    products of MXFP4, so we dequantize it after loading.

    Args:
        outputs, inputs: sizes of this rank's part; with MXFP4 the inputs are whole blocks.
        split: the dimension of ``[experts, outputs, inputs]`` that the ranks divide.
        groups: number of groups of neighbouring ranks, each of which has other experts.
    """

    def __init__(
        self,
        name: str,
        count: int,
        outputs: int,
        inputs: int,
        split: int,
        groups: int,
        is_mxfp4: bool,
    ) -> None:
        super().__init__()
        self._name, self._split, self._groups = name, split, groups
        self._dtype = torch.get_default_dtype()
        self._mxfp4: Mxfp4Weight | None = None
        if not is_mxfp4:
            self.values = make_parameter(count, outputs, inputs)
            return
        groups = inputs // MX_BLOCK
        self.blocks = make_parameter(count, outputs, groups, MX_BLOCK // 2, dtype=torch.uint8)
        self.scales = nn.Parameter(allocate_scales(count, outputs, groups), requires_grad=False)
        self._mxfp4 = Mxfp4Weight(self.blocks, self.scales)

    @property
    def weight(self) -> torch.Tensor | Mxfp4Weight:
        """The stack as :func:`pd.kernels.moe.moe_mlp` takes it."""
        return self.values if self._mxfp4 is None else self._mxfp4

    def prepare_weights(self) -> None:
        mxfp4 = self._mxfp4
        if mxfp4 is None or mxfp4.blocks.device.type != "cpu":
            return
        count, outputs, groups = mxfp4.scales.shape
        values = torch.empty(count, outputs, groups * MX_BLOCK, dtype=self._dtype)
        for index, matrix in enumerate(values):
            matrix.copy_(mxfp4.dequantize_matrix(index, self._dtype))
        self.values = nn.Parameter(values, requires_grad=False)
        self._mxfp4 = None
        del self.blocks, self.scales

    def list_tensors(self) -> NamedPlaces:
        groups = self._groups
        if self._mxfp4 is None:
            yield self._name, place_stack(self.values.transpose(1, 2), 3 - self._split, groups)
        else:
            yield f"{self._name}_blocks", place_stack(self.blocks, self._split, groups)
            yield f"{self._name}{MXFP4_SCALES}", place_stack(self.scales, self._split, groups)


def place_stack(memory: torch.Tensor, split: int | None, groups: int) -> WeightDestination:
    """Return the place of one tensor for all experts, ``[experts, ...]``, which ``groups`` groups
    of ranks divide. The ranks of a group divide dimension ``split``."""
    return WeightDestination(memory, split, groups=groups, is_stack=True)


class ClampedExperts(nn.Module):
    """The gated MLPs of a mixture. Each rank has a part of every expert, or of every expert of its
    group of ranks."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert config.clamp is not None
        self._clamp, self._groups = config.clamp, config.ep_size
        self._local = find_local_experts(config, tp)
        # The sum over the ranks of a group contains the bias of its first one.
        self._has_down_bias = tp.rank % (tp.size // config.ep_size) == 0
        count, hidden, size = config.num_local_experts, config.hidden_size, config.intermediate_size
        how = config.ep_size, config.mxfp4_experts
        self.gate_up = ExpertStack("gate_up_proj", count, 2 * size, hidden, 1, *how)
        self.gate_up_bias = make_parameter(count, 2 * size)
        self.down = ExpertStack("down_proj", count, hidden, size, 2, *how)
        self.down_bias = make_parameter(count, hidden)

    def compute_part(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute this rank's summand of :func:`pd.kernels.moe.moe_mlp`."""
        clamp, biases = self._clamp, (self.gate_up_bias, self.down_bias)
        gate = ClampedGate(clamp.alpha, clamp.limit, *biases)
        gate_up, down = self.gate_up.weight, self.down.weight
        return moe_mlp(x, weights, ids, gate_up, down, gate, self._local)

    def prepare_weights(self) -> None:
        if not self._has_down_bias:
            self.down_bias.zero_()
        self.gate_up.prepare_weights()
        self.down.prepare_weights()

    def list_tensors(self) -> NamedPlaces:
        yield from self.gate_up.list_tensors()
        yield "gate_up_proj_bias", place_stack(self.gate_up_bias, 1, self._groups)
        yield from self.down.list_tensors()
        yield "down_proj_bias", place_stack(self.down_bias, None, self._groups)


class ClampedMoE(MLP):
    """A router with a bias, and :class:`ClampedExperts`. A token's weights are a softmax over its
    experts. Each rank has its own copy of the router."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self._tp, self._top_k = tp, config.num_experts_per_tok
        self.router = Linear({"router": config.num_experts}, config.hidden_size, bias=True)
        self.experts = ClampedExperts(config, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = route_tokens(self.router(x), self._top_k, normalize=True)
        return self._tp.all_reduce(self.experts.compute_part(x, weights, ids))

    def list_tensors(self) -> NamedPlaces:
        yield from self.router.list_tensors()
        yield from add_prefix("experts", self.experts.list_tensors())
