"""Qwen3 in plain PyTorch, for training and for measuring the shipped files.

Weights of all layers are stacked by kind, so that the optimizer treats them as one tensor. The two
functions around attention see tokens as one flat list: compiled once, they serve every layer and
every shape of a batch of as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

THETA = 1e6
EPS = 1e-6
CONTEXT_LENGTH = 8192


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``head_dim`` is that of every head."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int = 64


EMBEDDED = Shape(vocab=2048, hidden=256, layers=6, heads=8, kv_heads=2, mlp=512)
DRAFT = Shape(vocab=2048, hidden=128, layers=2, heads=4, kv_heads=2, mlp=384)
# EAGLE heads: one layer over the embedded model's hidden states, sharing that model's embedding.
# EAGLE-1 shares its output matrix, too; EAGLE-3 has one for the most frequent tokens.
EAGLE = Shape(vocab=2048, hidden=256, layers=1, heads=4, kv_heads=2, mlp=512)
EAGLE3 = Shape(vocab=1536, hidden=256, layers=1, heads=4, kv_heads=2, mlp=512)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Normalize by RMS over the last dimension, in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[tokens, heads, head_dim]`` by positions, with cos and sin ``[tokens, dim / 2]``."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def before_attention(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute queries, keys and values ``[tokens, heads, head_dim]`` of the residual stream
    ``x``."""
    head_dim = len(q_norm)
    normed = rms_norm(x, norm)
    q, k, v = (
        functional.linear(normed, weight.to(x.dtype)).view(len(x), -1, head_dim)
        for weight in (q_weight, k_weight, v_weight)
    )
    return rotate(rms_norm(q, q_norm), cos, sin), rotate(rms_norm(k, k_norm), cos, sin), v


def project(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do :func:`before_attention` without norms, for ``x`` of any width."""
    q, k, v = (
        functional.linear(x, weight.to(x.dtype)).view(len(x), -1, 2 * cos.shape[-1])
        for weight in (q_weight, k_weight, v_weight)
    )
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after_attention(
    x: torch.Tensor,
    attended: torch.Tensor,
    o_weight: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Add attention's output and the MLP to the residual stream."""
    x = x + functional.linear(attended, o_weight.to(x.dtype))
    normed = rms_norm(x, norm)
    gated = functional.silu(functional.linear(normed, gate.to(x.dtype)))
    inner = gated * functional.linear(normed, up.to(x.dtype))
    return x + functional.linear(inner, down.to(x.dtype))


@dataclass
class Kernels:
    """The functions around attention, compiled or not."""

    before: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = before_attention
    project: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = project
    after: Callable[..., torch.Tensor] = after_attention

    @classmethod
    def compiled(cls) -> Kernels:
        return cls(
            torch.compile(before_attention, dynamic=False),
            torch.compile(project, dynamic=False),
            torch.compile(after_attention, dynamic=False),
        )


# (layer, q, k, v) to what attention makes of them, all [tokens, heads, head_dim].
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Blocks(nn.Module):
    """Decoder layers with weights ``[layers, …]`` by kind."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n, h, d = shape.layers, shape.hidden, shape.head_dim
        self.q_proj = matrices(n, shape.heads * d, h)
        self.k_proj = matrices(n, shape.kv_heads * d, h)
        self.v_proj = matrices(n, shape.kv_heads * d, h)
        self.o_proj = matrices(n, h, shape.heads * d, scale=0.3)
        self.gate_proj = matrices(n, shape.mlp, h)
        self.up_proj = matrices(n, shape.mlp, h)
        self.down_proj = matrices(n, h, shape.mlp, scale=0.3)
        self.input_layernorm = nn.Parameter(torch.ones(n, h))
        self.post_attention_layernorm = nn.Parameter(torch.ones(n, h))
        self.q_norm = nn.Parameter(torch.ones(n, d))
        self.k_norm = nn.Parameter(torch.ones(n, d))

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        kernels: Kernels,
        streams: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the residual stream ``[tokens, hidden]`` after all layers, in the dtype of ``x``.
        Appends the streams before each layer and after the last one to ``streams``."""
        first = (self.input_layernorm, self.q_proj, self.k_proj, self.v_proj)
        first = (*first, self.q_norm, self.k_norm)
        second = (self.o_proj, self.post_attention_layernorm)
        second = (*second, self.gate_proj, self.up_proj, self.down_proj)
        before = zip(*(weight.unbind() for weight in first), strict=True)
        after = zip(*(weight.unbind() for weight in second), strict=True)
        if streams is not None:
            streams.append(x)
        for layer, (some, others) in enumerate(zip(before, after, strict=True)):
            q, k, v = kernels.before(x, cos, sin, *some)
            attended = attend(layer, q, k, v).reshape(len(x), -1)
            x = kernels.after(x, attended, *others)
            if streams is not None:
                streams.append(x)
        return x


def matrices(layers: int, outputs: int, inputs: int, scale: float = 1.0) -> nn.Parameter:
    """Draw matrices ``[layers, outputs, inputs]`` that keep the size of their inputs."""
    return nn.Parameter(torch.randn(layers, outputs, inputs) * scale * inputs**-0.5)


class Qwen3(nn.Module):
    """A causal language model whose output head is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.05)
        self.blocks = Blocks(shape)
        self.norm = nn.Parameter(torch.ones(shape.hidden))

    def hidden(
        self,
        ids: torch.Tensor,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
        streams: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states before the last norm, ``[batch * length, hidden]``.

        Args:
            ids: int64 ``[batch, length]``, each row a sequence from position 0.
            dtype: of the computation; weights stay in theirs.
            streams: receives the residual stream before each layer and after the last.
        """
        batch, length = ids.shape
        cos, sin = (
            t.repeat(batch, 1)
            for t in rotations(torch.arange(length, device=ids.device), self.shape.head_dim)
        )
        x = _Lookup.apply(self.embed_tokens, ids.flatten(), dtype)
        return self.blocks(x, cos, sin, Causal(batch), kernels or Kernels(), streams)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute float32 ``[tokens, vocab]`` of rows of :meth:`hidden`."""
        normed = rms_norm(hidden, self.norm)
        return functional.linear(normed, self.embed_tokens.to(hidden.dtype)).float()


class _Lookup(torch.autograd.Function):
    """Rows of the embedding, with a gradient that is a product with one-hot rows.

    Few tokens make up most of the text, and PyTorch's own adds up each one's rows one by one.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return functional.embedding(ids, weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        chosen = gradient.new_zeros(len(ids), ctx.rows).scatter_(1, ids[:, None], 1.0)
        return (chosen.T @ gradient).float(), None, None


@dataclass
class Causal:
    """Causal attention within each of ``batch`` rows. It can keep keys and values.

    Attributes:
        cache: keys and values by layer, ``[batch, kv_heads, length, head_dim]``.
    """

    batch: int
    keep: bool = False
    cache: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (split_rows(x, self.batch) for x in (q, k, v))
        if self.keep:
            self.cache.append((k, v))
        if q.dtype == torch.float32:
            # No kernel but the one that writes out all scores knows grouped queries in float32.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def split_rows(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Turn ``[batch * length, heads, dim]`` into ``[batch, heads, length, dim]``."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def rotations(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosine and sine ``[tokens, head_dim / 2]`` in float32 for int64 positions."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions.float()[:, None] / THETA**exponents
    return angles.cos(), angles.sin()
