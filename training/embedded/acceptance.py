"""Acceptance length of the drafters, computed from answers of the embedded model.

With greedy verification the output is the model's own, whatever the draft, so we need no decoding.
Given the model's answer, a drafter's guesses are accepted as long as they are the next tokens. The
acceptance length is the mean number of tokens per verification step: accepted drafts, and the token
added by the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from embedded.model import Kernels, Qwen3

if TYPE_CHECKING:
    from embedded.eagle import EagleHead
    from embedded.evaluation import Result


@torch.inference_mode()
def draft_matches(draft: Qwen3, result: Result, dtype: torch.dtype, depth: int) -> list[list[bool]]:
    """Return for each depth whether the draft model guesses each output token from the earlier
    ones.

    Its guess does not depend on the depth, because it counts only if all earlier ones were right.
    """
    tokens = torch.tensor([result.prompt + result.output], device=draft.norm.device)
    hidden = draft.hidden(tokens[:, :-1], dtype)[len(result.prompt) - 1 :]
    guessed = draft.logits(hidden).argmax(dim=-1)
    return [(guessed == tokens[0, len(result.prompt) :]).tolist()] * depth


@torch.inference_mode()
def eagle_matches(
    head: EagleHead, model: Qwen3, result: Result, dtype: torch.dtype, depth: int
) -> list[list[bool]]:
    """Return for each depth whether the head guesses each token of the output.

    At depth ``d`` the model's hidden states are known up to ``d + 2`` tokens before the guess.
    """
    tokens = torch.tensor([result.prompt + result.output], device=model.norm.device)
    streams: list[torch.Tensor] = []
    model.hidden(tokens[:, :-1], dtype, streams=streams)
    features = [feature[None] for feature in head.read(model, streams)]
    embedded = functional.embedding(tokens[:, :-1], model.embed_tokens).to(dtype)
    start = len(result.prompt) - 1
    outputs = head.drafts(embedded, features, depth, Kernels(), start)
    expected = tokens[0, start + 1 :]
    matches = []
    for output in outputs:
        guessed = head.predict(model, output[0, start:]).argmax(-1)
        guessed = guessed if head.tokens is None else head.tokens[guessed]
        matches.append((guessed == expected).tolist())
    return matches


def steps_needed(matches: list[list[bool]]) -> int:
    """Count the verification steps until the output is complete.

    The first token comes from prefill. Each step then accepts drafts while they match, and adds one
    token of the model's own.
    """
    total, position, steps = len(matches[0]), 1, 0
    while position < total:
        accepted = 0
        while accepted < len(matches) and position + accepted < total:
            if not matches[accepted][position + accepted]:
                break
            accepted += 1
        position += accepted + 1
        steps += 1
    return steps


def acceptance_length(all_matches: list[list[list[bool]]], depth: int) -> float:
    """Return tokens per verification step over all outputs, with ``depth`` drafted tokens each
    time."""
    tokens = sum(len(matches[0]) - 1 for matches in all_matches)
    steps = sum(steps_needed(matches[:depth]) for matches in all_matches)
    return tokens / steps if steps else 1.0
