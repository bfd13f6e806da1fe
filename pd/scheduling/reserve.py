"""Estimates how many pages running requests will still need, so that admission leaves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd.core.request import Sequence

# Weight of the newest finished output in the running mean.
_ADAPTATION = 0.1


class DecodeReserve:
    """Expects each sequence to grow like those that finished, up to a limit.

    A fixed reserve is either too small (everything is retracted) or halves the batch. This one
    starts at the limit, follows the mean length of finished outputs down, and doubles when a
    retraction shows that it was too small.

    Args:
        limit: tokens to reserve for one sequence at most (``--reserved-decode-tokens``).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.expected = float(limit)

    def finished(self, output_tokens: int) -> None:
        """Note that a sequence ended with this many output tokens."""
        self.expected += _ADAPTATION * (min(output_tokens, self._limit) - self.expected)

    def retracted(self) -> None:
        """Note that memory ran out."""
        self.expected = min(self._limit, max(1.0, 2 * self.expected))

    def growth(self, sequences: Iterable[Sequence], page_size: int) -> int:
        """Pages that the sequences are expected to take still."""
        pages = 0
        for sequence in sequences:
            goal = min(sequence.request.params.max_tokens, self.expected)
            pages += -(-int(max(goal - sequence.num_output_tokens, 1)) // page_size)
        return pages
