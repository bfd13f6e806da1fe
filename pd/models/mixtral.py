"""Mixtral: Mistral's attention, and in every layer a sparse mixture of experts."""

from __future__ import annotations

from pd.models.layers import CausalLM, SparseMoE


class MixtralMoE(SparseMoE):
    """Names as in Mixtral's checkpoints: w1 is the gate, w3 the up and w2 the down projection."""

    checkpoint_name = "block_sparse_moe"
    gate_name, up_name, down_name = "w1", "w3", "w2"


class MixtralForCausalLM(CausalLM):
    def make_mlp(self) -> MixtralMoE:
        return MixtralMoE(self.config, self.tp)
