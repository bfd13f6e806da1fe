"""DeepSeek-V3 and R1, and Kimi-K2: DeepSeek-V2 with sigmoid scores and a learned bias that balances
the experts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.config import RouterConfig
from pd.models.deepseek_v2 import (
    DeepseekV2,
    adapt_deepseek_config,
    add_groups,
    make_deepseek_model,
)
from pd.models.settings import get_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings
    from pd.models.tensor_parallel import TensorParallel


class DeepseekV3(Architecture):
    """Layers after the last one are for drafts (:mod:`pd.models.mtp`)."""

    defaults: ClassVar[Settings] = {
        **DeepseekV2.defaults,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    }
    default_eos = 1
    width_key = "moe_intermediate_size"
    has_experts = True
    has_latents = True
    implemented = DeepseekV2.implemented
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        adapted = adapt_deepseek_config(config, cfg)
        assert adapted.latent is not None
        interleaved = bool(cfg.get("rope_interleave"))
        return dataclasses.replace(
            adapted,
            latent=dataclasses.replace(adapted.latent, interleaved=interleaved),
            router=read_sigmoid_router(cfg),
            norm_topk_prob=bool(cfg.get("norm_topk_prob")),
        )

    def make_model(self, config: ModelConfig, tp: TensorParallel) -> CausalLM:
        return make_deepseek_model(config, tp)


def read_sigmoid_router(cfg: Settings) -> RouterConfig:
    """Read a router with sigmoid scores, a bias and groups."""
    scale = get_number(cfg, "routed_scaling_factor", 1.0)
    return add_groups(RouterConfig("sigmoid", has_bias=True, group_best=2, scale=scale), cfg)
