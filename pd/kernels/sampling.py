"""Tensor work of sampling: counter-based noise, and thresholds of top-k, top-p and min-p.

Everything acts on each row alone, so a row's token does not depend on its batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pd.kernels.dispatch import uses_triton


def _to_signed(value: int, bits: int = 32) -> int:
    """Return the signed integer with the bits of an unsigned one."""
    return value - (1 << bits) if value >> (bits - 1) else value


_MASK = (1 << 32) - 1
# The multipliers of the 32-bit mixer "lowbias32" (C. Wellons, hash-prospector, 2018), applied in
# two rounds, and the golden ratio, which spreads consecutive token ids.
_MIX_A, _MIX_B, _SPREAD = 0x7FEB352D, 0x846CA68B, 0x9E3779B9
# The increment and multipliers of splitmix64, and an odd number that spreads positions.
_SPLITMIX_STEP = _to_signed(0x9E3779B97F4A7C15, 64)
_SPLITMIX_A, _SPLITMIX_B = _to_signed(0xBF58476D1CE4E5B9, 64), _to_signed(0x94D049BB133111EB, 64)
_POSITION_SPREAD = _to_signed(0xD1342543DE82EF95, 64)
# Number of likeliest tokens that top-p tries first. If they are not enough, it tries 16 times as
# many, and so on.
_CANDIDATES = 256
# Dividing by less would overflow float32. At this temperature sampling is practically greedy.
_MIN_TEMPERATURE = 1e-5


def mix_noise_keys(noise_at: torch.Tensor) -> torch.Tensor:
    """Mix seeds and positions by splitmix64 (Steele et al., 2014).

    Args:
        noise_at: int64 ``[rows, 2]``: a seed, and a position of that seed.

    Returns:
        int32 ``[rows, 2]`` on the same device, two keys for each row.
    """
    # int64 products wrap like those of uint64.
    z = (noise_at[:, 0] ^ (noise_at[:, 1] * _POSITION_SPREAD)) + _SPLITMIX_STEP
    z = (z ^ _shift_right(z, 30)) * _SPLITMIX_A
    z = (z ^ _shift_right(z, 27)) * _SPLITMIX_B
    z = z ^ _shift_right(z, 31)
    halves = torch.stack((z & _MASK, _shift_right(z, 32)), dim=1)
    # As int32 with the same bits.
    return ((halves ^ 0x80000000) - 0x80000000).to(torch.int32)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Apply lowbias32 in place. int32 products wrap. Masks make the arithmetic shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MIX_A
    x ^= (x >> 15) & 0x1FFFF
    x *= _to_signed(_MIX_B)
    x ^= (x >> 16) & 0xFFFF
    return x


def make_random_bits(
    keys: torch.Tensor, vocab_size: int, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Hash pairs of a key and a token id.

    Args:
        keys: int32 ``[rows, 2]`` from :func:`mix_noise_keys`.
        token_ids: int64 ``[vocab_size]``; by default each number below ``vocab_size``.

    Returns:
        int32 ``[rows, vocab_size]``, the same on every device.
    """
    x = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    if token_ids is not None:
        x.copy_(token_ids)
    x = _mix_bits(x.mul_(_to_signed(_SPREAD)) ^ keys[:, :1])
    return _mix_bits(x ^ keys[:, 1:])


