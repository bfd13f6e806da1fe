"""Qwen3: q and k are normalized per head before the rotation; heads may be wider than the model."""

from __future__ import annotations

from pd.models.layers import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """``ModelConfig.qk_norm`` is what makes it Qwen3."""
