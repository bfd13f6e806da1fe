"""Layers shared by all architectures.

A module lists its weights with ``checkpoint_tensors``: the names they have in a checkpoint, and
for each the memory it is read into, which may be a part of a fused weight. So loading needs no
copy beside the parameters, and one place says how a name and a parameter belong together.
Afterwards ``CausalLM.prepare`` lays weights out as the kernels like them best.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pd.kernels.linear import gate_up_silu, linear, pack_weight
from pd.kernels.moe import moe_mlp, route
from pd.kernels.norm import add_rms_norm, rms_norm
from pd.kernels.rope import inverse_frequencies, rotate_and_store, rotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.kernels.attention import PlannedAttention
    from pd.models.config import ModelConfig

    NamedTensors = Iterator[tuple[str, torch.Tensor]]


def empty_parameter(*shape: int) -> nn.Parameter:
    """A weight to be loaded, in the default dtype on the default device."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """``x @ weight.T + bias`` with one or several projections of the same input fused into one.

    Args:
        outputs: size of each projection by its name in the checkpoint, in the order of its rows.
    """

    def __init__(self, outputs: dict[str, int], input_size: int, bias: bool = False) -> None:
        super().__init__()
        self._outputs = outputs
        size = sum(outputs.values())
        self.weight = empty_parameter(size, input_size)
        self.bias = empty_parameter(size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, input_size]`` to ``[tokens, sum of outputs]``."""
        return linear(x, self.weight, self.bias)

    def prepare(self) -> None:
        self.weight = nn.Parameter(pack_weight(self.weight), requires_grad=False)

    def checkpoint_tensors(self) -> NamedTensors:
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                parts = parameter.split(list(self._outputs.values()))
                for name, part in zip(self._outputs, parts, strict=True):
                    yield f"{name}.{kind}", part


class RMSNorm(nn.Module):
    """Scales to a root mean square of 1, then by a learned weight per dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self._eps)

    def after_add(self, residual: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        """Add ``x``, if there is one, to ``residual`` in place; returns the sum normalized."""
        if x is None:
            return self(residual)
        return add_rms_norm(residual, x, self.weight, self._eps)

    def checkpoint_tensors(self) -> NamedTensors:
        yield "weight", self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged pool."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        q_size, kv_size = self._heads * self._head_dim, self._kv_heads * self._head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(qkv, config.hidden_size, config.attention_bias)
        self.output = Linear({"o_proj": config.hidden_size}, q_size, config.output_bias)
        self._eps = config.rms_norm_eps
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, cos_sin: torch.Tensor, attention: PlannedAttention
    ) -> torch.Tensor:
        q, k, v = rotate_and_store(
            self.qkv(x).view(len(x), -1, self._head_dim),
            self._heads,
            self._kv_heads,
            cos_sin,
            attention.pool.key(self._layer),
            attention.pool.value(self._layer),
            attention.slots,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self._eps,
        )
        return self.output(attention.attend(self._layer, q, k, v).flatten(1))

    def checkpoint_tensors(self) -> NamedTensors:
        yield from self.qkv.checkpoint_tensors()
        yield from self.output.checkpoint_tensors()
        if self.q_norm is not None and self.k_norm is not None:
            yield from _within("q_norm", self.q_norm.checkpoint_tensors())
            yield from _within("k_norm", self.k_norm.checkpoint_tensors())


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    checkpoint_name = "mlp"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        gate_up = {"gate_proj": size, "up_proj": size}
        self.gate_up = Linear(gate_up, config.hidden_size, config.mlp_bias)
        self.down = Linear({"down_proj": config.hidden_size}, size, config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gate_up_silu(x, self.gate_up.weight, self.gate_up.bias))

    def checkpoint_tensors(self) -> NamedTensors:
        yield from self.gate_up.checkpoint_tensors()
        yield from self.down.checkpoint_tensors()


class SparseMoE(nn.Module):
    """A router and gated MLPs of which each token uses ``num_experts_per_tok``.

    Router probabilities are a softmax over all experts; with ``norm_topk_prob`` those of the
    chosen ones are scaled to sum to 1, which equals a softmax over the chosen ones alone.
    """

    checkpoint_name = "mlp"
    gate_name, up_name, down_name = "gate_proj", "up_proj", "down_proj"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob
        experts, hidden, size = config.num_experts, config.hidden_size, config.intermediate_size
        self.router = Linear({"gate": experts}, hidden)
        self.gate_up = empty_parameter(experts, 2 * size, hidden)
        self.down = empty_parameter(experts, hidden, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = route(self.router(x), self._top_k, self._normalize)
        return moe_mlp(x, weights, experts, self.gate_up, self.down)

    def checkpoint_tensors(self) -> NamedTensors:
        yield from self.router.checkpoint_tensors()
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            yield f"experts.{expert}.{self.gate_name}.weight", gate
            yield f"experts.{expert}.{self.up_name}.weight", up
            yield f"experts.{expert}.{self.down_name}.weight", down


class DecoderLayer(nn.Module):
    """Attention and an MLP, each normalized before and added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP | SparseMoE):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        hidden: torch.Tensor,
        update: torch.Tensor | None,
        cos_sin: torch.Tensor,
        attention: PlannedAttention,
    ) -> torch.Tensor:
        """Add the last layer's ``update`` to the residual stream ``hidden`` in place, then this
        layer's attention; returns the MLP's update, which the next layer adds."""
        attended = self.attention(self.attention_norm.after_add(hidden, update), cos_sin, attention)
        return self.mlp(self.mlp_norm.after_add(hidden, attended))

    def checkpoint_tensors(self) -> NamedTensors:
        yield from _within("input_layernorm", self.attention_norm.checkpoint_tensors())
        yield from _within("self_attn", self.attention.checkpoint_tensors())
        yield from _within("post_attention_layernorm", self.mlp_norm.checkpoint_tensors())
        yield from _within(self.mlp.checkpoint_name, self.mlp.checkpoint_tensors())


