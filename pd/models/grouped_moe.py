"""The mixture of experts of DeepSeek's models: shared experts, and a float32 router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pd.kernels.moe import route_in_groups
from pd.models.layers import MLP, Experts, GatedMLP, NamedPlaces, add_prefix
from pd.models.tensor_parallel import TensorParallel, WeightDestination

if TYPE_CHECKING:
    from pd.models.config import ModelConfig


class GroupedRouter(nn.Module):
    """A router in float32, whatever the model's dtype. Each rank has its own copy."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.router is not None
        self._router, self._top_k = config.router, config.num_experts_per_tok
        self._normalize = config.norm_topk_prob
        weight = torch.empty(config.num_experts, config.hidden_size, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        if config.router.has_bias:
            bias = torch.empty(config.num_experts, dtype=torch.float32)
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of tokens ``[tokens, hidden_size]``. Returns their weights and ids,
        see :func:`pd.kernels.moe.route_in_groups`."""
        router = self._router
        return route_in_groups(
            functional.linear(x.float(), self.weight),
            self.bias,
            self._top_k,
            scores=router.scores,
            num_groups=router.num_groups,
            num_chosen_groups=router.num_chosen_groups,
            group_best=router.group_best,
            normalize=self._normalize,
            scale=router.scale,
        )

    def list_tensors(self) -> NamedPlaces:
        yield "weight", WeightDestination(self.weight)
        if self.bias is not None:
            yield "e_score_correction_bias", WeightDestination(self.bias)


class GroupedMoE(MLP):
    """Experts chosen by a :class:`GroupedRouter`, plus shared experts, which form one MLP."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self._tp = tp
        self.router, self.experts = GroupedRouter(config), Experts(config, tp)
        self.shared = None
        if config.num_shared_experts:
            self.shared = GatedMLP(config, tp, config.shared_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.experts.compute_part(x, *self.router(x))
        if self.shared is not None:
            part = part.add_(self.shared.compute_part(x))
        return self._tp.all_reduce(part)

    def list_tensors(self) -> NamedPlaces:
        yield from add_prefix("gate", self.router.list_tensors())
        yield from self.experts.list_tensors()
        if self.shared is not None:
            yield from add_prefix("shared_experts", self.shared.list_tensors())


def make_grouped_mlp(config: ModelConfig, layer: int, tp: TensorParallel) -> MLP:
    """Make the MLP of one layer of a model whose leading layers are dense."""
    if layer < config.num_dense_layers:
        return GatedMLP(config, tp, config.dense_size)
    return GroupedMoE(config, tp)
