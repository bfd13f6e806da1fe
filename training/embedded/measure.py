"""All numbers of the report, measured on the directories that are shipped."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from embedded import acceptance, heldout
from embedded.evaluation import Result, evaluate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedded.eagle import EagleHead
    from embedded.heldout import Example
    from embedded.model import Qwen3

DTYPES = ("float32", "bfloat16")
# Drafted tokens per verification step.
DEPTHS = (1, 2, 3, 4, 6)
# Prompts beyond what is promised, to see where recall ends.
BEYOND = (5000, 6000, 8000)
_ACCEPTANCE_SAMPLE = 60
_BEYOND_SAMPLE = 44


def scores(
    model: Qwen3, tokenizer: Tokenizer, sets: dict[str, list[Example]], batch_tokens: int
) -> tuple[dict[str, Any], dict[str, list[Result]]]:
    """Return shares of right answers by dtype and set, and the answers in float32."""
    found: dict[str, Any] = {}
    answers: dict[str, list[Result]] = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        results = {
            key: evaluate(model, tokenizer, examples, dtype, batch_tokens)
            for key, examples in sets.items()
        }
        answers = answers or results
        found[name] = {key: _share(some) for key, some in results.items()}
    return found, answers


def _share(results: list[Result]) -> dict[str, Any]:
    right = sum(result.right for result in results)
    wrong = [
        {"expected": r.example.turns[-1].answer, "answer": r.answer} for r in results if not r.right
    ]
    return {
        "right": right,
        "total": len(results),
        "share": round(right / len(results), 4),
        "first_wrong": wrong[:5],
    }


def recall_by_depth(answers: dict[str, list[Result]]) -> dict[str, dict[str, float]]:
    """Return the share of right answers by prompt length, then by depth of the needle."""
    cells: dict[tuple[int, float], list[bool]] = defaultdict(list)
    lengths = (*heldout.SHORT_LENGTHS, *heldout.LONG_LENGTHS)
    for name in ("recall-2k", "recall-4k"):
        for result in answers.get(name, []):
            # Prompts end a little below the length they were made for.
            length = min(n for n in lengths if n >= result.example.length)
            cells[length, result.example.depth].append(result.right)
    table: dict[str, dict[str, float]] = {}
    for (length, depth), right in sorted(cells.items()):
        table.setdefault(str(length), {})[f"{depth:.1f}"] = round(sum(right) / len(right), 3)
    return table


def beyond(model: Qwen3, tokenizer: Tokenizer, batch_tokens: int) -> dict[str, float]:
    """Return the share of right answers for prompts longer than the model's design."""
    shares = {}
    for length in BEYOND:
        examples = heldout.recall_examples(length, _BEYOND_SAMPLE)
        results = evaluate(model, tokenizer, examples, torch.float32, batch_tokens)
        shares[str(length)] = round(sum(r.right for r in results) / len(results), 3)
    return shares


def drafters(
    model: Qwen3, draft: Qwen3, heads: dict[str, EagleHead], answers: dict[str, list[Result]]
) -> dict[str, Any]:
    """Return acceptance lengths by drafter, set and number of drafted tokens, in float32.

    Args:
        heads: by the drafter's name; ``draft`` is the draft model.
    """
    drafted = ("draft", *heads)
    table: dict[str, Any] = {drafter: {} for drafter in drafted}
    everything: dict[str, list[list[list[bool]]]] = {drafter: [] for drafter in drafted}
    deepest = max(DEPTHS)
    for name, results in answers.items():
        some = random.Random(0).sample(results, min(_ACCEPTANCE_SAMPLE, len(results)))
        some = [result for result in some if len(result.output) > 1]
        matches = {
            "draft": [acceptance.draft_matches(draft, r, torch.float32, deepest) for r in some]
        }
        for drafter, head in heads.items():
            matches[drafter] = [
                acceptance.eagle_matches(head, model, r, torch.float32, deepest) for r in some
            ]
        for drafter, found in matches.items():
            table[drafter][name] = _lengths(found)
            everything[drafter] += found
    for drafter, found in everything.items():
        table[drafter]["all"] = _lengths(found)
    return table


def _lengths(matches: list[list[list[bool]]]) -> dict[str, float]:
    return {str(d): round(acceptance.acceptance_length(matches, d), 3) for d in DEPTHS}