def make_gumbel_noise(
    keys: torch.Tensor, vocab_size: int, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Make standard Gumbel noise; ``argmax(logits + noise)`` samples softmax(logits).

    We round 31 bits of the hash to a uniform float32 u in (0, 1). Then ``-log(-log1p(-u))`` is
    Gumbel. Small u, whose rounding is finest, give the large values, so even a token of probability
    1e-8 is drawn as often as it should be. Values lie in [-2.9, 22.2], never infinite.

    Args:
        keys, token_ids: see :func:`make_random_bits`.

    Returns:
        float32 ``[rows, vocab_size]``.
    """
    bits = make_random_bits(keys, vocab_size, token_ids) & 0x7FFFFFFF
    u = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def find_threshold(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Find the smallest logit that top-k and then top-p keep in each row.

    Top-p keeps the smallest set of likeliest tokens that has a share of at least ``top_p`` of the
    mass kept by top-k. Tokens equal to the threshold are all kept, so ties need no order.

    Args:
        logits: float32 ``[rows, vocab_size]``, already divided by the temperature.
        top_k: int64 ``[rows]``, at least 1; ``vocab_size`` keeps all.
        top_p: float32 ``[rows]``; 1 or more keeps all.

    Returns:
        float32 ``[rows, 1]``.
    """
    vocab_size = logits.shape[1]
    limits = torch.where(top_k < vocab_size, top_k, 0)
    width = min(vocab_size, max(_CANDIDATES, int(limits.max())))
    threshold, is_final = _find_threshold_among(logits, top_k, top_p, width)
    while not bool(is_final.all()):
        width = min(vocab_size, 16 * width)
        rows = torch.nonzero(~is_final).flatten()
        threshold[rows], is_final[rows] = _find_threshold_among(
            logits[rows], top_k[rows], top_p[rows], width
        )
    return threshold


def _find_threshold_among(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute thresholds from each row's ``width`` likeliest tokens, and whether these were enough.

    Masses are running sums from the likeliest down, so they do not depend on ``width``.
    """
    vocab_size = logits.shape[1]
    values = logits.topk(width, dim=-1).values
    best = values[:, :1]
    mass = (values - best).exp_().cumsum(-1)
    total = torch.where(
        top_k < vocab_size,
        mass.gather(1, (top_k.clamp(max=width) - 1)[:, None])[:, 0],
        (logits - best).exp_().sum(-1),
    )
    before = functional.pad(mass[:, :-1], (1, 0))
    limit = torch.where(top_p < 1, top_p * total, float("inf"))
    in_top_k = torch.arange(width, device=logits.device) < top_k[:, None]
    count = (in_top_k & (before < limit[:, None])).sum(-1).clamp_(min=1)
    is_final = (count < width) | (top_k <= width) | (width == vocab_size)
    # A row that keeps everything has no threshold to find.
    keeps_all = (top_k >= vocab_size) & (top_p >= 1)
    threshold = values.gather(1, count[:, None] - 1)
    return threshold.masked_fill_(keeps_all[:, None], float("-inf")), is_final | keeps_all


def sample_rows(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    noise_at: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    any_random: bool = True,
    any_filter: bool = True,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each row. On a GPU nothing waits for it.

    Logits are divided by the temperature. Top-k, then top-p (see :func:`find_threshold`), and min-p
    exclude tokens. Of the remaining tokens, the one with the largest sum of logit and
    :func:`make_gumbel_noise` wins, the first of several. At temperature 0 the largest logit wins.

    Args:
        logits: float32 or bfloat16 ``[rows, vocab_size]``, not modified. Tokens that must not be
            sampled may be -inf.
        temperatures: float32 ``[rows]``; 0 is greedy.
        noise_at: int64 ``[rows, 2]``, the seed and the position of each row's noise.
        top_k: int64 ``[rows]``, at least 1; ``vocab_size`` keeps all.
        top_p: float32 ``[rows]``; 1 or more keeps all.
        min_p: float32 ``[rows]``, the minimum share of the likeliest token's probability; 0 keeps
            all.
        any_random: whether any temperature may differ from 0. Otherwise no noise is computed.
        any_filter: whether any of the last three may exclude something.
        token_ids: int64 ``[vocab_size]``, the tokens that the columns stand for, used for the
            noise; by default column i is token i.

    Returns:
        tokens, int64 ``[rows]``, always inside the vocabulary (columns, if ``token_ids`` are
        given); and bool ``[rows]``: False if the row has a NaN, +inf, or nothing above -inf, which
        makes its token undefined.
    """
    if uses_triton(logits):
        from pd.kernels import sampling_triton

        rest = top_k, top_p, min_p, any_random, any_filter, _MIN_TEMPERATURE, token_ids
        return sampling_triton.sample_rows(logits.contiguous(), temperatures, noise_at, *rest)
    best, tokens = logits.float().max(dim=-1)
    if any_random:
        rows = torch.nonzero(temperatures > 0).flatten()
        scaled = logits[rows].float() / temperatures[rows].clamp(min=_MIN_TEMPERATURE)[:, None]
        if any_filter:
            _filter_logits(scaled, top_k[rows], top_p[rows], min_p[rows])
        noise = make_gumbel_noise(mix_noise_keys(noise_at[rows]), logits.shape[1], token_ids)
        drawn = scaled.add_(noise).argmax(dim=-1)
        tokens = tokens.index_copy(0, rows, drawn)
    return tokens, torch.isfinite(best)


def compute_scores(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    noise_at: torch.Tensor,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values that :func:`sample_rows` compares without filters: logits divided by the
    temperature, plus noise; at temperature 0 logits alone. Nothing waits for a GPU.

    Args:
        logits, temperatures, noise_at, token_ids: see :func:`sample_rows`.

    Returns:
        float32 ``[rows, vocab_size]``.
    """
    divisors = torch.where(temperatures > 0, temperatures.clamp(min=_MIN_TEMPERATURE), 1.0)
    noise = make_gumbel_noise(mix_noise_keys(noise_at), logits.shape[1], token_ids)
    noise.masked_fill_((temperatures <= 0)[:, None], 0.0)
    return (logits.float() / divisors[:, None]).add_(noise)


def _filter_logits(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> None:
    """Set logits excluded by top-k, top-p and min-p to -inf, in place."""
    is_cut = (top_k < scaled.shape[1]) | (top_p < 1)
    rows = torch.nonzero(is_cut | (min_p > 0)).flatten()
    if len(rows) == 0:
        return
    mine = scaled[rows]
    # log(0) is -inf: a min_p of 0 excludes nothing.
    threshold = min_p[rows, None].log() + mine.amax(-1, keepdim=True)
    if bool(is_cut.any()):
        threshold = torch.maximum(threshold, find_threshold(mine, top_k[rows], top_p[rows]))
    scaled[rows] = mine.masked_fill_(mine < threshold, float("-inf"))
