"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output projection."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.settings import get_positive_int

if TYPE_CHECKING:
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings


class Qwen2(Architecture):
    """It always has these biases, even if ``attention_bias`` says otherwise."""

    default_eos = None
    defaults: ClassVar[Settings] = {"num_key_value_heads": 32}

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        return dataclasses.replace(config, attention_bias=True)

    def uses_window(self, cfg: Settings) -> bool:
        return dense_qwen_uses_window(cfg)


def dense_qwen_uses_window(cfg: Settings) -> bool:
    """Whether a dense Qwen uses its ``sliding_window``. With ``use_sliding_window``, layers from
    ``max_window_layers`` on do. ``layer_types`` overrides that and is checked elsewhere."""
    if not cfg.get("use_sliding_window") or cfg.get("layer_types"):
        return False
    first = cfg.get("max_window_layers", 28)
    return not isinstance(first, int) or first < get_positive_int(cfg, "num_hidden_layers")
