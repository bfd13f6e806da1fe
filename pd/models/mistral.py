"""Mistral: Llama without biases. Checkpoints whose sliding window is in use are refused."""

from __future__ import annotations

from pd.models.layers import CausalLM


class MistralForCausalLM(CausalLM):
    """Differs from Llama in its configuration only."""
