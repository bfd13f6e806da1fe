"""The decoder-only transformer, assembled from :mod:`pd.models.layers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pd.kernels.linear import linear, pack_weight
from pd.models.clamped_moe import ClampedExperts
from pd.models.layers import (
    MLP,
    Attention,
    AttentionLayer,
    Experts,
    GatedMLP,
    Linear,
    NamedPlaces,
    RMSNorm,
    Rotary,
    SparseMoE,
    add_prefix,
)
from pd.models.matrix import make_parameter
from pd.models.tensor_parallel import SINGLE, TensorParallel, WeightDestination

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.kernels.attention import PlannedAttention
    from pd.kernels.fp8 import Fp8Inputs, Fp8Rows
    from pd.models.config import ModelConfig

# Names of tensors in a checkpoint.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class DecoderLayer(nn.Module):
    """Attention and an MLP. Each is normalized before it and added to the residual stream after
    it."""

    def __init__(self, config: ModelConfig, attention: AttentionLayer, mlp: MLP) -> None:
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
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the last layer's ``update`` to the residual stream ``hidden`` in place, then this
        layer's attention.

        Args:
            rows: int64, tokens that are wanted after this layer; None for all. K and V are always
                written for all tokens.

        Returns:
            The residual stream and the MLP's update of these rows. The next layer adds the update.
        """
        x = _add_and_norm(self.attention_norm, hidden, update, self.attention.fp8_inputs)
        attended = self.attention(x, cos_sin, attention, rows)
        if rows is not None:
            hidden = hidden.index_select(0, rows)
            if len(rows) == 0:
                return hidden, attended
        return hidden, self.mlp(_add_and_norm(self.mlp_norm, hidden, attended, self.mlp.fp8_inputs))

    def list_tensors(self) -> NamedPlaces:
        yield from add_prefix("input_layernorm", self.attention_norm.list_tensors())
        yield from add_prefix("self_attn", self.attention.list_tensors())
        yield from add_prefix("post_attention_layernorm", self.mlp_norm.list_tensors())
        yield from add_prefix(self.mlp.checkpoint_name, self.mlp.list_tensors())


def _add_and_norm(
    norm: RMSNorm, residual: torch.Tensor, x: torch.Tensor | None, inputs: Fp8Inputs | None
) -> torch.Tensor | Fp8Rows:
    if inputs is None:
        return norm.add_and_norm(residual, x)
    return norm.add_and_quantize(residual, x, inputs)


def make_default_mlp(config: ModelConfig, layer: int, tp: TensorParallel) -> MLP:
    """Make the MLP of one layer: a mixture of experts if the configuration has experts."""
    return SparseMoE(config, tp) if config.num_experts else GatedMLP(config, tp)


def prepare_layers(module: nn.Module) -> None:
    """Lay out the weights of all layers in ``module`` for the kernels, see
    :meth:`CausalLM.prepare_weights`."""
    for part in module.modules():
        if isinstance(part, Linear | Experts | ClampedExperts):
            part.prepare_weights()


