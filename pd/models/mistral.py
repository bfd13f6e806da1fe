"""Mistral: Llama without biases. Old checkpoints have a sliding window in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture
from pd.models.window_reader import read_common_window

if TYPE_CHECKING:
    from pd.models.settings import Settings


class Mistral(Architecture):
    """Without the key ``sliding_window``, the window is 4,096 tokens."""

    defaults: ClassVar[Settings] = {"num_key_value_heads": 8, "sliding_window": 4096}

    def read_windows(self, cfg: Settings) -> tuple[int, ...]:
        return read_common_window(cfg)
