"""A made-up architecture: the one file that a new model takes.

``SquaredReluForCausalLM`` is Llama with an MLP of its own, ``down(relu(up(x))²)``. Its weights
lie under ``ffn`` in a checkpoint, and its configuration calls the width ``ffn_size``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from pd.models.architecture import Architecture
from pd.models.causal_lm import CausalLM
from pd.models.layers import MLP, Linear, NamedPlaces, ReducedLinear

if TYPE_CHECKING:
    import torch

    from pd.models.config import ModelConfig
    from pd.models.tensor_parallel import TensorParallel


class SquaredRelu(Architecture):
    width_key = "ffn_size"

    def make_model(self, config: ModelConfig, tp: TensorParallel) -> CausalLM:
        return CausalLM(config, tp, make_mlp=SquaredReluMLP)


class SquaredReluMLP(MLP):
    checkpoint_name = "ffn"

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.up = Linear({"up": size}, hidden, split=True)
        self.down = ReducedLinear("down", hidden, size, False, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.forward(functional.relu(self.up.forward(x)).square_())

    def list_tensors(self) -> NamedPlaces:
        yield from self.up.list_tensors()
        yield from self.down.list_tensors()
