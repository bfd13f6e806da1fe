"""The kernels for :func:`pd.kernels.sampling.sample_rows`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd.kernels.sampling_filters_triton import find_row_thresholds
from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

# Tokens of a row per program.
_CHUNK = 4096


@triton.jit
def _mix_bits(x):
    """The hash "lowbias32" of pd.kernels.sampling, of uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _xor_shift(x, BITS: tl.constexpr):
    """splitmix64's ``x ^ (x >> BITS)`` of uint64."""
    return x ^ (x >> BITS)


@triton.jit
def _mix_noise_keys(noise_at, row):
    """Two uint32 keys as defined by :func:`pd.kernels.sampling.mix_noise_keys`."""
    seed = tl.load(noise_at + 2 * row).to(tl.uint64, bitcast=True)
    position = tl.load(noise_at + 2 * row + 1).to(tl.uint64, bitcast=True)
    z = (seed ^ (position * 0xD1342543DE82EF95)) + 0x9E3779B97F4A7C15
    z = _xor_shift(z, 30) * 0xBF58476D1CE4E5B9
    z = _xor_shift(z, 27) * 0x94D049BB133111EB
    z = _xor_shift(z, 31)
    return (z & 0xFFFFFFFF).to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def _make_gumbel(first_key, second_key, tokens):
    """float32 noise as defined by :func:`pd.kernels.sampling.make_gumbel_noise`.

    Triton has no log1p, so we use Kahan's correction of log (see Higham, Accuracy and Stability of
    Numerical Algorithms, section 1.14.1).
    """
    x = tokens.to(tl.uint32) * 0x9E3779B9
    x = _mix_bits(x ^ first_key)
    x = _mix_bits(x ^ second_key)
    u = ((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    u = tl.minimum(u, 0.9999999403953552)  # 1 - 2^-24
    rest = 1.0 - u
    is_tiny = rest == 1.0
    exponential = tl.where(is_tiny, u, tl.log(rest) * u / tl.where(is_tiny, 1.0, rest - 1.0))
    return -tl.log(exponential)


@triton.jit
def _sample_chunks(
    logits,
    temperatures,
    noise_at,
    thresholds,
    best_values,
    best_tokens,
    are_finite,
    token_ids,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTER: tl.constexpr,
    NAMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best token of one chunk of one row, and whether the chunk's logits are below infinity.
    With NAMED, column i stands for ``token_ids[i]``."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(
        logits + row * vocab_size + tokens, mask=tokens < vocab_size, other=float("-inf")
    ).to(tl.float32)
    is_finite = tl.max((~(values < float("inf"))).to(tl.int32), 0) == 0
    values = tl.where(values < float("inf"), values, float("-inf"))
    if RANDOM:
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            values = tl.div_rn(values, tl.maximum(temperature, MIN_TEMPERATURE))
            if FILTER:
                values = tl.where(values < tl.load(thresholds + row), float("-inf"), values)
            first_key, second_key = _mix_noise_keys(noise_at, row)
            names = tokens
            if NAMED:
                names = tl.load(token_ids + tokens, mask=tokens < vocab_size, other=0).to(tl.int32)
            values += _make_gumbel(first_key, second_key, names)
    best = tl.max(values, 0)
    there = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_values + there, best)
    tl.store(best_tokens + there, tl.min(tl.where(values == best, tokens, 0x7FFFFFFF), 0))
    tl.store(are_finite + there, is_finite.to(tl.int32))


@triton.jit
def _best_of_chunks(
    best_values,
    best_tokens,
    are_finite,
    tokens,
    finite,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    mask = chunks < CHUNKS
    there = row * CHUNKS + chunks
    values = tl.load(best_values + there, mask=mask, other=float("-inf"))
    candidates = tl.load(best_tokens + there, mask=mask, other=0x7FFFFFFF)
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, candidates, 0x7FFFFFFF), 0)
    tl.store(tokens + row, token.to(tl.int64))
    chunk_finite = tl.load(are_finite + there, mask=mask, other=1)
    tl.store(finite + row, (tl.min(chunk_finite, 0) > 0) & (best > float("-inf")))


def sample_rows(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    noise_at: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    any_random: bool,
    any_filter: bool,
    min_temperature: float,
    token_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`pd.kernels.sampling.sample_rows`, for contiguous logits."""
    rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    chunks = triton.cdiv(vocab_size, _CHUNK)
    tokens, finite = _make_empty(logits, rows, torch.int64), _make_empty(logits, rows, torch.bool)
    if rows == 0:
        return tokens, finite
    values = _make_empty(logits, (rows, chunks))
    best, finite_chunks = (_make_empty(logits, (rows, chunks), torch.int32) for _ in range(2))
    is_filtered = any_random and any_filter
    thresholds = values
    if is_filtered:
        thresholds = find_row_thresholds(logits, temperatures, top_k, top_p, min_p, min_temperature)
    launch_kernel(
        _sample_chunks,
        (rows, chunks),
        logits.device,
        *(logits, temperatures, noise_at, thresholds, values, best, finite_chunks),
        *(best if token_ids is None else token_ids, vocab_size),
        MIN_TEMPERATURE=min_temperature,
        CHUNK=_CHUNK,
        RANDOM=any_random,
        FILTER=is_filtered,
        NAMED=token_ids is not None,
        num_warps=8,
    )
    launch_kernel(
        _best_of_chunks,
        (rows,),
        logits.device,
        *(values, best, finite_chunks, tokens, finite),
        CHUNKS=chunks,
        BLOCK=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    return tokens, finite


def _make_empty(
    like: torch.Tensor, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)
