"""Drafts what followed the last tokens earlier in the same sequence.

The idea is prompt lookup decoding (A. Saxena, 2023): answers repeat passages of their prompt, as in
summaries, edited code and conversations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd.speculative.draft import Draft, upload_chains
from pd.speculative.drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from pd.speculative.drafter import DraftRequest

    IntArray = npt.NDArray[np.int32]

# Fewer equal tokens occur by chance; more than the longest choose no better place.
_SHORTEST, _LONGEST = 2, 8


class NgramDrafter(Drafter):
    """Finds the place in a sequence whose preceding tokens equal its last ones, as many of them as
    possible, and drafts what follows it. Keeps nothing between steps.

    Args:
        device: of the model that verifies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def draft(self, requests: Sequence[DraftRequest], prompt_tokens: int) -> list[Draft | None]:
        """See :class:`pd.speculative.drafter.Drafter`."""
        chains = [_draft(request.sequence.ids, request.limit) for request in requests]
        return upload_chains(chains, self._device)


def _draft(ids: IntArray, limit: int) -> IntArray:
    """Draft for one sequence; time and memory grow with its length, by a comparison per token."""
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
    if len(found) == 0:
        return ids[:0]
    # The latest place. Where the sequence ends before the draft does, it is taken to go on as it
    # did since that place.
    return np.resize(ids[int(found[-1]) + 1 :], limit)
