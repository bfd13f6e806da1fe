"""Mixtral: Mistral's attention, with a sparse mixture of experts in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.window_reader import read_common_window

if TYPE_CHECKING:
    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings
    from pd.models.tensor_parallel import TensorParallel


class Mixtral(Architecture):
    """The weights of experts have their own names: w1 is the gate, w3 the up projection and w2 the
    down projection."""

    defaults: ClassVar[Settings] = {
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    has_experts = True

    def read_windows(self, cfg: Settings) -> tuple[int, ...]:
        return read_common_window(cfg)

    def make_model(self, config: ModelConfig, tp: TensorParallel) -> CausalLM:
        from pd.models.causal_lm import CausalLM
        from pd.models.layers import ExpertNames, SparseMoE

        names = ExpertNames(mlp="block_sparse_moe", gate="w1", up="w3", down="w2")
        return CausalLM(config, tp, make_mlp=lambda config, _, tp: SparseMoE(config, tp, names))
