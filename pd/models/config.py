"""The configuration of a model in one form for all architectures. Importing this does not import
torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pd.core.errors import UnsupportedModelError, UsageError
from pd.core.node_info import MAX_LAYERS, MODEL_PLANE, Plane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.node_info import DType

# Rows and columns of a block of weights that share a scale, and the inputs that do.
BLOCK = 128
# Inputs that share a scale in MXFP4.
MX_BLOCK = 32
# Name of the plane of the KV pool for layers with windows.
WINDOW_PLANE = "windows"
# Layers with windows get pages of their own only if their number and that of the other layers
# differ by at most this part of the larger one, because each page has room for either.
_MOST_UNEQUAL = 0.125


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        type: ``default``, ``linear``, ``dynamic``, ``llama3`` or ``yarn``. ``dynamic`` changes
            nothing, because it stretches only sequences longer than ``max_position_embeddings``,
            and no sequence is longer.
        factor: the other types than ``default`` stretch wavelengths by it.
        low_freq_factor, high_freq_factor: bounds between which ``llama3`` interpolates, relative to
            ``original_context`` (see :func:`pd.kernels.rope.inverse_frequencies`).
        original_context: context before the stretching, in tokens.
        beta_fast, beta_slow: bounds between which ``yarn`` interpolates, in rotations within
            ``original_context``.
        truncate: whether ``yarn`` rounds these bounds to whole dimensions.
        attention_factor: factor of every cosine and sine.
        part: part of each head that is rotated, from its first dimension on.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    part: float = 1.0


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA; DeepSeek-V2, 2024). The KV cache has one row per token and
    layer: a latent, from which K and V of all heads follow, and a rotated part of K that all heads
    share.

    Attributes:
        q_rank: width of the latent of queries; None if they are projected directly.
        kv_rank: width of the latent of K and V.
        nope_dim: size of a head's part of q and k without positions.
        rope_dim: size of the rotated part.
        value_dim: size of a head of V.
        scale: factor of the scores.
        interleaved: whether the rotation turns neighbouring dimensions, not the two halves.
        norm_eps: epsilon of the norms of both latents.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool = True
    norm_eps: float = 1e-6

    @property
    def row_dim(self) -> int:
        """Values of a row of the KV cache."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class RouterConfig:
    """How a sparse mixture of experts chooses experts.

    Attributes:
        scores: ``softmax`` or ``sigmoid`` of the router's logits.
        has_bias: whether a learned bias takes part in choosing experts, but not in their weights.
        num_groups, num_chosen_groups: experts are chosen within the best groups of equal size.
        group_best: a group's score is the sum of this many of its best experts.
        scale: factor of the weights of routed experts.
    """

    scores: str = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class ClampConfig:
    """The activation of gpt-oss's experts (:func:`pd.kernels.activation.clamped_swiglu`). The rows
    of their weights alternate gate and up, and all their projections have biases.

    Attributes:
        alpha: factor of the gate inside the sigmoid.
        limit: largest gate, and largest magnitude of up.
    """

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class QuantizationConfig:
    """Weights in fp8, and how their inputs are converted to fp8.

    Attributes:
        in_blocks: whether 128 × 128 weights share a scale, and 128 inputs of a token do. Otherwise
            each row of a weight has a scale (or the weight has one), and each token has one.
        has_input_scales: whether the checkpoint holds one scale for the inputs of each weight.
            Otherwise scales follow from the inputs.
        rounds_scales: whether scales of inputs are rounded up to powers of two (UE8M0).
        at_load: whether the checkpoint is not quantized, and we quantize it when we load it.
    """

    in_blocks: bool
    has_input_scales: bool = False
    rounds_scales: bool = False
    at_load: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    It has one attribute for each setting of ``config.json`` that changes results, and is as flat as
    that file. If you know the file, you know this class.

    Attributes:
        architecture: the ``model_type``, a key of :data:`pd.models.registry.ARCHITECTURES`.
        context_length: ``max_position_embeddings``, in tokens.
        num_kv_heads, head_dim: of the rows that attention reads. Models with latent attention have
            one head, as wide as a row of their cache.
        kv_replicas: number of neighbouring ranks that have the same KV heads, if there are more
            ranks than KV heads.
        ep_size: number of groups of neighbouring ranks, each of which has other experts. Unless
            this is a rank's part (:meth:`split_by_ranks`), it is 1, and so is ``kv_replicas``.
        intermediate_size: width of the MLP, or of one expert if ``num_experts`` > 0.
        attention_bias: whether the q, k and v projections have biases.
        output_bias: whether the projection after attention has a bias.
        qk_norm: whether q and k are RMS-normalized per head before the rotation.
        windows: number of keys that a token sees in each layer, the last ones before it and its
            own; 0 for all. Empty if all layers see everything.
        attention_sinks: whether a learned score of each head joins its softmax without a value.
        num_experts: experts of a layer; 0 in a dense model.
        norm_topk_prob: whether the chosen experts' weights are scaled to sum to 1.
        router: float32 router of DeepSeek's models; None for a softmax in the model's dtype.
        clamp: activation of experts with biases; None for ``silu(gate) * up`` without biases.
        mxfp4_experts: whether these experts are in MXFP4 (:mod:`pd.kernels.mxfp4`).
        num_shared_experts: experts that every token uses in addition to the chosen ones.
        num_dense_layers: leading layers whose MLP is dense although ``num_experts`` > 0.
        dense_size: width of the MLP of these layers.
        latent: latent attention; None for grouped-query attention.
        num_draft_layers: layers for drafts after the last one (:mod:`pd.models.mtp`).
        quantization: weights in fp8; None if all are in the model's dtype.
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
    windows: tuple[int, ...] = ()
    attention_sinks: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    router: RouterConfig | None = None
    clamp: ClampConfig | None = None
    mxfp4_experts: bool = False
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    dense_size: int = 0
    latent: LatentConfig | None = None
    num_draft_layers: int = 0
    quantization: QuantizationConfig | None = None
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    eos_problems: tuple[str, ...] = ()
    bos_token_id: int | None = None
    kv_replicas: int = 1
    ep_size: int = 1

    @property
    def num_local_experts(self) -> int:
        """Experts of which a rank has at least a part."""
        return self.num_experts // self.ep_size

    @property
    def shared_size(self) -> int:
        """Width of the MLP of the shared experts. All ranks divide it, but only the ranks of a
        group divide an expert."""
        return self.num_shared_experts * self.intermediate_size // self.ep_size

    @property
    def token_flops(self) -> int:
        """Floating-point operations to multiply a token with the layers' weights, two for each
        weight. In a mixture of experts these are the weights of the router and of the chosen
        experts."""
        return int(2 * self.count_weights(self.num_experts_per_tok or 1))

    @property
    def pair_flops(self) -> int:
        """Floating-point operations to attend from one token of a prompt to one other, in all
        layers."""
        if self.latent is not None:
            widths = self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim
            return 2 * self.num_layers * self.num_heads * widths
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def decode_pair_flops(self) -> int:
        """:attr:`pair_flops` of a decode step, which attends to the latents themselves if there are
        any (see :mod:`pd.kernels.latent`)."""
        if self.latent is None:
            return self.pair_flops
        widths = self.latent.row_dim + self.latent.kv_rank
        return 2 * self.num_layers * self.num_heads * widths

    @property
    def rotary_dim(self) -> int:
        """Size of the part of a head that the rotary embedding turns."""
        head_dim = self.head_dim if self.latent is None else self.latent.rope_dim
        return int(head_dim * self.rope.part)

    @property
    def needs_windows(self) -> bool:
        """Whether the attention backend must have windows and sinks."""
        return bool(self.windows) or self.attention_sinks

    def make_plane(self, dtype: DType, scales: tuple[float, ...] | None = None) -> Plane:
        """Make one plane of a KV pool for all layers, with the heads of all ranks. ``scales`` are
        those of :class:`pd.core.node_info.Plane`."""
        shape = self.num_layers, self.num_kv_heads, self.head_dim
        if self.latent is None:
            return Plane(MODEL_PLANE, *shape, dtype, scales=scales)
        return Plane(MODEL_PLANE, *shape, dtype, vectors=1, ranks="copied", scales=scales)

    def make_planes(
        self, dtype: DType, scales: tuple[float, ...] | None = None
    ) -> tuple[Plane, ...]:
        """Make the planes of a KV pool that frees pages when no window reaches them any more, if
        :attr:`frees_windows`. ``scales`` as in :meth:`make_plane`."""
        plane = self.make_plane(dtype, scales)
        if not self.frees_windows:
            return (plane,)
        full, other = (
            self._make_part(plane, [i for i, w in enumerate(self.windows) if (w > 0) is windowed])
            for windowed in (False, True)
        )
        window = max(self.windows)
        return full, msgspec.structs.replace(other, name=WINDOW_PLANE, group=1, window=window)

    @staticmethod
    def _make_part(plane: Plane, layers: Sequence[int]) -> Plane:
        """Take some layers of a plane."""
        scales = None
        if plane.scales is not None:
            scales = tuple(scale for layer in layers for scale in plane.get_scales(layer))
        return msgspec.structs.replace(plane, num_layers=len(layers), scales=scales)

    @property
    def frees_windows(self) -> bool:
        """Whether layers with windows have pages of their own: if there is one window, and about as
        many layers without one."""
        with_window = sum(map(bool, self.windows))
        other = len(self.windows) - with_window
        if len(set(self.windows) - {0}) != 1 or not other:
            return False
        return abs(with_window - other) <= _MOST_UNEQUAL * max(with_window, other)

    @property
    def pool_layers(self) -> tuple[int, ...]:
        """Number that each layer has in the KV pool. Layers without windows come first."""
        if not self.frees_windows:
            return tuple(range(self.num_layers))
        order = sorted(range(self.num_layers), key=lambda layer: self.windows[layer] > 0)
        return tuple(sorted(range(self.num_layers), key=order.__getitem__))

    def count_weights(self, num_experts: float) -> float:
        """Count the weights of all layers' matrices with ``num_experts`` experts of each layer (1
        in a dense model)."""
        mlp = 3 * self.hidden_size * self.intermediate_size
        router = self.hidden_size * self.num_experts
        experts = router + (num_experts + self.num_shared_experts) * mlp
        dense = 3 * self.hidden_size * self.dense_size
        num_sparse = self.num_layers - self.num_dense_layers
        attention = self.num_layers * self._count_attention_weights()
        return attention + num_sparse * experts + self.num_dense_layers * dense

    def _count_attention_weights(self) -> int:
        """Count the weights of one layer's attention."""
        if self.latent is None:
            heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            return 2 * self.hidden_size * (heads + kv)
        latent = self.latent
        queries = self.num_heads * (latent.nope_dim + latent.rope_dim)
        kv = self.num_heads * (latent.nope_dim + latent.value_dim)
        if latent.q_rank is None:
            query = self.hidden_size * queries
        else:
            query = (self.hidden_size + queries) * latent.q_rank
        output = self.num_heads * latent.value_dim * self.hidden_size
        return query + self.hidden_size * latent.row_dim + kv * latent.kv_rank + output

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
        if self.latent is None and self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim {self.head_dim} is odd")
        if self.rotary_dim % 2 or not self.rotary_dim:
            name = "the rotated part of heads" if self.latent is None else "qk_rope_head_dim"
            raise UnsupportedModelError(f"{name} {self.rotary_dim} is odd or 0")
        if has_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_experts} experts"
            )
        if self.mxfp4_experts and self.hidden_size % MX_BLOCK:
            raise UnsupportedModelError(
                f"hidden_size {self.hidden_size} with mxfp4 is no multiple of {MX_BLOCK}"
            )
        if self.router is not None:
            self._check_groups(self.router)

    def _check_groups(self, router: RouterConfig) -> None:
        """Raise UnsupportedModelError unless the chosen groups have enough experts."""
        size, rest = divmod(self.num_experts, router.num_groups)
        if rest or size < router.group_best:
            raise UnsupportedModelError(
                f"n_group {router.num_groups} does not divide {self.num_experts} experts into "
                f"groups of at least {router.group_best}"
            )
        if not 1 <= router.num_chosen_groups <= router.num_groups:
            raise UnsupportedModelError(
                f"topk_group {router.num_chosen_groups} of n_group {router.num_groups}"
            )
        if router.num_chosen_groups * size < self.num_experts_per_tok:
            raise UnsupportedModelError(
                f"num_experts_per_tok {self.num_experts_per_tok}, but topk_group "
                f"{router.num_chosen_groups} leaves {router.num_chosen_groups * size} experts"
            )

    def split_by_ranks(self, tp_size: int, ep_size: int = 1) -> ModelConfig:
        """Return the configuration of one of ``tp_size`` ranks' parts: heads and the width of the
        MLPs are divided. ``vocab_size`` and ``num_experts`` stay whole, although the output head is
        divided, and so are the experts among ``ep_size`` groups of ranks. If there are fewer KV
        heads than ranks, several ranks have the same one.

        Raises:
            UsageError: ``tp_size`` does not divide one of these numbers, or blocks of MXFP4;
                ``ep_size`` does not divide ``tp_size`` or the number of experts.
        """
        self._check_ep_size(tp_size, ep_size)
        names = ["num_heads", "num_kv_heads", "dense_size", "vocab_size"]
        heads, replicas = self.num_kv_heads, 1
        if self.latent is not None:
            names.remove("num_kv_heads")  # every rank has all latents
        elif heads < tp_size and tp_size % heads == 0:
            names.remove("num_kv_heads")
            heads, replicas = 1, tp_size // heads
        sizes = {name: getattr(self, name) for name in names}
        for name, value in sizes.items():
            if value % tp_size:
                raise UsageError(f"--tp-size {tp_size} does not divide the model's {name} {value}")
        cut = tp_size // ep_size
        flags = f"--tp-size {tp_size}" + (f" / --ep-size {ep_size}" if ep_size > 1 else "")
        if self.intermediate_size % cut:
            raise UsageError(
                f"{flags} does not divide the model's intermediate_size {self.intermediate_size}"
            )
        width = self.intermediate_size // cut
        if self.mxfp4_experts and width % MX_BLOCK:
            raise UsageError(
                f"{flags} leaves experts in mxfp4 a width of {width}, which is no multiple of "
                f"{MX_BLOCK}"
            )
        if self.shared_size % tp_size:
            raise UsageError(
                f"--tp-size {tp_size} does not divide the width of the model's shared experts "
                f"{self.shared_size}"
            )
        del sizes["vocab_size"]
        parts = {name: value // tp_size for name, value in sizes.items()}
        parts |= {"intermediate_size": width, "ep_size": ep_size}
        return dataclasses.replace(
            self, **{"num_kv_heads": heads, "kv_replicas": replicas, **parts}
        )

    def _check_ep_size(self, tp_size: int, ep_size: int) -> None:
        """Raise UsageError unless the ranks can have different experts."""
        if ep_size > 1 and not self.num_experts:
            raise UsageError(f"--ep-size {ep_size}: {self.architecture} has no experts to divide")
        if tp_size % ep_size:
            raise UsageError(f"--ep-size {ep_size} does not divide --tp-size {tp_size}")
        if self.num_experts % ep_size:
            raise UsageError(
                f"--ep-size {ep_size} does not divide the model's num_experts {self.num_experts}"
            )
