"""The least time that a GPU could take: its memory read at full speed, its matrix units busy.

A decode step reads all weights once and the KV of every sequence once. For a mixture of experts we
count the experts that the batch is expected to choose if all are equally likely. A prompt costs two
floating-point operations per weight and token (of the output head only for its last token) and the
products of causal attention, of latents in the form that has fewer. The roofline is the slower of
the two. We leave out activations, KV writes and the embedding's rows. A layer with a sliding window
reads no KV before it. Ceilings are rates that simple programs reached on the GPU, because data
sheets promise more: an H200 streams 4.33 TB/s and computes 800 TFLOP/s of bf16 products and 1,490
of fp8 products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.models.config import ModelConfig


# Bytes of a weight in MXFP4, with its share of a scale.
_MXFP4_WIDTH = 17 / 32


@dataclass(frozen=True)
class GpuCeiling:
    """Highest measured rates of a GPU, per second."""

    read_bytes: float
    flops: float
    fp8_flops: float


CEILINGS = {"NVIDIA H200": GpuCeiling(read_bytes=4.33e12, flops=800e12, fp8_flops=1.49e15)}


class Roofline:
    """Least times, in seconds, of a model on ``num_gpus`` GPUs with this ceiling.

    Args:
        width: bytes of one weight; kv_width: of one number in the KV cache.
    """

    def __init__(
        self,
        model: ModelConfig,
        width: int,
        ceiling: GpuCeiling,
        num_gpus: int = 1,
        kv_width: int | None = None,
    ) -> None:
        self._model = model
        self._width = width
        self._read_bytes = ceiling.read_bytes * num_gpus
        self._flops = ceiling.flops * num_gpus
        # A multiplication with a weight in fp8 takes this share of the time of another.
        is_fp8 = model.quantization is not None
        self._layer_width = 1 if is_fp8 else width
        self._layer_share = ceiling.flops / ceiling.fp8_flops if is_fp8 else 1.0
        self._head = model.hidden_size * model.vocab_size
        # Bytes of one token's KV.
        vectors = 2 if model.latent is None else 1
        row = model.num_kv_heads * model.head_dim * (kv_width or width)
        self._kv_bytes = vectors * row * model.num_layers

    def _weight_bytes(self, num_tokens: int) -> float:
        """Count the bytes of all weights that this many tokens use together."""
        model, experts = self._model, 1.0
        if model.num_experts:
            missed = 1 - model.num_experts_per_tok / model.num_experts
            experts = model.num_experts * (1 - missed**num_tokens)
        others = model.count_weights(0) * self._layer_width + self._head * self._width
        routed = model.count_weights(experts) - model.count_weights(0)
        routed_width = _MXFP4_WIDTH if model.mxfp4_experts else self._layer_width
        return others + routed * routed_width

    def _count_seen(self, context: float) -> float:
        """Count the tokens that the last of ``context`` tokens sees, on average over the layers."""
        windows = self._model.windows or (0,)
        return sum(min(context, each or context) for each in windows) / len(windows)

    def _count_flops(self, num_tokens: int, pair_flops: float, num_logits: int) -> float:
        """Count floating-point operations, those in fp8 by their time; ``pair_flops`` are those of
        queries with their keys."""
        layers = self._model.token_flops * num_tokens * self._layer_share
        return layers + pair_flops + 2 * self._head * num_logits

    def _seconds(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self._read_bytes, flops / self._flops)

    def decode_seconds(self, batch: int, context: float) -> float:
        """One step of ``batch`` sequences of ``context`` tokens each."""
        pairs = batch * self._count_seen(context)
        num_bytes = self._weight_bytes(batch) + pairs * self._kv_bytes
        return self._seconds(
            num_bytes, self._count_flops(batch, pairs * self._model.decode_pair_flops, batch)
        )

    def prefill_seconds(self, num_tokens: int, cached: int = 0) -> float:
        """A prompt of ``num_tokens``; the pool has ``cached`` of them."""
        new = num_tokens - cached
        pairs = new * self._count_seen(cached + (new + 1) / 2)
        num_bytes = self._weight_bytes(new) + self._count_seen(cached) * self._kv_bytes
        return self._seconds(num_bytes, self._count_flops(new, pairs * self._model.pair_flops, 1))

    def offline_seconds(self, count: int, num_in: int, num_out: int, batch: int) -> float:
        """``count`` prompts, then the decode steps of full batches at their mean context."""
        batch = min(batch, count)
        steps = math.ceil(count / batch) * (num_out - 1)
        decoding = steps * self.decode_seconds(batch, num_in + num_out / 2)
        return count * self.prefill_seconds(num_in) + decoding
