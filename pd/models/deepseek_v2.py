"""DeepSeek-V2: latent attention, and a mixture of experts with shared ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.config import LatentConfig, RouterConfig
from pd.models.refusals import refuse_setting
from pd.models.rope_reader import read_score_scale
from pd.models.settings import get_count, get_number, get_positive_int, get_positive_int_or

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings
    from pd.models.tensor_parallel import TensorParallel

_GREEDY, _GROUPS = "greedy", "group_limited_greedy"


class DeepseekV2(Architecture):
    """Leading layers may be dense. Of the others, each token uses the likeliest experts, if need be
    within the groups of the likeliest ones."""

    defaults: ClassVar[Settings] = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "topk_method": _GREEDY,
    }
    width_key = "moe_intermediate_size"
    has_experts = True
    has_latents = True
    implemented = frozenset(
        (
            "rope_interleave",
            "n_shared_experts",
            "first_k_dense_replace",
            "n_group",
            "scoring_func",
            "routed_scaling_factor",
            "topk_method",
        )
    )
    # transformers ignores norm_topk_prob, and the authors' code does not.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "scoring_func": (None, "softmax"),
        "topk_method": (_GREEDY, _GROUPS),
        "norm_topk_prob": (None, False),
        "rope_interleave": (None, True),
    }

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        adapted = adapt_deepseek_config(config, cfg)
        router = RouterConfig(scale=get_number(cfg, "routed_scaling_factor", 1.0))
        if cfg["topk_method"] == _GROUPS:
            router = add_groups(router, cfg)
        mlp_bias = bool(cfg.get("mlp_bias"))
        return dataclasses.replace(adapted, router=router, mlp_bias=mlp_bias, norm_topk_prob=False)

    def make_model(self, config: ModelConfig, tp: TensorParallel) -> CausalLM:
        return make_deepseek_model(config, tp)


def adapt_deepseek_config(config: ModelConfig, cfg: Settings) -> ModelConfig:
    """Apply what DeepSeek's architectures have in common: latent attention, dense leading layers
    and shared experts."""
    nope_dim, rope_dim = (
        get_positive_int(cfg, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    latent = LatentConfig(
        q_rank=None if cfg["q_lora_rank"] is None else get_positive_int(cfg, "q_lora_rank"),
        kv_rank=get_positive_int(cfg, "kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=get_positive_int(cfg, "v_head_dim"),
        scale=read_score_scale(cfg, nope_dim + rope_dim),
    )
    if config.num_kv_heads != config.num_heads:
        refuse_setting("num_key_value_heads", config.num_kv_heads)
    bias = bool(cfg.get("attention_bias"))
    adapted = dataclasses.replace(
        config,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.row_dim,
        attention_bias=bias,
        output_bias=bias,
    )
    return add_dense_layers(adapted, cfg)


def add_dense_layers(config: ModelConfig, cfg: Settings) -> ModelConfig:
    """Read shared experts, dense leading layers, and the number of layers for drafts."""
    num_dense = min(get_count(cfg, "first_k_dense_replace"), config.num_layers)
    return dataclasses.replace(
        config,
        num_shared_experts=get_count(cfg, "n_shared_experts"),
        num_dense_layers=num_dense,
        dense_size=get_positive_int(cfg, "intermediate_size") if num_dense else 0,
        num_draft_layers=get_count(cfg, "num_nextn_predict_layers"),
    )


def add_groups(router: RouterConfig, cfg: Settings) -> RouterConfig:
    """Read the groups of experts."""
    return dataclasses.replace(
        router,
        num_groups=get_positive_int_or(cfg, "n_group", 1),
        num_chosen_groups=get_positive_int_or(cfg, "topk_group", 1),
    )


def make_deepseek_model(config: ModelConfig, tp: TensorParallel) -> CausalLM:
    """Build one rank's part of a model whose leading layers are dense."""
    from pd.models.causal_lm import CausalLM
    from pd.models.grouped_moe import make_grouped_mlp
    from pd.models.latent_attention import LatentAttention

    return CausalLM(config, tp, make_attention=LatentAttention, make_mlp=make_grouped_mlp)
