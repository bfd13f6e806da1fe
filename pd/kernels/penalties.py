"""Penalties on tokens that occur in a request's prompt or output, with counts on the device."""

from __future__ import annotations

import torch

from pd.kernels.dispatch import uses_triton

# Rows that the reference adjusts at a time. This limits the memory for intermediate results.
_PIECE = 32


def count_tokens(
    counts: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    sampled_rows: torch.Tensor,
    sampled: torch.Tensor | None,
) -> None:
    """Add 1 to ``counts`` for each of ``n`` pairs of a place and a token, counting repeated pairs.

    Args:
        counts: contiguous int32 ``[rows, vocab_size]``.
        places: int64 ``[n]``, rows of ``counts``.
        tokens: int64 ``[n]``; -1 stands for a token of ``sampled``.
        sampled_rows: int64 ``[n]``, the index of that token.
        sampled: int64 tokens, or None if all ``tokens`` are known. A token of -1 is not counted.
    """
    if uses_triton(counts):
        from pd.kernels import penalties_triton

        penalties_triton.count_tokens(counts, places, tokens, sampled_rows, sampled)
        return
    if sampled is not None and len(sampled):
        tokens = torch.where(tokens < 0, sampled[sampled_rows], tokens)
    there = (tokens >= 0).to(counts.dtype)
    counts.index_put_((places, tokens.clamp(min=0)), there, accumulate=True)


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
    """Adjust ``n`` rows of logits in place: repetition over prompt and output, then frequency and
    presence over output.

    Args:
        logits: contiguous float32 ``[…, vocab_size]``.
        rows: int64 ``[n]``, rows of ``logits``, each once.
        places: int64 ``[n]``, rows of ``counts`` and ``in_prompt``.
        strengths: float32 ``[n, 3]``: repetition, frequency and presence penalty.
        counts: contiguous int32 ``[rows, vocab_size]``: number of times that a token is in the
            output.
        in_prompt: contiguous bool ``[rows, vocab_size]``.
        starts: int64 ``[n + 1]``: row ``i`` follows the drafted tokens from ``starts[i]`` to
            ``starts[i + 1]`` in ``paths``, which count as its output.
        paths: int64, indices into ``drafts``.
        drafts: int64 drafted tokens, or None if ``paths`` is empty.
    """
    if uses_triton(logits):
        from pd.kernels import penalties_triton

        penalties_triton.apply_penalties(
            logits, rows, places, strengths, counts, in_prompt, starts, paths, drafts
        )
        return
    for first in range(0, len(rows), _PIECE):
        some = slice(first, first + _PIECE)
        _adjust_piece(
            logits,
            rows[some],
            strengths[some],
            counts[places[some]],
            in_prompt[places[some]],
            []
            if drafts is None
            else [
                drafts[paths[begin:end]]
                for begin, end in zip(
                    starts[:-1][some].tolist(), starts[1:][some].tolist(), strict=True
                )
            ],
        )


def _adjust_piece(
    logits: torch.Tensor,
    rows: torch.Tensor,
    strengths: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    drafted: list[torch.Tensor],
) -> None:
    for count, tokens in zip(counts, drafted, strict=False):
        count.index_put_((tokens,), count.new_ones(len(tokens)), accumulate=True)
    occurs = counts > 0
    repetition, frequency, presence = strengths[:, :, None].unbind(1)
    values = logits[rows]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(occurs | in_prompt, repeated, values)
    logits[rows] = values - frequency * counts - presence * occurs
