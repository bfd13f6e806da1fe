"""The kernels for :mod:`pd.kernels.penalties`."""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd.kernels.triton_launch import launch_kernel, start_next, wait_for_previous

if TYPE_CHECKING:
    import torch

# Pairs per program, and tokens per program.
_PAIRS, _BLOCK = 128, 2048


@triton.jit
def _count_tokens(
    counts,
    places,
    tokens,
    sampled_rows,
    sampled,
    vocab,
    num_pairs,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count tokens. Each program has ``PAIRS`` pairs."""
    start_next(PDL)
    wait_for_previous(PDL)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_pairs
    token = tl.load(tokens + pair, mask=inside, other=0)
    unknown = inside & (token < 0)
    row = tl.load(sampled_rows + pair, mask=unknown, other=0)
    token = tl.where(unknown, tl.load(sampled + row, mask=unknown, other=0), token)
    place = tl.load(places + pair, mask=inside, other=0)
    tl.atomic_add(counts + place * vocab + token, 1, mask=inside & (token >= 0))


@triton.jit
def _apply_penalties(
    logits,
    rows,
    places,
    strengths,
    counts,
    in_prompt,
    starts,
    paths,
    drafts,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of one row per program."""
    start_next(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    place = tl.load(places + index)
    row = tl.load(rows + index)
    repetition = tl.load(strengths + 3 * index)
    frequency = tl.load(strengths + 3 * index + 1)
    presence = tl.load(strengths + 3 * index + 2)
    count = tl.load(counts + place * vocab + token, mask=inside, other=0)
    for at in range(tl.load(starts + index), tl.load(starts + index + 1)):
        count += (token == tl.load(drafts + tl.load(paths + at))).to(tl.int32)
    occurs = count > 0
    seen = occurs | (tl.load(in_prompt + place * vocab + token, mask=inside, other=0) != 0)
    values = tl.load(logits + row * vocab + token, mask=inside, other=0.0)
    weaker = tl.div_rn(values, tl.broadcast_to(repetition, values.shape))
    repeated = tl.where(values > 0, weaker, values * repetition)
    values = tl.where(seen, repeated, values)
    values = values - frequency * count.to(tl.float32) - presence * occurs.to(tl.float32)
    tl.store(logits + row * vocab + token, values, mask=inside)


def count_tokens(
    counts: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    sampled_rows: torch.Tensor,
    sampled: torch.Tensor | None,
) -> None:
    """:func:`pd.kernels.penalties.count_tokens`."""
    if len(places) == 0:
        return
    # Never read if all tokens are known.
    sampled = tokens if sampled is None else sampled
    launch_kernel(
        _count_tokens,
        (triton.cdiv(len(places), _PAIRS),),
        counts.device,
        *(counts, places, tokens, sampled_rows, sampled, counts.shape[1], len(places)),
        PAIRS=_PAIRS,
    )


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    strengths: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    starts: torch.Tensor,
    paths: torch.Tensor,
    drafts: torch.Tensor | None,
) -> None:
    """:func:`pd.kernels.penalties.apply_penalties`."""
    vocab = logits.shape[-1]
    # Never read if there are no paths.
    drafts = paths if drafts is None else drafts
    launch_kernel(
        _apply_penalties,
        (len(rows), triton.cdiv(vocab, _BLOCK)),
        logits.device,
        *(logits, rows, places, strengths, counts, in_prompt, starts, paths, drafts, vocab),
        BLOCK=_BLOCK,
    )
