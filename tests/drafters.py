"""Drafters of tests: one that knows the answers, and spoils as many of its drafts as it is told."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd.speculative.draft import Draft, upload_chains
from pd.speculative.drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd.speculative.drafter import DraftRequest

    IntArray = npt.NDArray[np.int32]

DEVICE = os.environ.get("PD_TEST_DEVICE", "cpu")
# Another one with each run; PD_TEST_SEED repeats one.
SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))


class Oracle(Drafter):
    """Drafts what a sequence is known to go on with; of sequences that it does not know, tokens at
    random.

    Args:
        spoiled: share of the drafted tokens that are replaced by others.
    """

    def __init__(self, vocab_size: int, spoiled: float) -> None:
        self._vocab_size, self._spoiled = vocab_size, spoiled
        self._rng = np.random.default_rng(SEED)
        self._known: dict[tuple[int, ...], list[IntArray]] = {}
        self.drafted = 0

    def learn(self, sequence: Sequence[int]) -> None:
        """Know a prompt and its answer."""
        self._known.setdefault(tuple(sequence[:2]), []).append(np.array(sequence, np.int32))

    def draft(self, asks: Sequence[DraftRequest], prompt_tokens: int) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        chains = [self._draft(ask.sequence.ids, ask.limit) for ask in asks]
        return upload_chains(chains, torch.device(DEVICE))

    def _draft(self, ids: IntArray, limit: int) -> IntArray:
        limit = int(self._rng.integers(0, limit + 1))
        tokens = self._rng.integers(0, self._vocab_size, limit).astype(np.int32)
        for known in self._known.get(tuple(ids[:2].tolist()), []):
            if len(known) >= len(ids) + limit and np.array_equal(known[: len(ids)], ids):
                true = known[len(ids) : len(ids) + limit]
                tokens = np.where(self._rng.random(limit) < self._spoiled, tokens, true)
        self.drafted += limit
        return tokens
