"""Qwen3: q and k are normalized per head before the rotation. Heads may be wider than the model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.qwen2 import read_dense_qwen_windows

if TYPE_CHECKING:
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings


class Qwen3(Architecture):
    """Biases of attention follow the configuration."""

    default_eos = None
    defaults: ClassVar[Settings] = {"num_key_value_heads": 32, "head_dim": 128}

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        bias = bool(cfg.get("attention_bias"))
        return dataclasses.replace(config, qk_norm=True, attention_bias=bias, output_bias=bias)

    def read_windows(self, cfg: Settings) -> tuple[int, ...]:
        return read_dense_qwen_windows(cfg)