class CausalLM(nn.Module):
    """Embedding, decoder layers, norm, output head.

    Args:
        make_attention: makes the attention of one layer from configuration, index and ranks.
        make_mlp: makes the MLP of one layer from configuration, index and ranks.

    Attributes:
        config: configuration of this rank's part
            (:meth:`pd.models.config.ModelConfig.split_by_ranks`).
        tp: the ranks. Each has the whole embedding, and a part of the head's vocabulary.
        aux_layers: layers before which :meth:`forward` copies the residual stream to ``features``,
            ascending and distinct; ``num_layers`` stands for the last layer's output.
        aux_normed: whether the last layer's output is copied after the last norm.
    """

    head: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel = SINGLE,
        *,
        make_attention: Callable[[ModelConfig, int, TensorParallel], AttentionLayer] = Attention,
        make_mlp: Callable[[ModelConfig, int, TensorParallel], MLP] = make_default_mlp,
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        self.aux_layers: tuple[int, ...] = ()
        self.aux_normed = False
        self.embedding = make_parameter(config.vocab_size, config.hidden_size)
        self._make_attention, self._make_mlp = make_attention, make_mlp
        self.layers = nn.ModuleList(
            self.make_layer(config, layer, tp) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = make_parameter(config.vocab_size // tp.size, config.hidden_size)
        elif tp.size == 1:
            self.head = self.embedding
        else:
            self.head = self.embedding[tp.slice_part(config.vocab_size)]
        self._rotary = Rotary(config, self.embedding.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: PlannedAttention,
        layer_done: Callable[[int], None] | None = None,
        rows: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute hidden states ``[rows, hidden_size]`` before the last norm.

        Args:
            token_ids, positions: int64 ``[tokens]``.
            attention: planned for exactly these tokens.
            layer_done: called with the index of each layer after its launch.
            rows: int64, tokens whose hidden states are wanted; None for all. For the other tokens,
                the last layer computes only KV, unless ``features`` needs its output.
            features: filled with the states chosen by ``aux_layers``, side by side in their order,
                for all tokens: ``[tokens, len(aux_layers) * hidden_size]`` in the model's dtype.
                None to compute none; all ranks must agree.
        """
        aux_layers = () if features is None else self.aux_layers
        end = len(self.layers)
        hidden = functional.embedding(token_ids, self.embedding)
        cos_sin = self._rotary.compute_rotations(positions)
        update = None
        for index, layer in enumerate(self.layers):
            if features is not None and index in aux_layers:
                self._copy_feature(index, hidden, update, features)
            wanted = rows if index == end - 1 and end not in aux_layers else None
            hidden, update = layer(hidden, update, cos_sin, attention, wanted)
            if layer_done is not None:
                layer_done(index)
        hidden = hidden if update is None else hidden.add_(update)
        if features is not None and end in aux_layers:
            self._copy_feature(end, hidden, None, features)
            hidden = hidden if rows is None else hidden.index_select(0, rows)
        return hidden

    def make_layer(self, config: ModelConfig, index: int, tp: TensorParallel) -> DecoderLayer:
        """Make a layer of this architecture, with empty weights. It is not a part of the model.

        Args:
            config: configuration of a rank's part.
            index: number of the layer in its KV pool.
        """
        attention = self._make_attention(config, index, tp)
        return DecoderLayer(config, attention, self._make_mlp(config, index, tp))

    def allocate_features(self, num_tokens: int) -> torch.Tensor | None:
        """Allocate the ``features`` of a pass over ``num_tokens`` tokens; None if ``aux_layers`` is
        empty."""
        if not self.aux_layers:
            return None
        return self.embedding.new_empty(num_tokens, len(self.aux_layers) * self.config.hidden_size)

    def _copy_feature(
        self, layer: int, hidden: torch.Tensor, update: torch.Tensor | None, features: torch.Tensor
    ) -> None:
        """Copy the residual stream to the layer's part of ``features``. ``update`` is not added to
        it yet."""
        size, place = hidden.shape[1], self.aux_layers.index(layer)
        part = features[:, place * size : (place + 1) * size]
        if update is not None:
            torch.add(hidden, update, out=part)
        elif layer == len(self.layers) and self.aux_normed:
            part.copy_(self.norm(hidden))
        else:
            part.copy_(hidden)

    def prepare_weights(self) -> None:
        """Lay the weights out for the kernels. Call this once, after loading. Afterwards you may
        not access a weight by name.

        Meanwhile one weight at a time exists twice.
        """
        prepare_layers(self)
        if not self.config.tie_word_embeddings:
            self.head = nn.Parameter(pack_weight(self.head), requires_grad=False)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute ``[rows, vocab_size]`` in the model's dtype from rows of the result of
        :meth:`forward`."""
        return self.tp.all_gather(linear(self.norm(hidden), self.head))

    def list_tensors(self) -> NamedPlaces:
        """List every tensor of a checkpoint and the memory to read it into."""
        yield EMBEDDING, WeightDestination(self.embedding)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from add_prefix(f"model.layers.{index}", layer.list_tensors())
        yield from add_prefix("model.norm", self.norm.list_tensors())
        if not self.config.tie_word_embeddings:
            yield HEAD, WeightDestination(self.head, 0)