class CausalLM(nn.Module):
    """Embedding, decoder layers, norm, output head. Architectures say what a layer is made of."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = empty_parameter(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.make_attention(layer), self.make_mlp())
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = self.embedding
        if not config.tie_word_embeddings:
            self.head = empty_parameter(config.vocab_size, config.hidden_size)
        rope = config.rope
        self._frequencies = inverse_frequencies(
            config.head_dim,
            rope.theta,
            rope.type,
            rope.factor,
            rope.low_freq_factor,
            rope.high_freq_factor,
            rope.original_context,
        ).to(self.embedding.device)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one layer."""
        return Attention(self.config, layer)

    def make_mlp(self) -> GatedMLP | SparseMoE:
        """The MLP of one layer."""
        return GatedMLP(self.config)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: PlannedAttention,
        layer_done: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Hidden states ``[tokens, hidden_size]`` before the last norm.

        Args:
            token_ids, positions: int64 ``[tokens]``.
            attention: planned for exactly these tokens.
            layer_done: called with each layer's index after it.
        """
        hidden = functional.embedding(token_ids, self.embedding)
        cos_sin = rotations(positions, self._frequencies)
        update = None
        for index, layer in enumerate(self.layers):
            update = layer(hidden, update, cos_sin, attention)
            if layer_done is not None:
                layer_done(index)
        return hidden if update is None else hidden.add_(update)

    def prepare(self) -> None:
        """Called once, after loading: then no weight is to be read or written by name any more.

        One weight at a time exists twice meanwhile.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare()
        if not self.config.tie_word_embeddings:
            self.head = nn.Parameter(pack_weight(self.head), requires_grad=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab_size]`` in the model's dtype, from rows of :meth:`forward`'s result."""
        return linear(self.norm(hidden), self.head)

    def checkpoint_tensors(self) -> NamedTensors:
        """Every tensor a checkpoint must hold, and the memory to read it into."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            yield from _within(f"model.layers.{index}", layer.checkpoint_tensors())
        yield from _within("model.norm", self.norm.checkpoint_tensors())
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head


def _within(prefix: str, tensors: NamedTensors) -> NamedTensors:
    for name, tensor in tensors:
        yield f"{prefix}.{name}", tensor
