"""GLM-4.5 to 4.7: grouped-query attention whose heads are rotated in part, with the experts of
DeepSeek-V3."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.deepseek_v2 import add_dense_layers
from pd.models.deepseek_v3 import read_sigmoid_router

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings
    from pd.models.tensor_parallel import TensorParallel


class Glm4Moe(Architecture):
    """``attention_bias`` gives q, k and v biases, but not the output projection. Layers after the
    last one are for drafts (:mod:`pd.models.mtp`)."""

    defaults: ClassVar[Settings] = {
        "num_key_value_heads": 8,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
    }
    default_eos = None
    width_key = "moe_intermediate_size"
    has_experts = True
    implemented = frozenset(
        (
            "n_shared_experts",
            "first_k_dense_replace",
            "n_group",
            "routed_scaling_factor",
            "partial_rotary_factor",
        )
    )
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
    }

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        return dataclasses.replace(
            add_dense_layers(config, cfg),
            attention_bias=bool(cfg.get("attention_bias")),
            qk_norm=bool(cfg.get("use_qk_norm")),
            router=read_sigmoid_router(cfg),
            norm_topk_prob=bool(cfg.get("norm_topk_prob")),
        )

    def make_model(self, config: ModelConfig, tp: TensorParallel) -> CausalLM:
        from pd.models.causal_lm import CausalLM
        from pd.models.grouped_moe import make_grouped_mlp

        return CausalLM(config, tp, make_mlp=make_grouped_mlp)
