"""The kernels behind :func:`pd.kernels.sampling.sample_rows`.

Thresholds are found without sorting: the wanted one is the largest value t for which the tokens
that are no smaller than t are enough, in number (top-k) or in mass (top-p). One program per row
bisects, first over all tokens until few are left in question, then over those alone, which fit its
registers. Bisecting ends on the bits of one float, so ties and thresholds are exact.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd.kernels.triton_launch import launch, start_next, wait_for_previous

# Tokens of a row that one program samples from.
_CHUNK = 4096
# Tokens that the threshold's program reads at a time, and how many it keeps in registers.
_BLOCK, _CANDIDATES = 8192, 2048


@triton.jit
def _mix(x):
    """The hash "lowbias32" of pd.kernels.sampling, of uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    """splitmix64's ``x ^ (x >> BITS)`` of uint64."""
    return x ^ (x >> BITS)


@triton.jit
def _noise_keys(noise_at, row):
    """Two uint32 keys as :func:`pd.kernels.sampling.noise_keys` defines them."""
    seed = tl.load(noise_at + 2 * row).to(tl.uint64, bitcast=True)
    position = tl.load(noise_at + 2 * row + 1).to(tl.uint64, bitcast=True)
    z = (seed ^ (position * 0xD1342543DE82EF95)) + 0x9E3779B97F4A7C15
    z = _shifted(z, 30) * 0xBF58476D1CE4E5B9
    z = _shifted(z, 27) * 0x94D049BB133111EB
    z = _shifted(z, 31)
    return (z & 0xFFFFFFFF).to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def _gumbel(first_key, second_key, tokens):
    """float32 noise as :func:`pd.kernels.sampling.gumbel_noise` defines it.

    log1p by Kahan's correction of log (see Higham, Accuracy and Stability of Numerical Algorithms,
    section 1.14.1), since Triton has none.
    """
    x = tokens.to(tl.uint32) * 0x9E3779B9
    x = _mix(x ^ first_key)
    x = _mix(x ^ second_key)
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
            first_key, second_key = _noise_keys(noise_at, row)
            names = tokens
            if NAMED:
                names = tl.load(token_ids + tokens, mask=tokens < vocab_size, other=0).to(tl.int32)
            values += _gumbel(first_key, second_key, names)
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


@triton.jit
def _order(values):
    """int32 in the order of the floats, and its own inverse on their bits."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _amounts(scaled, vocab_size, order, best, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Mass (or number, twice) and number of the tokens that are not below ``order``."""
    amounts = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(scaled + tokens, mask=tokens < vocab_size, other=float("-inf"))
        is_in = (_order(values) >= order) & (tokens < vocab_size)
        counts += is_in.to(tl.int32)
        if BY_MASS:
            amounts += tl.where(is_in, tl.exp(values - best), 0.0)
    count = tl.sum(counts, 0)
    if BY_MASS:
        return tl.sum(amounts, 0), count
    else:
        return count.to(tl.float32), count


