"""Qwen3-MoE: Qwen3's attention, with a sparse mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pd.models.qwen3 import Qwen3
from pd.models.window_reader import read_common_window

if TYPE_CHECKING:
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings


class Qwen3Moe(Qwen3):
    """All layers have the window if ``use_sliding_window`` is set."""

    default_eos = None
    defaults: ClassVar[Settings] = {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    width_key = "moe_intermediate_size"
    has_experts = True

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        normalized = bool(cfg.get("norm_topk_prob", False))
        return dataclasses.replace(super().adapt_config(config, cfg), norm_topk_prob=normalized)

    def read_windows(self, cfg: Settings) -> tuple[int, ...]:
        if not cfg.get("use_sliding_window"):
            cfg = {**cfg, "sliding_window": None}
        return read_common_window(cfg)
