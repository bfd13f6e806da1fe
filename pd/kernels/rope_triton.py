"""The kernels for :mod:`pd.kernels.rope`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd.kernels.kv_store import UNSCALED, KVScales, invert_scale
from pd.kernels.kv_store_triton import convert_stored
from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

# Heads of a token per program.
_HEADS = 8


# Without this option the kernel would be compiled again for 1 token and for multiples of 16.
@triton.jit(do_not_specialize=("tokens",))
def _compute_rotations(
    positions, frequencies, out, tokens, scale, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HALF
    position = tl.load(positions + token).to(tl.float32)
    angles = position * tl.load(frequencies + columns, mask=mask, other=0.0)
    there = out + token * HALF + columns
    tl.store(there, tl.cos(angles) * scale, mask=mask)
    tl.store(there + tokens.to(tl.int64) * HALF, tl.sin(angles) * scale, mask=mask)


def compute_rotations(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """:func:`pd.kernels.rope.compute_rotations`."""
    tokens, half = len(positions), len(frequencies)
    out = torch.empty((2, tokens, 1, half), dtype=torch.float32, device=positions.device)
    if tokens:
        block = triton.next_power_of_2(half)
        args = (positions, frequencies, out, tokens, scale)
        launch_kernel(
            _compute_rotations, (tokens,), out.device, *args, HALF=half, BLOCK=block, num_warps=1
        )
    return out


@triton.jit(do_not_specialize=("tokens",))
def _rotate_and_store(
    qkv,
    cos_sin,
    keys,
    values,
    slots,
    q_weight,
    k_weight,
    tokens,
    eps,
    k_inverse,
    v_inverse,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one token: q and k are rotated in place; k and v go to the pool.

    A program has HALF pairs of dimensions of a head. The first ROTATED pairs are rotated. A pool in
    fp8 gets k and v times ``k_inverse`` and ``v_inverse``.
    """
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (columns < HALF)
    is_q = heads < NUM_HEADS
    is_v = heads >= NUM_HEADS + NUM_KV_HEADS
    dtype: tl.constexpr = qkv.dtype.element_ty
    # Dimensions of the pairs.
    at_first, at_second = columns, columns + HALF
    is_rotated = columns < ROTATED
    if ROTATED < HALF:
        at_first = tl.where(is_rotated, columns, columns + ROTATED)
        at_second = tl.where(is_rotated, columns + ROTATED, columns + HALF)

    there = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + heads) * 2 * HALF
    stored_first = tl.load(there + at_first, mask=mask, other=0.0)
    stored_second = tl.load(there + at_second, mask=mask, other=0.0)
    first, second = stored_first.to(tl.float32), stored_second.to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        weights = tl.where(is_q, q_weight + at_first, k_weight + at_first)
        first = (first * scale).to(dtype).to(tl.float32)
        second = (second * scale).to(dtype).to(tl.float32)
        first = first * tl.load(weights, mask=mask, other=0.0).to(tl.float32)
        weights = tl.where(is_q, q_weight + at_second, k_weight + at_second)
        second = second * tl.load(weights, mask=mask, other=0.0).to(tl.float32)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)

    angles = cos_sin + token * ROTATED + columns
    cos = tl.load(angles, mask=is_rotated, other=1.0)
    sin = tl.load(angles + tokens.to(tl.int64) * ROTATED, mask=is_rotated, other=0.0)
    out_first = tl.where(is_v, stored_first, (first * cos - second * sin).to(dtype))
    out_second = tl.where(is_v, stored_second, (second * cos + first * sin).to(dtype))

    tl.store(there + at_first, out_first, mask=mask & ~is_v)
    tl.store(there + at_second, out_second, mask=mask & ~is_v)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.where(is_v, heads - NUM_HEADS - NUM_KV_HEADS, heads - NUM_HEADS)
    row = (slot * NUM_KV_HEADS + head) * 2 * HALF
    pool = tl.where(is_v, values + row, keys + row)
    inverse = tl.where(is_v, v_inverse, k_inverse)
    TO_FP8: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    tl.store(pool + at_first, convert_stored(out_first, inverse, TO_FP8), mask=mask & ~is_q)
    tl.store(pool + at_second, convert_stored(out_second, inverse, TO_FP8), mask=mask & ~is_q)


def rotate_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    scales: KVScales = UNSCALED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`pd.kernels.rope.rotate_and_store`, in place in ``qkv``."""
    tokens, num_all, head_dim = qkv.shape
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    has_norm = q_weight is not None
    block = triton.next_power_of_2(head_dim // 2)
    if tokens:
        launch_kernel(
            _rotate_and_store,
            (tokens, triton.cdiv(num_all, _HEADS)),
            qkv.device,
            qkv,
            cos_sin,
            keys,
            values,
            slots,
            q_weight if has_norm else qkv,
            k_weight if has_norm else qkv,
            tokens,
            eps,
            invert_scale(scales.key),
            invert_scale(scales.value),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            ROTATED=cos_sin.shape[-1],
            HEADS=_HEADS,
            BLOCK=block,
            NORM=has_norm,
            num_warps=max(1, _HEADS * block // 256),
        )
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v
