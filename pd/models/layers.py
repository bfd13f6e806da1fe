"""Layers shared by all architectures.

A module lists its weights with ``list_tensors``: the name of each in a checkpoint, and the memory
to read it into. That memory may be a part of a fused weight, so loading needs no second copy, and a
single place connects names and parameters. Afterwards ``CausalLM.prepare_weights`` lays the weights
out as the kernels read them fastest.

Each rank of a tensor-parallel model has a part of it (see :mod:`pd.models.tensor_parallel`).
Modules are made from the configuration of the part. Their places name the dimension along which a
weight is split.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import nn

from pd.kernels.linear import gate_up_silu, linear, silu_and_quantize
from pd.kernels.local_experts import LocalExperts
from pd.kernels.moe import moe_mlp, route_tokens
from pd.kernels.norm import add_rms_norm, rms_norm, rms_norm_fp8
from pd.kernels.rope import compute_rotations, inverse_frequencies, rotate_and_store
from pd.models.matrix import Matrix, make_parameter
from pd.models.tensor_parallel import TensorParallel, WeightDestination

if TYPE_CHECKING:
    from pd.kernels.attention import PlannedAttention
    from pd.kernels.fp8 import Fp8Inputs, Fp8Rows, Weight
    from pd.models.config import ModelConfig, QuantizationConfig

NamedPlaces: TypeAlias = Iterator[tuple[str, WeightDestination]]

NO_REPLICAS: Mapping[str, int] = {}


class Rotary:
    """Rotary positions of a model's heads, on one device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        rope = config.rope
        self._scale = rope.attention_factor
        self._frequencies = inverse_frequencies(
            config.rotary_dim,
            rope.theta,
            rope.type,
            rope.factor,
            rope.low_freq_factor,
            rope.high_freq_factor,
            rope.original_context,
            rope.beta_fast,
            rope.beta_slow,
            rope.truncate,
        ).to(device)

    def compute_rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """See :func:`pd.kernels.rope.compute_rotations`."""
        return compute_rotations(positions, self._frequencies, self._scale)


