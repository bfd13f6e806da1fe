"""The decoder-only transformer, assembled from :mod:`pd.models.layers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pd.kernels.linear import linear, pack_weight
from pd.kernels.rope import rotations
from pd.models.layers import (
    MLP,
    Attention,
    GatedMLP,
    Linear,
    NamedPlaces,
    RMSNorm,
    SparseMoE,
    empty_parameter,
    rope_frequencies,
    within,
)
from pd.models.tensor_parallel import SINGLE, TensorParallel, WeightDestination

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.kernels.attention import PlannedAttention
    from pd.models.config import ModelConfig

# Names of the tensors that every checkpoint has.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class DecoderLayer(nn.Module):
    """Attention and an MLP, each normalized before and added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: MLP) -> None:
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
            rows: int64, the tokens that are wanted after this layer; None for all. K and V are
                written for all of them.

        Returns:
            The residual stream and the MLP's update, which the next layer adds, of these rows.
        """
        x = self.attention_norm.after_add(hidden, update)
        attended = self.attention(x, cos_sin, attention, rows)
        if rows is not None:
            hidden = hidden.index_select(0, rows)
            if len(rows) == 0:
                return hidden, attended
        return hidden, self.mlp(self.mlp_norm.after_add(hidden, attended))

    def checkpoint_tensors(self) -> NamedPlaces:
        yield from within("input_layernorm", self.attention_norm.checkpoint_tensors())
        yield from within("self_attn", self.attention.checkpoint_tensors())
        yield from within("post_attention_layernorm", self.mlp_norm.checkpoint_tensors())
        yield from within(self.mlp.checkpoint_name, self.mlp.checkpoint_tensors())


def default_mlp(config: ModelConfig, tp: TensorParallel) -> MLP:
    """Make the MLP of one layer: a mixture of experts where the configuration has experts."""
    return SparseMoE(config, tp) if config.num_experts else GatedMLP(config, tp)


class CausalLM(nn.Module):
    """Embedding, decoder layers, norm, output head.

    Args:
        make_attention: makes the attention of one layer from configuration, index and ranks.
        make_mlp: makes the MLP of one layer from configuration and ranks.

    Attributes:
        config: configuration of this rank's part (:meth:`pd.models.config.ModelConfig.divided`).
        tp: the ranks. Each has the whole embedding, and a part of the head's vocabulary.
        aux_layers: layers before which :meth:`forward` copies the residual stream to ``features``,
            ascending, each once; ``num_layers`` stands for the last layer's output.
        aux_normed: whether the last layer's output is copied after the last norm.
    """

    head: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel = SINGLE,
        *,
        make_attention: Callable[[ModelConfig, int, TensorParallel], Attention] = Attention,
        make_mlp: Callable[[ModelConfig, TensorParallel], MLP] = default_mlp,
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        self.aux_layers: tuple[int, ...] = ()
        self.aux_normed = False
        self.embedding = empty_parameter(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, make_attention(config, layer, tp), make_mlp(config, tp))
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = empty_parameter(config.vocab_size // tp.size, config.hidden_size)
        elif tp.size == 1:
            self.head = self.embedding
        else:
            self.head = self.embedding[tp.part(config.vocab_size)]
        self._frequencies = rope_frequencies(config).to(self.embedding.device)

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
            layer_done: called with the index of each layer after that layer is launched.
            rows: int64, the tokens whose hidden states are wanted; None for all. In the last
                layer only the KV of the other tokens is computed, unless its output is wanted in
                ``features``.
            features: overwritten with what ``aux_layers`` chooses, side by side in their order, of
                all tokens; ``[tokens, len(aux_layers) * hidden_size]`` in the model's dtype. None
                to compute none; all ranks must agree.
        """
        aux_layers = () if features is None else self.aux_layers
        end = len(self.layers)
        hidden = functional.embedding(token_ids, self.embedding)
        cos_sin = rotations(positions, self._frequencies)
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

    def new_features(self, num_tokens: int) -> torch.Tensor | None:
        """Memory for the ``features`` of a pass over so many tokens; None if there are none."""
        if not self.aux_layers:
            return None
        return self.embedding.new_empty(num_tokens, len(self.aux_layers) * self.config.hidden_size)

    def _copy_feature(
        self, layer: int, hidden: torch.Tensor, update: torch.Tensor | None, features: torch.Tensor
    ) -> None:
        """Copy the residual stream, to which ``update`` is not added yet, to the layer's part of
        ``features``."""
        size, place = hidden.shape[1], self.aux_layers.index(layer)
        part = features[:, place * size : (place + 1) * size]
        if update is not None:
            torch.add(hidden, update, out=part)
        elif layer == len(self.layers) and self.aux_normed:
            part.copy_(self.norm(hidden))
        else:
            part.copy_(hidden)

    def prepare(self) -> None:
        """Lay the weights out for the kernels. Called once, after loading; afterwards no weight may
        be read or written by name.

        One weight at a time exists twice meanwhile.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare()
        if not self.config.tie_word_embeddings:
            self.head = nn.Parameter(pack_weight(self.head), requires_grad=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute ``[rows, vocab_size]`` in the model's dtype from rows of the result of
        :meth:`forward`."""
        return self.tp.all_gather(linear(self.norm(hidden), self.head))

    def checkpoint_tensors(self) -> NamedPlaces:
        """List every tensor that a checkpoint must hold, and the memory to read it into."""
        yield EMBEDDING, WeightDestination(self.embedding)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from within(f"model.layers.{index}", layer.checkpoint_tensors())
        yield from within("model.norm", self.norm.checkpoint_tensors())
        if not self.config.tie_word_embeddings:
            yield HEAD, WeightDestination(self.head, 0)
