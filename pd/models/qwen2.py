"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output projection."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.settings import get_count, get_positive_int
from pd.models.window_reader import read_layer_windows

if TYPE_CHECKING:
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings


class Qwen2(Architecture):
    """It always has these biases, even if ``attention_bias`` says otherwise."""

    default_eos = None
    defaults: ClassVar[Settings] = {"num_key_value_heads": 32}

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        return dataclasses.replace(config, attention_bias=True)

    def read_windows(self, cfg: Settings) -> tuple[int, ...]:
        return read_dense_qwen_windows(cfg)


def read_dense_qwen_windows(cfg: Settings) -> tuple[int, ...]:
    """Read the windows of a dense Qwen. It uses them only with ``use_sliding_window``: in layers
    from ``max_window_layers`` on, if the file does not list ``layer_types``."""
    used = cfg if cfg.get("use_sliding_window") else {**cfg, "sliding_window": None}
    num_layers = get_positive_int(cfg, "num_hidden_layers")
    full = num_layers
    if used.get("sliding_window") is not None:
        full = get_count(cfg, "max_window_layers", 28)
    kinds = [
        "full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)
    ]
    return read_layer_windows(used, kinds)
