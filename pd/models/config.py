"""The configuration of a model in one form for all architectures. Importing this does not import
torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pd.core.errors import UnsupportedModelError, UsageError
from pd.core.node_info import MAX_LAYERS


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        type: ``default``, ``linear`` or ``llama3``.
        factor: ``linear`` and ``llama3`` stretch wavelengths by it.
        low_freq_factor, high_freq_factor, original_context: bounds between which ``llama3``
            interpolates (see :func:`pd.kernels.rope.inverse_frequencies`).
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    It has one attribute for each setting of ``config.json`` that changes results, and is as flat as
    that file. If you know the file, you know this class.

    Attributes:
        architecture: the ``model_type``, a key of :data:`pd.models.registry.ARCHITECTURES`.
        context_length: ``max_position_embeddings``, in tokens.
        intermediate_size: width of the MLP, or of one expert if ``num_experts`` > 0.
        attention_bias: whether the q, k and v projections have biases.
        output_bias: whether the projection after attention has a bias.
        qk_norm: whether q and k are RMS-normalized per head before the rotation.
        num_experts: experts of a layer; 0 in a dense model.
        norm_topk_prob: whether the chosen experts' weights are scaled to sum to 1.
        dtype: dtype of the checkpoint (``float32``, ``bfloat16``, ``float16``, …) or None.
        eos_token_ids: ids that end an answer, from ``config.json``, ``generation_config.json`` and
            the tokenizer together, ascending. All are in the vocabulary.
        eos_problems: for people: tokens named in these files that can never end an answer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    eos_problems: tuple[str, ...] = ()
    bos_token_id: int | None = None

    @property
    def token_flops(self) -> int:
        """Floating-point operations to multiply a token with the layers' weights, two for each
        weight. In a mixture of experts these are the weights of the router and of the chosen
        experts."""
        return int(2 * self.num_layers * self.count_layer_weights(self.num_experts_per_tok or 1))

    @property
    def pair_flops(self) -> int:
        """Floating-point operations to attend from one token to one other, in all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def count_layer_weights(self, num_experts: float) -> float:
        """Count the weights of one layer's matrices with ``num_experts`` of its experts (1 in a
        dense model)."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (heads + kv)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return attention + self.hidden_size * self.num_experts + num_experts * mlp

    def check_shape(self, has_experts: bool) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.num_layers > MAX_LAYERS:
            raise UnsupportedModelError(
                f"num_hidden_layers {self.num_layers} is more than {MAX_LAYERS}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim {self.head_dim} is odd")
        if has_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_experts} experts"
            )

    def split_by_ranks(self, tp_size: int) -> ModelConfig:
        """Return the configuration of one of ``tp_size`` ranks' parts: heads and the width of the
        MLPs are divided. ``vocab_size`` stays whole, although the output head is divided, too.

        Raises:
            UsageError: ``tp_size`` does not divide one of these numbers.
        """
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
            value = getattr(self, name)
            if value % tp_size:
                raise UsageError(f"--tp-size {tp_size} does not divide the model's {name} {value}")
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=self.num_kv_heads // tp_size,
            intermediate_size=self.intermediate_size // tp_size,
        )
