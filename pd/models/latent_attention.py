"""The layer of multi-head latent attention; :mod:`pd.kernels.latent` explains its two forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pd.kernels.attention import LatentShape
from pd.kernels.latent import LatentHeads, rotate_and_store_latents
from pd.models.layers import (
    AttentionLayer,
    Linear,
    NamedPlaces,
    ReducedLinear,
    RMSNorm,
    add_prefix,
)
from pd.models.matrix import make_parameter
from pd.models.tensor_parallel import TensorParallel, WeightDestination

if TYPE_CHECKING:
    from pd.kernels.attention import PlannedAttention
    from pd.models.config import LatentConfig, ModelConfig


def find_latent_shape(config: ModelConfig) -> LatentShape | None:
    """Return the shape of a model's latent attention; None for a model without it."""
    latent = config.latent
    if latent is None:
        return None
    key_dim = latent.nope_dim + latent.rope_dim
    return LatentShape(latent.kv_rank, latent.scale, key_dim, latent.value_dim)


class LatentAttention(AttentionLayer):
    """Attention over latents of K and V, which all ranks have. Queries, and the weights that expand
    the latents, are divided by heads."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        assert config.latent is not None
        self._layer, self._tp, self._latent = layer, tp, config.latent
        self._num_heads = config.num_heads
        latent, bias = config.latent, config.attention_bias
        self.query = _make_query(config, latent)
        rows = {"kv_a_proj_with_mqa": latent.row_dim}
        quantization = config.quantization
        self.compress = Linear(rows, config.hidden_size, bias, quantization=quantization)
        self.norm = RMSNorm(latent.kv_rank, latent.norm_eps)
        size = self._num_heads * (latent.nope_dim + latent.value_dim)
        self.expand = make_parameter(size, latent.kv_rank)
        width = self._num_heads * latent.value_dim
        self.output = ReducedLinear("o_proj", config.hidden_size, width, bias, tp, quantization)
        self._heads = LatentHeads(self.expand, self._num_heads, latent.nope_dim)

    def forward(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        attention: PlannedAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend all tokens, or ``rows`` alone. Latents of all tokens are written."""
        latent = self._latent
        if rows is not None and len(rows) == 0:
            q = x.new_empty(len(x), 0, latent.nope_dim + latent.rope_dim)
        else:
            q = self.query(x).view(len(x), self._num_heads, -1)
        stored = rotate_and_store_latents(
            q,
            self.compress(x),
            self.norm.weight,
            latent.norm_eps,
            cos_sin,
            attention.pool.get_keys(self._layer),
            attention.slots,
            interleaved=latent.interleaved,
            scale=attention.pool.get_scales(self._layer).key,
        )
        if rows is not None and len(rows) == 0:
            # Latents of all ranks must be written before this layer is reported as done.
            self._tp.barrier(x.device)
            return x[:0]
        if rows is not None and attention.last is not None:
            attention = attention.last
            q, stored = q.index_select(0, rows), stored.index_select(0, rows)
            rows = None
        attended = attention.attend_latents(self._layer, q, stored, self._heads).flatten(1)
        return self.output.forward(attended if rows is None else attended.index_select(0, rows))

    def list_tensors(self) -> NamedPlaces:
        yield from self.query.list_tensors()
        yield from self.compress.list_tensors()
        yield from add_prefix("kv_a_layernorm", self.norm.list_tensors())
        yield "kv_b_proj.weight", WeightDestination(self.expand, 0)
        yield from self.output.list_tensors()


class LowRankQuery(nn.Module):
    """A projection through a normed latent, ``up(norm(down(x)))``."""

    def __init__(self, rank: int, size: int, config: ModelConfig, eps: float) -> None:
        super().__init__()
        hidden, bias, quantization = (
            config.hidden_size,
            config.attention_bias,
            config.quantization,
        )
        self.down = Linear({"q_a_proj": rank}, hidden, bias, quantization=quantization)
        self.norm = RMSNorm(rank, eps)
        self.up = Linear({"q_b_proj": size}, rank, split=True, quantization=quantization)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden_size]`` to ``[tokens, size]``."""
        return self.up.forward(self.norm(self.down.forward(x)))

    def list_tensors(self) -> NamedPlaces:
        yield from self.down.list_tensors()
        yield from add_prefix("q_a_layernorm", self.norm.list_tensors())
        yield from self.up.list_tensors()


def _make_query(config: ModelConfig, latent: LatentConfig) -> Linear | LowRankQuery:
    size = config.num_heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank is None:
        quantization = config.quantization
        return Linear({"q_proj": size}, config.hidden_size, split=True, quantization=quantization)
    return LowRankQuery(latent.q_rank, size, config, latent.norm_eps)
