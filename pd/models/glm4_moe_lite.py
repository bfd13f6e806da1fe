"""GLM-4.7-Flash: DeepSeek-V3 with other sizes, and dense layers listed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pd.models.deepseek_v3 import DeepseekV3
from pd.models.refusals import refuse_setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.models.config import ModelConfig
    from pd.models.settings import Settings


class Glm4MoeLite(DeepseekV3):
    """Without ``mlp_layer_types``, the first layer is dense."""

    defaults: ClassVar[Settings] = {
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "num_key_value_heads": 20,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
    }

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        kinds = cfg.get("mlp_layer_types")
        if isinstance(kinds, list):
            num_dense = kinds.count("dense")
            pattern = ["dense"] * num_dense + ["sparse"] * (config.num_layers - num_dense)
            if kinds != pattern:
                refuse_setting("mlp_layer_types", kinds)
            cfg = {**cfg, "first_k_dense_replace": num_dense}
        return super().adapt_config(config, cfg)
