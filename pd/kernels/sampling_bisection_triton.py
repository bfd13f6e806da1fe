"""Finds thresholds of rows by bisecting on the bits of one float: first over all tokens until few
are left in question, then over those alone, which fit a program's registers."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from pd.kernels.triton_launch import start_next, wait_for_previous


@triton.jit
def float_order(values):
    """int32 in the order of the floats. It is its own inverse on their bits."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_order(order):
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sum_amounts(scaled, vocab_size, order, best, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Mass (or number, twice) and number of the tokens that are not below ``order``."""
    amounts = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(scaled + tokens, mask=tokens < vocab_size, other=float("-inf"))
        is_in = (float_order(values) >= order) & (tokens < vocab_size)
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
    """The order of the largest token for which the tokens not below it amount to ``target``.

    ``[low, high)`` always contains it. Tokens not below ``high`` amount to ``above`` and are no
    longer in question.
    """
    low, high = float_order(lowest).to(tl.int64), float_order(best).to(tl.int64) + 1
    num_low, num_high, above = num_finite, 0, 0.0
    step = 0
    while (num_low - num_high > CANDIDATES) & (high - low > 1):
        # The first steps bisect by value: by bits, half of all steps would go to tiny numbers.
        middle = (low + high) >> 1
        if step < 12:
            between = float_order(0.5 * value_of_order(low) + 0.5 * value_of_order(high - 1)).to(
                tl.int64
            )
            middle = tl.minimum(tl.maximum(between, low + 1), high - 1)
        amount, count = _sum_amounts(scaled, vocab_size, middle, best, BY_MASS, BLOCK)
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
            order = float_order(values)
            is_in = (order >= low) & (order < high) & (tokens < vocab_size)
            places = filled + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(candidates + places, values, mask=is_in & (places < CANDIDATES))
            filled += tl.sum(is_in.to(tl.int32), 0)
        tl.debug_barrier()
        places = tl.arange(0, CANDIDATES)
        values = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
        order = float_order(values)
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
def whole_row_thresholds(
    logits,
    temperatures,
    top_k,
    top_p,
    min_p,
    scaled,
    candidates,
    thresholds,
    are_pending,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The smallest logit, divided by the temperature, that one pending row's filters keep."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    limit_k, limit_p = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row)
    fraction = tl.load(min_p + row)
    if tl.load(are_pending + row) != 0:
        threshold = float("-inf")
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
            order = float_order(low).to(tl.int64)
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
                threshold = tl.maximum(threshold, value_of_order(order))
            if limit_p < 1.0:
                # Among tokens equal to the last of the top k, only enough to make k count.
                total, count = _sum_amounts(scaled, vocab_size, order, best, True, BLOCK)
                if limit_k < count:
                    total -= (count - limit_k).to(tl.float32) * tl.exp(value_of_order(order) - best)
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
                threshold = tl.maximum(threshold, value_of_order(order))
        tl.store(thresholds + row, threshold)
