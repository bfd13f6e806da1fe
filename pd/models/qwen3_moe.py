"""Qwen3-MoE: Qwen3's attention, and in every layer a sparse mixture of experts."""

from __future__ import annotations

from pd.models.layers import CausalLM, SparseMoE


class Qwen3MoeForCausalLM(CausalLM):
    def make_mlp(self) -> SparseMoE:
        return SparseMoE(self.config, self.tp)
