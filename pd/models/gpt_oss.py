"""gpt-oss: alternating sliding windows, attention sinks, biases everywhere, and experts with a
clamped activation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.config import ClampConfig
from pd.models.quantization_reader import is_mxfp4
from pd.models.refusals import refuse_setting
from pd.models.settings import get_number, get_positive_int
from pd.models.window_reader import read_layer_windows

if TYPE_CHECKING:
    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings
    from pd.models.tensor_parallel import TensorParallel


class GptOss(Architecture):
    """Without ``layer_types``, every other layer has a window, beginning with the first."""

    default_eos = None
    defaults: ClassVar[Settings] = {
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    has_experts = True
    has_sinks = True
    has_mxfp4 = True

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        if not cfg.get("rope_parameters") and not cfg.get("rope_scaling"):
            # transformers would assume the published models' YaRN.
            refuse_setting("rope_parameters", None)
        if config.quantization is not None:
            refuse_setting("quantization_config of gpt_oss", cfg.get("quantization_config"))
        bias = bool(cfg["attention_bias"])
        return dataclasses.replace(
            config,
            attention_bias=bias,
            output_bias=bias,
            attention_sinks=True,
            clamp=ClampConfig(get_number(cfg, "swiglu_alpha"), get_number(cfg, "swiglu_limit")),
            mxfp4_experts=is_mxfp4(cfg),
        )

    def read_windows(self, cfg: Settings) -> tuple[int, ...]:
        kinds = ("sliding_attention", "full_attention")
        num_layers = get_positive_int(cfg, "num_hidden_layers")
        return read_layer_windows(cfg, [kinds[layer % 2] for layer in range(num_layers)])

    def make_model(self, config: ModelConfig, tp: TensorParallel) -> CausalLM:
        from pd.models.causal_lm import CausalLM
        from pd.models.clamped_moe import ClampedMoE

        return CausalLM(config, tp, make_mlp=lambda config, _, tp: ClampedMoE(config, tp))
