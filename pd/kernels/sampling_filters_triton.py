"""Thresholds of top-k, top-p and min-p without sorting: the kernels for the filters of
:func:`pd.kernels.sampling.sample_rows`.

We want the largest value t for which the tokens that are no smaller than t are enough, in number
(top-k) or in mass (top-p). Many programs read a row. They count its tokens in bins by their
distance from the likeliest, and pack the tokens of the likeliest bins, a few thousand. One program
per row keeps these in registers and bisects on the bits of one float, so ties and thresholds are
exact. If the threshold lies further down, one program bisects over all tokens of the row.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd.kernels.sampling_bisection_triton import (
    float_order,
    value_of_order,
    whole_row_thresholds,
)
from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

# Tokens of a row that each program counts or packs, and the maximum number of packed likeliest
# ones.
_CHUNK, _CANDIDATES = 4096, 4096
# Number of bins, and bins per unit of the scaled logits. The last bin holds the rest.
_BINS, _BINS_PER_UNIT = 256, 16
# Tokens that the program of a whole row reads at a time, and the number that it keeps in registers.
_BLOCK, _WHOLE_CANDIDATES = 8192, 2048


@triton.jit
def _load_scaled(logits, there, mask, temperature, MIN_TEMPERATURE: tl.constexpr):
    """float32 logits divided by the temperature; -inf if masked."""
    values = tl.load(logits + there, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.div_rn(values, tl.maximum(temperature, MIN_TEMPERATURE))


@triton.jit
def _find_bins(values, best, BINS: tl.constexpr, PER_UNIT: tl.constexpr):
    """Bins of finite values that are no larger than ``best``, the likeliest in bin 0."""
    return tl.minimum((best - values) * PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def _best_of_row(highest, row, chunks, CHUNKS: tl.constexpr):
    each = tl.arange(0, CHUNKS)
    return tl.max(
        tl.load(highest + row * chunks + each, mask=each < chunks, other=float("-inf")), 0
    )


@triton.jit
def _measure_chunks(
    logits,
    temperatures,
    highest,
    lowest,
    masses,
    counts,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest and the smallest finite value of one chunk of one row, the number of finite ones,
    and their mass in units of the largest."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    there = row * tl.num_programs(1) + tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        mask = tokens < vocab_size
        values = _load_scaled(logits, row * vocab_size + tokens, mask, temperature, MIN_TEMPERATURE)
        is_finite = values > float("-inf")
        best = tl.max(tl.where(is_finite, values, float("-inf")), 0)
        mass = tl.where(is_finite, tl.exp(values - best), 0.0)
        tl.store(highest + there, best)
        tl.store(lowest + there, tl.min(tl.where(is_finite, values, float("inf")), 0))
        tl.store(masses + there, tl.sum(mass, 0))
        tl.store(counts + there, tl.sum(is_finite.to(tl.int32), 0))


@triton.jit
def _count_bins(
    logits,
    temperatures,
    top_k,
    top_p,
    highest,
    bin_counts,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the values of one chunk of one row in each bin."""
    start_next(PDL)
    wait_for_previous(PDL)
    row, chunks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    is_cut = (tl.load(top_k + row) < vocab_size) | (tl.load(top_p + row) < 1.0)
    if (temperature > 0.0) & is_cut:
        best = _best_of_row(highest, row, chunks, CHUNKS)
        tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        mask = tokens < vocab_size
        values = _load_scaled(logits, row * vocab_size + tokens, mask, temperature, MIN_TEMPERATURE)
        found = tl.histogram(
            _find_bins(values, best, BINS, PER_UNIT), BINS, mask=values > float("-inf")
        )
        there = (row * chunks + tl.program_id(1)) * BINS + tl.arange(0, BINS)
        tl.store(bin_counts + there, found)


