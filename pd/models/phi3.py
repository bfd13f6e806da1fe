"""Phi-3 and Phi-4: Llama's layers, whose checkpoints fuse q, k and v, and gate and up."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.refusals import refuse_setting
from pd.models.window_reader import read_common_window

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.models.config import ModelConfig
    from pd.models.settings import Settings


class Phi3(Architecture):
    """Models with ``longrope``, such as Phi-3-mini-128k and Phi-4-mini, are refused: their
    frequencies depend on the length of the whole sequence."""

    defaults: ClassVar[Settings] = {"rms_norm_eps": 1e-5}
    default_eos = 32000
    implemented = frozenset(("partial_rotary_factor",))
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        if config.rope.type != "default":
            # transformers takes "yarn" in these files for "longrope".
            refuse_setting("rope_type of phi3", config.rope.type)
        if config.quantization is not None:
            # One scale may be for q, k and v together.
            refuse_setting("quantization_config of phi3", cfg.get("quantization_config"))
        return config

    def read_windows(self, cfg: Settings) -> tuple[int, ...]:
        return read_common_window(cfg)
