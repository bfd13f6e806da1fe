"""Llama 2 and 3.x: grouped-query attention, optional biases, llama3 rope scaling."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pd.models.architecture import Architecture

if TYPE_CHECKING:
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings


class Llama(Architecture):
    """Biases follow the checkpoint's configuration."""

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        bias = bool(cfg.get("attention_bias"))
        return dataclasses.replace(
            config, attention_bias=bias, output_bias=bias, mlp_bias=bool(cfg.get("mlp_bias"))
        )