@triton.jit
def _choose_bins(
    temperatures,
    top_k,
    top_p,
    bin_counts,
    offsets,
    chosen,
    vocab_size,
    chunks,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the number of a row's leading bins with at most CANDIDATES values together, the place of
    each chunk's values among these, and their number."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_cut = (tl.load(top_k + row) < vocab_size) | (tl.load(top_p + row) < 1.0)
    if (tl.load(temperatures + row) > 0.0) & is_cut:
        each, bins = tl.arange(0, CHUNKS), tl.arange(0, BINS)
        there = (row * chunks + each[:, None]) * BINS + bins[None, :]
        counts = tl.load(bin_counts + there, mask=each[:, None] < chunks, other=0)
        up_to = tl.cumsum(tl.sum(counts, 0), 0)
        num_bins = tl.sum((up_to <= CANDIDATES).to(tl.int32), 0)
        of_chunks = tl.sum(tl.where(bins[None, :] < num_bins, counts, 0), 1)
        before = tl.cumsum(of_chunks, 0) - of_chunks
        tl.store(offsets + row * chunks + each, before, mask=each < chunks)
        tl.store(chosen + 2 * row, num_bins)
        tl.store(chosen + 2 * row + 1, tl.sum(of_chunks, 0))


@triton.jit
def _pack_candidates(
    logits,
    temperatures,
    top_k,
    top_p,
    highest,
    offsets,
    chosen,
    candidates,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the values of one chunk of one row that are in the chosen bins."""
    start_next(PDL)
    wait_for_previous(PDL)
    row, chunks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    is_cut = (tl.load(top_k + row) < vocab_size) | (tl.load(top_p + row) < 1.0)
    if (temperature > 0.0) & is_cut:
        best = _best_of_row(highest, row, chunks, CHUNKS)
        tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        mask = tokens < vocab_size
        values = _load_scaled(logits, row * vocab_size + tokens, mask, temperature, MIN_TEMPERATURE)
        is_in = values > float("-inf")
        is_in = is_in & (_find_bins(values, best, BINS, PER_UNIT) < tl.load(chosen + 2 * row))
        first = tl.load(offsets + row * chunks + tl.program_id(1))
        places = first + tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(candidates + row * CANDIDATES + places, values, mask=is_in)


@triton.jit
def _largest_enough_of(order, amounts, low, high, target):
    """Like :func:`pd.kernels.sampling_bisection_triton._largest_enough`, for values in registers.
    ``amounts`` are 0 for values that do not count."""
    while high - low > 1:
        middle = (low + high) >> 1
        if tl.sum(tl.where(order >= middle, amounts, 0.0), 0) >= target:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _candidate_thresholds(
    temperatures,
    top_k,
    top_p,
    min_p,
    highest,
    lowest,
    masses,
    counts,
    chosen,
    candidates,
    thresholds,
    are_pending,
    vocab_size,
    chunks,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The smallest value that one row's filters keep, if it is among the candidates. Otherwise the
    row stays pending."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    limit_k, limit_p = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row)
    fraction = tl.load(min_p + row)
    is_cut = (limit_k < vocab_size) | (limit_p < 1.0)
    threshold, is_pending = float("-inf"), 0
    if (tl.load(temperatures + row) > 0.0) & (is_cut | (fraction > 0.0)):
        each = tl.arange(0, CHUNKS)
        there, mask = row * chunks + each, each < chunks
        tops = tl.load(highest + there, mask=mask, other=float("-inf"))
        best = tl.max(tops, 0)
        lowest_value = tl.min(tl.load(lowest + there, mask=mask, other=float("inf")), 0)
        num_finite = tl.sum(tl.load(counts + there, mask=mask, other=0), 0)
        if fraction > 0.0:
            threshold = best + tl.log(fraction)
        # A row of infinities or NaN has no token worth finding.
        if is_cut & (best < float("inf")) & (lowest_value <= best):
            filled = tl.load(chosen + 2 * row + 1)
            places = tl.arange(0, CANDIDATES)
            is_there = places < filled
            values = tl.load(
                candidates + row * CANDIDATES + places, mask=is_there, other=float("-inf")
            )
            order, high = float_order(values), float_order(best).to(tl.int64) + 1
            low = float_order(lowest_value).to(tl.int64)
            is_pending = (filled == 0).to(tl.int32)
            has_k = limit_k < num_finite
            if has_k:
                is_pending = (filled < limit_k).to(tl.int32)
                if is_pending == 0:
                    ones = is_there.to(tl.float32)
                    low = _largest_enough_of(order, ones, low, high, limit_k.to(tl.float32))
                    threshold = tl.maximum(threshold, value_of_order(low))
            if (is_pending == 0) & (limit_p < 1.0):
                is_in = is_there & (order >= low)
                amounts = tl.where(is_in, tl.exp(values - best), 0.0)
                mass = tl.sum(amounts, 0)
                total = mass
                if has_k:
                    # Among tokens equal to the last of the top k, only enough to make k count.
                    count = tl.sum(is_in.to(tl.int32), 0)
                    total -= (count - limit_k).to(tl.float32) * tl.exp(value_of_order(low) - best)
                else:
                    own = tl.load(masses + there, mask=mask, other=0.0)
                    own = tl.where(tops > float("-inf"), own * tl.exp(tops - best), 0.0)
                    total = tl.sum(own, 0)
                is_pending = (mass < total * limit_p).to(tl.int32)
                if is_pending == 0:
                    low = _largest_enough_of(order, amounts, low, high, total * limit_p)
                    threshold = tl.maximum(threshold, value_of_order(low))
    tl.store(thresholds + row, threshold)
    tl.store(are_pending + row, is_pending)


def find_row_thresholds(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    min_temperature: float,
    *,
    chunk: int = _CHUNK,
    max_candidates: int = _CANDIDATES,
) -> torch.Tensor:
    """Find the smallest logit of each row, divided by the temperature, that the filters keep. On a
    GPU nothing waits for it.

    Args:
        logits: contiguous float32 or bfloat16 ``[rows, vocab_size]``.
        temperatures, top_k, top_p, min_p: see :func:`pd.kernels.sampling.sample_rows`.
        chunk, max_candidates: powers of 2; for tests.

    Returns:
        float32 ``[rows]``, -inf if everything is kept; undefined for greedy rows.
    """
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, chunk)
    most_chunks = triton.next_power_of_2(chunks)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    highest, lowest, masses = (empty(rows, chunks) for _ in range(3))
    counts, offsets = (empty(rows, chunks, dtype=torch.int32) for _ in range(2))
    bin_counts = empty(rows, chunks, _BINS, dtype=torch.int32)
    chosen, are_pending = empty(rows, 2, dtype=torch.int32), empty(rows, dtype=torch.int32)
    candidates, thresholds = empty(rows, max_candidates), empty(rows)
    device, limits = logits.device, (top_k, top_p)
    launch_kernel(
        _measure_chunks,
        (rows, chunks),
        device,
        *(logits, temperatures, highest, lowest, masses, counts, vocab_size),
        MIN_TEMPERATURE=min_temperature,
        CHUNK=chunk,
        num_warps=8,
    )
    launch_kernel(
        _count_bins,
        (rows, chunks),
        device,
        *(logits, temperatures, *limits, highest, bin_counts, vocab_size),
        MIN_TEMPERATURE=min_temperature,
        CHUNK=chunk,
        CHUNKS=most_chunks,
        BINS=_BINS,
        PER_UNIT=_BINS_PER_UNIT,
        num_warps=8,
    )
    launch_kernel(
        _choose_bins,
        (rows,),
        device,
        *(temperatures, *limits, bin_counts, offsets, chosen, vocab_size, chunks),
        CHUNKS=most_chunks,
        BINS=_BINS,
        CANDIDATES=max_candidates,
        num_warps=8,
    )
    launch_kernel(
        _pack_candidates,
        (rows, chunks),
        device,
        *(logits, temperatures, *limits, highest, offsets, chosen, candidates, vocab_size),
        MIN_TEMPERATURE=min_temperature,
        CHUNK=chunk,
        CHUNKS=most_chunks,
        BINS=_BINS,
        PER_UNIT=_BINS_PER_UNIT,
        CANDIDATES=max_candidates,
        num_warps=8,
    )
    launch_kernel(
        _candidate_thresholds,
        (rows,),
        device,
        *(temperatures, *limits, min_p, highest, lowest, masses, counts, chosen, candidates),
        *(thresholds, are_pending, vocab_size, chunks),
        CHUNKS=most_chunks,
        CANDIDATES=max_candidates,
        num_warps=8,
    )
    launch_kernel(
        whole_row_thresholds,
        (rows,),
        device,
        *(logits, temperatures, *limits, min_p, empty(rows, vocab_size)),
        *(empty(rows, _WHOLE_CANDIDATES), thresholds, are_pending, vocab_size),
        MIN_TEMPERATURE=min_temperature,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        CANDIDATES=_WHOLE_CANDIDATES,
        num_warps=32,
    )
    return thresholds
