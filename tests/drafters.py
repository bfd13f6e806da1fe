"""Drafters of tests: one that knows the answers, and spoils as many of its drafts as it is told;
and trees of an EAGLE head in which other guesses than the likeliest are right.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.speculative.adaptation import DraftLengths
from pd.speculative.draft import Draft, upload_chains
from pd.speculative.drafter import Drafter
from pd.speculative.eagle import EagleDrafter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    import numpy.typing as npt
    import pytest

    from pd.engine.draft_tree import DraftTree
    from pd.speculative.drafter import DraftRequest

    IntArray = npt.NDArray[np.int32]

DEVICE = os.environ.get("PD_TEST_DEVICE", "cpu")
# Another one with each run; PD_TEST_SEED repeats one.
SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))


class Oracle(Drafter):
    """Drafts the known continuation of a sequence; for unknown sequences, random tokens.

    Args:
        spoiled: share of the drafted tokens to replace by others.
        shortest: minimum number of tokens of a draft, if so many may be drafted.
    """

    def __init__(self, vocab_size: int, spoiled: float, shortest: int = 0) -> None:
        self._vocab_size, self._spoiled, self._shortest = vocab_size, spoiled, shortest
        self._rng = np.random.default_rng(SEED)
        self._known: dict[tuple[int, ...], list[IntArray]] = {}
        self.drafted = 0

    def learn(self, sequence: Sequence[int]) -> None:
        """Remember a prompt and its answer."""
        self._known.setdefault(tuple(sequence[:2]), []).append(np.array(sequence, np.int32))

    def draft_tokens(self, asks: Sequence[DraftRequest], prompt_tokens: int) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        chains = [self._draft(ask.sequence.ids, ask.limit) for ask in asks]
        return upload_chains(chains, torch.device(DEVICE))

    def _draft(self, ids: IntArray, limit: int) -> IntArray:
        limit = int(self._rng.integers(min(self._shortest, limit), limit + 1))
        tokens = self._rng.integers(0, self._vocab_size, limit).astype(np.int32)
        for known in self._known.get(tuple(ids[:2].tolist()), []):
            if len(known) >= len(ids) + limit and np.array_equal(known[: len(ids)], ids):
                true = known[len(ids) : len(ids) + limit]
                tokens = np.where(self._rng.random(limit) < self._spoiled, tokens, true)
        self.drafted += limit
        return tokens


def note_accepted_siblings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make all nodes note each accepted guess that is not the likeliest at its place, by its index
    in its draft. Its KV, and that of later guesses, must move."""
    siblings: list[int] = []
    observe = DraftLengths.observe_draft

    def note(self: DraftLengths, sequence: Any, tree: DraftTree, accepted: Sequence[int]) -> None:
        if sequence.request.room:
            siblings.extend(guess for guess in accepted if not tree.first_guesses[guess])
        observe(self, sequence, tree, accepted)

    monkeypatch.setattr(DraftLengths, "observe_draft", note)
    return siblings


def draft_only_last_siblings(monkeypatch: pytest.MonkeyPatch, answer: Sequence[int]) -> None:
    """Make only the last guess after the root of each tree right, so that its KV moves.

    Args:
        answer: the only long sequence, prompt included.
    """
    true = EagleDrafter._draft_asks

    @torch.inference_mode()
    def draft(self: EagleDrafter, asks: Any, ends: Any) -> Any:
        made = true(self, asks, ends)
        positions = ends.positions[list(ends.index)].tolist()
        for ask, position, each in zip(asks, positions, made, strict=True):
            if ask.sequence.request.room and position + 1 < len(answer):
                tokens = each.batch.tokens[each.first : each.first + each.size]
                parents = each.tree.parents.tolist()
                tokens[:] = (answer[position + 1] + 1 + torch.arange(each.size)) % 250
                tokens[len(parents) - 1 - parents[::-1].index(-1)] = answer[position + 1]
        return made

    monkeypatch.setattr(EagleDrafter, "_draft_asks", draft)


def plant_right_guesses(
    monkeypatch: pytest.MonkeyPatch, answers: Mapping[tuple[int, ...], Sequence[Sequence[int]]]
) -> None:
    """Have every EAGLE drafter guess right in most places, at any rank.

    Args:
        answers: the answer of each choice by prompt.
    """
    true, rng = EagleDrafter._draft_asks, random.Random(SEED)

    @torch.inference_mode()
    def draft(self: EagleDrafter, asks: Any, ends: Any) -> Any:
        made = true(self, asks, ends)
        positions = ends.positions[list(ends.index)].tolist()
        for ask, position, each in zip(asks, positions, made, strict=True):
            prompt = ask.sequence.request.prompt
            choices = answers.get(tuple(prompt.tolist()))
            if choices is None:
                continue
            rest = choices[ask.sequence.index][position + 1 - len(prompt) :]
            tokens = each.batch.tokens[each.first : each.first + each.size]
            parents, at = each.tree.parents.tolist(), -1
            for right in rest:
                guesses = [guess for guess, parent in enumerate(parents) if parent == at]
                if not guesses or rng.random() < 0.25:
                    break
                at = rng.choice(guesses)
                for place, guess in enumerate(guesses):
                    tokens[guess] = right if guess == at else (right + 1 + place) % 250
        return made

    monkeypatch.setattr(EagleDrafter, "_draft_asks", draft)


def swapped_siblings(tree: DraftTree) -> list[int]:
    """For each guess, return the guess whose token it gets when the likeliest and the second guess
    after the root swap places. The guesses after them swap too, as far as both exist."""
    found = list(range(tree.size))
    after: dict[int, list[int]] = {}
    for guess, parent in enumerate(tree.parents.tolist()):
        after.setdefault(parent, []).append(guess)
    swapped = [after[-1][:2]]
    while swapped:
        pair = swapped.pop()
        if len(pair) == 2:
            one, other = pair
            found[one], found[other] = other, one
            followers = zip(after.get(one, []), after.get(other, []), strict=False)
            swapped += [list(each) for each in followers]
    return found