class Linear(nn.Module):
    """``x @ weight.T + bias`` with one or several projections of the same input fused into one.

    Args:
        outputs: size of each projection by its name in the checkpoint, in the order of its rows.
        split: whether each rank has only a part of every projection's outputs.
        quantization: None for a weight in the model's dtype.
        first_input: place of the first input among those of all ranks.
        replicas: number of neighbouring ranks that have the same part of a projection; 1 for
            projections that are not listed.
    """

    def __init__(
        self,
        outputs: dict[str, int],
        input_size: int,
        bias: bool = False,
        *,
        split: bool = False,
        quantization: QuantizationConfig | None = None,
        first_input: int = 0,
        replicas: Mapping[str, int] = NO_REPLICAS,
    ) -> None:
        super().__init__()
        self._outputs, self._replicas = outputs, replicas
        self._split = 0 if split else None
        self.matrix = Matrix(
            list(outputs.values()),
            input_size,
            quantization,
            is_split=split,
            first_input=first_input,
        )
        self.bias = make_parameter(sum(outputs.values())) if bias else None

    @property
    def weight(self) -> Weight:
        """The fused weight, ``[sum of outputs, input_size]``."""
        return self.matrix.weight

    def forward(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """``[tokens, input_size]`` to ``[tokens, sum of outputs]``."""
        return linear(x, self.weight, self.bias)

    def prepare_weights(self) -> None:
        self.matrix.prepare_weights()

    def list_tensors(self) -> NamedPlaces:
        stop = 0
        for name, size in self._outputs.items():
            start, stop = stop, stop + size
            replicas = self._replicas.get(name, 1)
            place = self.matrix.place_rows(start, stop, self._split, replicas=replicas)
            yield f"{name}.weight", place
            if self.bias is not None:
                rows = self.bias[start:stop]
                yield f"{name}.bias", WeightDestination(rows, self._split, replicas=replicas)


class ReducedLinear(Linear):
    """A :class:`Linear` of one projection. Each rank has a part of the inputs, and the ranks'
    results are summed."""

    def __init__(
        self,
        name: str,
        output_size: int,
        input_size: int,
        bias: bool,
        tp: TensorParallel,
        quantization: QuantizationConfig | None = None,
    ) -> None:
        super().__init__(
            {name: output_size},
            input_size,
            bias,
            quantization=quantization,
            first_input=tp.rank * input_size,
        )
        self._name, self._tp = name, tp

    def forward(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """``[tokens, input_size]`` to ``[tokens, output_size]``, the same on all ranks."""
        return self._tp.all_reduce(self.compute_part(x))

    def compute_part(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """Compute this rank's summand of :meth:`forward`."""
        return super().forward(x)

    def prepare_weights(self) -> None:
        if self.bias is not None and self._tp.rank > 0:
            self.bias.zero_()  # the sum over the ranks contains the bias of rank 0
        super().prepare_weights()

    def list_tensors(self) -> NamedPlaces:
        yield f"{self._name}.weight", self.matrix.place_rows(0, None, 1)
        if self.bias is not None:
            yield f"{self._name}.bias", WeightDestination(self.bias)


class RMSNorm(nn.Module):
    """Scales to a root mean square of 1, then by a learned weight per dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = make_parameter(size)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self._eps)

    def add_and_norm(self, residual: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        """Add ``x``, if given, to ``residual`` in place, and return the normalized sum."""
        if x is None:
            return self.forward(residual)
        return add_rms_norm(residual, x, self.weight, self._eps)

    def add_and_quantize(
        self, residual: torch.Tensor, x: torch.Tensor | None, inputs: Fp8Inputs
    ) -> Fp8Rows:
        """Do :meth:`add_and_norm`, and convert the result to fp8."""
        if x is None:
            return rms_norm_fp8(residual, self.weight, self._eps, inputs)
        return rms_norm_fp8(x, self.weight, self._eps, inputs, residual)

    def list_tensors(self) -> NamedPlaces:
        yield "weight", WeightDestination(self.weight)


class AttentionLayer(nn.Module):
    """Base class of the first half of a layer."""

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """How the norm before converts its result to fp8; None if :meth:`forward` needs it in the
        model's dtype."""
        return None

    @abstractmethod
    def forward(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        attention: PlannedAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the cache of all tokens, and attend them.

        Args:
            x: ``[tokens, hidden_size]``; may also be :class:`pd.kernels.fp8.Fp8Rows` if
                :attr:`fp8_inputs` is not None.
            cos_sin: from :meth:`Rotary.compute_rotations`.
            rows: int64, tokens to attend; None for all.

        Returns:
            ``[rows, hidden_size]``, the same on all ranks.
        """

    @abstractmethod
    def list_tensors(self) -> NamedPlaces:
        """List the weights: names below ``self_attn`` in a checkpoint, and the memory of each."""


class Attention(AttentionLayer):
    """Grouped-query attention with rotary positions over the paged pool.

    Args:
        input_size: width of the input; None for the model's hidden size, which the output always
            has.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self._layer, self._tp = layer, tp
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._hidden_size = config.hidden_size
        self._head_dim = config.head_dim
        q_size, kv_size = self._heads * self._head_dim, self._kv_heads * self._head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        inputs = config.hidden_size if input_size is None else input_size
        quantization = config.quantization
        self.qkv = Linear(
            qkv,
            inputs,
            config.attention_bias,
            split=True,
            quantization=quantization,
            replicas=dict.fromkeys(("k_proj", "v_proj"), config.kv_replicas),
        )
        self.output = ReducedLinear(
            "o_proj", config.hidden_size, q_size, config.output_bias, tp, quantization
        )
        self.sinks = None
        if config.attention_sinks:
            sinks = torch.empty(self._heads, dtype=torch.float32)
            self.sinks = nn.Parameter(sinks, requires_grad=False)
        self._eps = config.rms_norm_eps
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return self.qkv.matrix.fp8_inputs

    def forward(
        self,
        x: torch.Tensor | Fp8Rows,
        cos_sin: torch.Tensor,
        attention: PlannedAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend all tokens, or ``rows`` alone. K and V of all tokens are written."""
        qkv = self.qkv.forward(x)
        q, k, v = rotate_and_store(
            qkv.view(len(qkv), -1, self._head_dim),
            self._heads,
            self._kv_heads,
            cos_sin,
            attention.pool.get_keys(self._layer),
            attention.pool.get_values(self._layer),
            attention.get_slots(self._layer),
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self._eps,
            attention.pool.get_scales(self._layer),
        )
        if rows is not None and len(rows) == 0:
            # K and V of all ranks must be written before this layer is reported as done.
            self._tp.barrier(qkv.device)
            return qkv.new_empty(0, self._hidden_size)
        if rows is not None and attention.last is not None:
            attention = attention.last
            q, k, v = (each.index_select(0, rows) for each in (q, k, v))
            rows = None
        attended = attention.attend(self._layer, q, k, v, self.sinks).flatten(1)
        return self.output.forward(attended if rows is None else attended.index_select(0, rows))

    def list_tensors(self) -> NamedPlaces:
        yield from self.qkv.list_tensors()
        yield from self.output.list_tensors()
        if self.q_norm is not None and self.k_norm is not None:
            yield from add_prefix("q_norm", self.q_norm.list_tensors())
            yield from add_prefix("k_norm", self.k_norm.list_tensors())
        if self.sinks is not None:
            yield "sinks", WeightDestination(self.sinks, 0)


class MLP(nn.Module):
    """Base class of the second half of a layer.

    Attributes:
        checkpoint_name: prefix of the weights' names in a checkpoint, inside their layer.
    """

    checkpoint_name = "mlp"

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """How the norm before converts its result to fp8; None if :meth:`forward` needs it in the
        model's dtype."""
        return None

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden_size]`` to a new tensor of that shape, the same on all ranks. ``x`` may
        also be :class:`pd.kernels.fp8.Fp8Rows` if :attr:`fp8_inputs` is not None."""

    @abstractmethod
    def list_tensors(self) -> NamedPlaces:
        """List the weights: names below ``checkpoint_name``, and the memory of each."""


class GatedMLP(MLP):
    """``down(silu(gate(x)) * up(x))``.

    Args:
        size: width of the rank's part; None for that of the configuration.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, size: int | None = None) -> None:
        super().__init__()
        size = config.intermediate_size if size is None else size
        gate_up = {"gate_proj": size, "up_proj": size}
        hidden, bias, quantization = config.hidden_size, config.mlp_bias, config.quantization
        self.gate_up = Linear(gate_up, hidden, bias, split=True, quantization=quantization)
        self.down = ReducedLinear("down_proj", hidden, size, bias, tp, quantization)

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return self.gate_up.matrix.fp8_inputs

    def forward(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        return self.down.forward(self._activate(x))

    def compute_part(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """Compute this rank's summand of :meth:`forward`."""
        return self.down.compute_part(self._activate(x))

    def _activate(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor | Fp8Rows:
        """Return the inputs of the second product."""
        inputs = self.down.matrix.fp8_inputs
        if inputs is not None:
            return silu_and_quantize(self.gate_up.forward(x), inputs)
        return gate_up_silu(x, self.gate_up.weight, self.gate_up.bias)

    def list_tensors(self) -> NamedPlaces:
        yield from self.gate_up.list_tensors()
        yield from self.down.list_tensors()


class ExpertNames(NamedTuple):
    """Names in a checkpoint: of a mixture of experts, and of an expert's weights."""

    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


PLAIN_NAMES = ExpertNames()


def find_local_experts(config: ModelConfig, tp: TensorParallel) -> LocalExperts | None:
    """Return the experts of this rank, of which it may have only a part; None if it has a part of
    all experts."""
    if config.ep_size == 1:
        return None
    group = tp.rank * config.ep_size // tp.size
    return LocalExperts(group * config.num_local_experts, config.num_experts)


class Experts(nn.Module):
    """The gated MLPs of a mixture. Each rank has a part of every expert, or of every expert of its
    group of ranks."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, names: ExpertNames = PLAIN_NAMES
    ) -> None:
        super().__init__()
        self._names, self._count = names, config.num_local_experts
        self._local, self._groups = find_local_experts(config, tp), config.ep_size
        hidden, self._size = config.hidden_size, config.intermediate_size
        both, quantization = [self._size] * 2, config.quantization
        self.gate_up = Matrix(both, hidden, quantization, stack=self._count, is_split=True)
        first = tp.rank % (tp.size // self._groups) * self._size
        self.down = Matrix([hidden], self._size, quantization, stack=self._count, first_input=first)

    def compute_part(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute this rank's summand of :func:`pd.kernels.moe.moe_mlp`."""
        gate_up, down = self.gate_up.weight, self.down.weight
        return moe_mlp(x, weights, ids, gate_up, down, local=self._local)

    def prepare_weights(self) -> None:
        self.gate_up.prepare_weights()
        self.down.prepare_weights()

    def list_tensors(self) -> NamedPlaces:
        names, size, place = self._names, self._size, self.gate_up.place_rows
        first, groups = 0 if self._local is None else self._local.first, self._groups
        for index in range(self._count):
            expert = f"experts.{first + index}"
            yield f"{expert}.{names.gate}.weight", place(0, size, 0, index, groups=groups)
            yield f"{expert}.{names.up}.weight", place(size, 2 * size, 0, index, groups=groups)
            down = self.down.place_rows(0, None, 1, index, groups=groups)
            yield f"{expert}.{names.down}.weight", down


class SparseMoE(MLP):
    """A router and gated MLPs. Each token uses ``num_experts_per_tok`` of them.

    Router probabilities are a softmax over all experts. With ``norm_topk_prob`` the chosen ones are
    scaled to sum to 1, which equals a softmax over the chosen experts alone. Each rank has its own
    copy of the router.
    """

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, names: ExpertNames = PLAIN_NAMES
    ) -> None:
        super().__init__()
        self._tp = tp
        self.checkpoint_name = names.mlp
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.router = Linear({"gate": config.num_experts}, config.hidden_size)
        self.experts = Experts(config, tp, names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = route_tokens(self.router(x), self._top_k, self._normalize)
        return self._tp.all_reduce(self.experts.compute_part(x, weights, ids))

    def list_tensors(self) -> NamedPlaces:
        yield from self.router.list_tensors()
        yield from self.experts.list_tensors()


def add_prefix(prefix: str, places: NamedPlaces) -> NamedPlaces:
    """Put ``prefix`` and a dot before the names of places."""
    for name, place in places:
        yield f"{prefix}.{name}", place
