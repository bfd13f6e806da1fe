"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output projection."""

from __future__ import annotations

from pd.models.layers import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """Its biases are always there, whatever ``attention_bias`` says (see ``ModelConfig``)."""
