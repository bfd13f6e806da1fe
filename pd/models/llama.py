"""Llama 2 and 3.x: grouped-query attention, optional biases, llama3 rope scaling."""

from __future__ import annotations

from pd.models.layers import CausalLM


class LlamaForCausalLM(CausalLM):
    """The plain case: what the shared layers do by default is Llama."""