@triton.jit
def _largest_enough(
    scaled,
    candidates,
    vocab_size,
    target,
    lowest,
    num_finite,
    best,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The order of the largest token such that those not below it amount to ``target``.

    ``[low, high)`` holds it throughout. What is not below ``high`` amounts to ``above`` and is no
    more in question.
    """
    low, high = _order(lowest).to(tl.int64), _order(best).to(tl.int64) + 1
    num_low, num_high, above = num_finite, 0, 0.0
    step = 0
    while (num_low - num_high > CANDIDATES) & (high - low > 1):
        # The first steps bisect by value: by bits, half of all steps would go to tiny numbers.
        middle = (low + high) >> 1
        if step < 12:
            between = _order(0.5 * _value(low) + 0.5 * _value(high - 1)).to(tl.int64)
            middle = tl.minimum(tl.maximum(between, low + 1), high - 1)
        amount, count = _amounts(scaled, vocab_size, middle, best, BY_MASS, BLOCK)
        if amount >= target:
            low, num_low = middle, count
        else:
            high, num_high, above = middle, count, amount
        step += 1
    if high - low != 1:
        # The tokens in question are packed in memory, then kept in registers.
        filled = 0
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            values = tl.load(scaled + tokens, mask=tokens < vocab_size, other=float("-inf"))
            order = _order(values)
            is_in = (order >= low) & (order < high) & (tokens < vocab_size)
            places = filled + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(candidates + places, values, mask=is_in & (places < CANDIDATES))
            filled += tl.sum(is_in.to(tl.int32), 0)
        tl.debug_barrier()
        places = tl.arange(0, CANDIDATES)
        values = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
        order = _order(values)
        amounts = tl.full([CANDIDATES], 1.0, tl.float32)
        if BY_MASS:
            amounts = tl.exp(values - best)
        while high - low != 1:
            middle = (low + high) >> 1
            is_in = (order >= middle) & (places < filled)
            if above + tl.sum(tl.where(is_in, amounts, 0.0), 0) >= target:
                low = middle
            else:
                high = middle
        tl.debug_barrier()
    return low


@triton.jit
def _thresholds(
    logits,
    temperatures,
    top_k,
    top_p,
    min_p,
    scaled,
    candidates,
    thresholds,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The smallest logit, divided by the temperature, that one row's filters keep."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    limit_k, limit_p = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row)
    fraction = tl.load(min_p + row)
    threshold = float("-inf")
    if (temperature > 0.0) & ((limit_k < vocab_size) | (limit_p < 1.0) | (fraction > 0.0)):
        logits += row * vocab_size
        scaled += row * vocab_size
        candidates += row * CANDIDATES
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        finite = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
            tokens = start + tl.arange(0, BLOCK)
            mask = tokens < vocab_size
            values = tl.load(logits + tokens, mask=mask, other=float("-inf")).to(tl.float32)
            values = tl.div_rn(values, tl.maximum(temperature, MIN_TEMPERATURE))
            tl.store(scaled + tokens, values, mask=mask)
            highest = tl.maximum(highest, values)
            is_finite = values > float("-inf")
            lowest = tl.minimum(lowest, tl.where(is_finite, values, float("inf")))
            finite += is_finite.to(tl.int32)
        tl.debug_barrier()
        best, low, num_finite = tl.max(highest, 0), tl.min(lowest, 0), tl.sum(finite, 0)
        if fraction > 0.0:
            threshold = best + tl.log(fraction)
        # A row of infinities or NaN has no token worth finding.
        if (best < float("inf")) & (low <= best):
            order = _order(low).to(tl.int64)
            total = 0.0
            if limit_k < num_finite:
                order = _largest_enough(
                    scaled,
                    candidates,
                    vocab_size,
                    limit_k.to(tl.float32),
                    low,
                    num_finite,
                    best,
                    False,
                    BLOCK,
                    CANDIDATES,
                )
                threshold = tl.maximum(threshold, _value(order))
            if limit_p < 1.0:
                # Among tokens equal to the last of the top k, only enough to make k count.
                total, count = _amounts(scaled, vocab_size, order, best, True, BLOCK)
                if limit_k < count:
                    total -= (count - limit_k).to(tl.float32) * tl.exp(_value(order) - best)
                order = _largest_enough(
                    scaled,
                    candidates,
                    vocab_size,
                    total * limit_p,
                    low,
                    num_finite,
                    best,
                    True,
                    BLOCK,
                    CANDIDATES,
                )
                threshold = tl.maximum(threshold, _value(order))
    tl.store(thresholds + row, threshold)


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
    """:func:`pd.kernels.sampling.sample_rows`, of contiguous logits."""
    rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    chunks = triton.cdiv(vocab_size, _CHUNK)
    tokens, finite = _empty(logits, rows, torch.int64), _empty(logits, rows, torch.bool)
    if rows == 0:
        return tokens, finite
    values = _empty(logits, (rows, chunks))
    best, finite_chunks = (_empty(logits, (rows, chunks), torch.int32) for _ in range(2))
    is_filtered = any_random and any_filter
    thresholds = values
    if is_filtered:
        thresholds = _row_thresholds(logits, temperatures, top_k, top_p, min_p, min_temperature)
    launch(
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
    launch(
        _best_of_chunks,
        (rows,),
        logits.device,
        *(values, best, finite_chunks, tokens, finite),
        CHUNKS=chunks,
        BLOCK=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    return tokens, finite


def _row_thresholds(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    min_temperature: float,
) -> torch.Tensor:
    """float32 ``[rows]``: the smallest logit of each row, divided by the temperature, that the
    filters keep."""
    rows, vocab_size = logits.shape
    thresholds = _empty(logits, rows)
    scaled, candidates = _empty(logits, (rows, vocab_size)), _empty(logits, (rows, _CANDIDATES))
    launch(
        _thresholds,
        (rows,),
        logits.device,
        *(logits, temperatures, top_k, top_p, min_p, scaled, candidates, thresholds, vocab_size),
        MIN_TEMPERATURE=min_temperature,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        CANDIDATES=_CANDIDATES,
        num_warps=32,
    )
    return thresholds


def _empty(
    like: torch.Tensor, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)
