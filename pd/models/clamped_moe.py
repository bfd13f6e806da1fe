"""The mixture of experts of gpt-oss: a router and experts with biases, and a clamped activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pd.kernels.activation import ClampedGate
from pd.kernels.moe import moe_mlp, route_tokens
from pd.models.layers import MLP, Linear, NamedPlaces, add_prefix
from pd.models.matrix import make_parameter
from pd.models.tensor_parallel import TensorParallel, WeightDestination

if TYPE_CHECKING:
    from pd.models.config import ModelConfig


class ClampedExperts(nn.Module):
    """The gated MLPs of a mixture. Each rank has a part of every expert.

    A checkpoint has one tensor for all experts, with inputs before outputs. We load it into a
    transposed view, because kernels read the inputs of an output in one piece.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert config.clamp is not None
        self._tp, self._clamp = tp, config.clamp
        count, hidden, size = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up = make_parameter(count, 2 * size, hidden)
        self.gate_up_bias = make_parameter(count, 2 * size)
        self.down = make_parameter(count, hidden, size)
        self.down_bias = make_parameter(count, hidden)

    def compute_part(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute this rank's summand of :func:`pd.kernels.moe.moe_mlp`."""
        clamp, biases = self._clamp, (self.gate_up_bias, self.down_bias)
        gate = ClampedGate(clamp.alpha, clamp.limit, *biases)
        return moe_mlp(x, weights, ids, self.gate_up, self.down, gate)

    def prepare_weights(self) -> None:
        if self._tp.rank > 0:
            self.down_bias.zero_()  # the sum over the ranks contains the bias of rank 0

    def list_tensors(self) -> NamedPlaces:
        yield "gate_up_proj", WeightDestination(self.gate_up.transpose(1, 2), 2)
        yield "gate_up_proj_bias", WeightDestination(self.gate_up_bias, 1)
        yield "down_proj", WeightDestination(self.down.transpose(1, 2), 1)
        yield "down_proj_bias", WeightDestination(self.down_bias)


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
