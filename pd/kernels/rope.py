"""Rotary position embedding (Su et al., 2021). It rotates the two halves of a head, like Llama, or
those of its first part."""

from __future__ import annotations

import math

import torch

from pd.kernels.dispatch import uses_triton
from pd.kernels.kv_store import UNSCALED, KVScales, store_kv
from pd.kernels.norm import rms_norm


def inverse_frequencies(
    head_dim: int,
    theta: float,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_context: int = 8192,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> torch.Tensor:
    """Return the radians per token of each pair of dimensions, float32 ``[head_dim / 2]`` on the
    CPU. ``head_dim`` counts only dimensions that are rotated.

    ``linear`` divides all by ``factor`` (Chen et al., 2023). ``llama3`` (Llama 3.1's release) keeps
    short wavelengths, divides long ones and blends between ``original_context / high_freq_factor``
    and ``original_context / low_freq_factor`` tokens. ``yarn`` (Peng et al., 2023) keeps
    dimensions that rotate at least ``beta_fast`` times in ``original_context`` tokens, divides
    those that rotate at most ``beta_slow`` times, and blends dimension by dimension between; with
    ``truncate`` the bounds are whole dimensions. ``dynamic`` changes nothing within the context.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if kind == "linear":
        return frequencies / factor
    if kind == "yarn":
        blend = _blend_dimensions(
            head_dim, theta, original_context, (beta_fast, beta_slow), truncate
        )
        return frequencies / factor * blend + frequencies * (1 - blend)
    if kind != "llama3":
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    rotations = original_context / wavelengths
    blend = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(rotations < low_freq_factor, frequencies / factor, frequencies)
    is_between = (rotations >= low_freq_factor) & (rotations <= high_freq_factor)
    return torch.where(is_between, blended, scaled)


def _blend_dimensions(
    head_dim: int, theta: float, context: int, rotations: tuple[float, float], truncate: bool
) -> torch.Tensor:
    """Return how far ``yarn`` divides each frequency: float32 ``[head_dim / 2]`` from 0 for not at
    all to 1."""
    low, high = (
        head_dim * math.log(context / (count * 2 * math.pi)) / (2 * math.log(theta))
        for count in rotations
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    return ((pairs - low) / (high - low)).clamp_(0, 1)


def compute_rotations(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Compute cosine and sine of each position's angles.

    Args:
        positions: int64 ``[tokens]``.
        frequencies: float32 ``[head_dim / 2]``, see :func:`inverse_frequencies`.
        scale: factor of all results.

    Returns:
        float32 ``[2, tokens, 1, head_dim / 2]``, the same for every layer and head of a step.
    """
    if uses_triton(positions):
        from pd.kernels import rope_triton

        return rope_triton.compute_rotations(positions, frequencies, scale)
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    rotations = torch.stack((angles.cos(), angles.sin()))
    return rotations if scale == 1.0 else rotations.mul_(scale)


def apply_rope(
    x: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotate each head of each token.

    Args:
        x: ``[tokens, heads, head_dim]``; the last dimension contiguous.
        cos_sin: from :func:`compute_rotations`. If it is for smaller heads, the first dimensions
            of each head are rotated and the others are copied.
        interleaved: whether neighbouring dimensions of ``x`` are a pair. In the result, the two
            halves are pairs in any case, so rotate q and k alike.

    Returns:
        A new contiguous tensor like ``x``, computed in float32.
    """
    cos, sin = cos_sin[0], cos_sin[1]
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    if interleaved:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    if x.dtype != torch.float32:
        first, second = first.float(), second.float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out.to(x.dtype)


def rotate_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: KVScales = UNSCALED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the work between the fused projection and attention: the RMS norm of each head of q and k
    if the model has one (Qwen3), their rotation, and the write of k and v into the pool.

    Args:
        qkv: contiguous ``[tokens, num_heads + 2 * num_kv_heads, head_dim]``. Do not use it
            afterwards, because it may hold the results.
        cos_sin: from :func:`compute_rotations`, perhaps for the first part of each head.
        keys, values: a layer's pool, contiguous ``[slots, num_kv_heads, head_dim]``.
        slots: int64 ``[tokens]``, each inside the pool (not checked on a GPU).
        q_weight, k_weight: ``[head_dim]``, both or neither.
        eps: epsilon of the norm.
        scales: of the layer's pool, see :func:`pd.kernels.kv_store.store_kv`.

    Returns:
        q ``[tokens, num_heads, head_dim]``, k and v ``[tokens, num_kv_heads, head_dim]``. Their
        last two dimensions are contiguous.
    """
    if uses_triton(qkv):
        from pd.kernels import rope_triton

        return rope_triton.rotate_and_store(
            *(qkv, num_heads, num_kv_heads, cos_sin, keys, values, slots),
            *(q_weight, k_weight, eps, scales),
        )
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q = apply_rope(rms_norm(q, q_weight, eps), cos_sin)
        k = apply_rope(rms_norm(k, k_weight, eps), cos_sin)
    else:
        rotated = apply_rope(qkv[:, : num_heads + num_kv_heads], cos_sin)
        q, k = rotated.split((num_heads, num_kv_heads), dim=1)
    store_kv(keys, values, slots, k, v, scales)
    return q, k, v
