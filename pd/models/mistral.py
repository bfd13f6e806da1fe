"""Mistral: Llama without biases. Checkpoints that use a sliding window are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pd.models.architecture import Architecture

if TYPE_CHECKING:
    from pd.models.settings import Settings


class Mistral(Architecture):
    """Without the key ``sliding_window``, the window is 4,096 tokens."""

    defaults: ClassVar[Settings] = {"num_key_value_heads": 8, "sliding_window": 4096}
