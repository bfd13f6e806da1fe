"""Drafts tokens that followed the same ending before, in this sequence or in others.

The idea is prompt lookup decoding (A. Saxena, 2023): answers repeat passages of their prompt, for
example in summaries, edited code and conversations. They also repeat earlier answers, as in
SuffixDecoding (Oliaro et al., 2024).
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

# Fewer equal tokens occur by chance, and more do not find a better place.
_SHORTEST, _LONGEST = 2, 8


class NgramDrafter(Drafter):
    """Finds the longest repetition of a sequence's last tokens, and drafts the tokens after it.

    It searches the sequence first, then other texts of its namespace for more equal tokens. It
    keeps no state of its own between steps.

    Args:
        device: device of the verifying model.
        cache: other texts; None to search only the sequence.
    """

    def __init__(self, device: torch.device, cache: NgramCache | None = None) -> None:
        self._device = device
        self.ngram_cache = cache

    def draft_tokens(
        self, requests: Sequence[DraftRequest], prompt_tokens: int
    ) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        return upload_chains([self._draft_chain(request) for request in requests], self._device)

    def _draft_chain(self, request: DraftRequest) -> IntArray:
        """Draft for one sequence."""
        ids, limit, cache = request.sequence.ids, request.limit, self.ngram_cache
        place = _find_latest_place(ids)
        if cache is not None:
            equal = 0 if place is None else _count_equal(ids, place)
            if equal < LONGEST:
                namespace = request.sequence.request.namespace
                continuation = cache.find_continuation(namespace, ids[-LONGEST:], equal, limit)
                if len(continuation):
                    return continuation
        if place is None:
            return ids[:0]
        # If the sequence ends before the draft does, we assume it keeps repeating itself.
        return np.resize(ids[place + 1 :], limit)


def _find_latest_place(ids: IntArray) -> int | None:
    """Find the latest earlier place with the most tokens equal to the last ones.

    We count at most ``_LONGEST`` equal tokens. Time and memory grow with the length of the
    sequence, by one comparison per token.

    Returns:
        Index of the last token at that place, or None.
    """
    # Other occurrences of the last token, narrowed down to longer and longer equal endings.
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    places = ends[:0]
    for length in range(2, _LONGEST + 1):
        ends = ends[ends >= length - 1]
        if length > len(ids) - 1 or len(ends) == 0:
            break
        ends = ends[ids[ends - (length - 1)] == ids[-length]]
        if len(ends) == 0:
            break
        if length >= _SHORTEST:
            places = ends
    return int(places[-1]) if len(places) else None


def _count_equal(ids: IntArray, place: int) -> int:
    """Count the tokens up to a place that equal the last ones, at most ``LONGEST``."""
    count = min(place + 1, LONGEST)
    differs = np.flatnonzero(ids[place + 1 - count : place + 1] != ids[-count:])
    return count - 1 - int(differs[-1]) if len(differs) else count
