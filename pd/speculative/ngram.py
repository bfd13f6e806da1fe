"""Drafts what followed the last tokens earlier in the same sequence, or in others.

The idea is prompt lookup decoding (A. Saxena, 2023): answers repeat passages of their prompt, as in
summaries, edited code and conversations. They also repeat earlier answers, as in SuffixDecoding
(Oliaro et al., 2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.speculative.draft import Draft, upload_chains
from pd.speculative.drafter import Drafter
from pd.speculative.ngram_cache import LONGEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from pd.speculative.drafter import DraftRequest
    from pd.speculative.ngram_cache import NgramCache

    IntArray = npt.NDArray[np.int32]

# Fewer equal tokens occur by chance; more than the longest choose no better place.
_SHORTEST, _LONGEST = 2, 8


class NgramDrafter(Drafter):
    """Finds the place in a sequence whose preceding tokens equal its last ones, as many of them as
    possible, and drafts what follows it. Where other texts of its namespace have a place with more
    equal tokens, it drafts what follows that. Keeps nothing between steps itself.

    Args:
        device: of the model that verifies.
        cache: other texts; None to look in the sequence alone.
    """

    def __init__(self, device: torch.device, cache: NgramCache | None = None) -> None:
        self._device = device
        self.ngram_cache = cache

    def draft(self, requests: Sequence[DraftRequest], prompt_tokens: int) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        return upload_chains([self._draft(request) for request in requests], self._device)

    def _draft(self, request: DraftRequest) -> IntArray:
        """Draft for one sequence."""
        ids, limit, cache = request.sequence.ids, request.limit, self.ngram_cache
        place = _latest_place(ids)
        if cache is not None:
            equal = 0 if place is None else _count_equal(ids, place)
            if equal < LONGEST:
                namespace = request.sequence.request.namespace
                found = cache.find(namespace, ids[-LONGEST:], equal, limit)
                if len(found):
                    return found
        if place is None:
            return ids[:0]
        # Where the sequence ends before the draft does, it is taken to go on as it did since that
        # place.
        return np.resize(ids[place + 1 :], limit)


def _latest_place(ids: IntArray) -> int | None:
    """Index of the last token of the latest earlier place with the most equal tokens, of which more
    than ``_LONGEST`` do not count; time and memory grow with the length of the sequence, by a
    comparison per token."""
    # Indices of the last token's other occurrences, narrowed to longer and longer equal endings.
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    found = ends[:0]
    for length in range(2, _LONGEST + 1):
        ends = ends[ends >= length - 1]
        if length > len(ids) - 1 or len(ends) == 0:
            break
        ends = ends[ids[ends - (length - 1)] == ids[-length]]
        if len(ends) == 0:
            break
        if length >= _SHORTEST:
            found = ends
    return int(found[-1]) if len(found) else None


def _count_equal(ids: IntArray, place: int) -> int:
    """How many tokens up to a place equal the last ones; more than ``LONGEST`` do not count."""
    count = min(place + 1, LONGEST)
    differs = np.flatnonzero(ids[place + 1 - count : place + 1] != ids[-count:])
    return count - 1 - int(differs[-1]) if len(differs) else count
