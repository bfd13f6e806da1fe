"""Estimates how many more pages running requests will need, so admission leaves them room."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Several

    from pd.scheduling.request import Sequence

# Weight of the newest finished output in the running mean.
_ADAPTATION = 0.1


class DecodeReserve:
    """Expects each sequence to grow like the finished ones, up to a limit.

    A fixed reserve either is too small, so we retract everything, or halves the batch. This one
    starts at the limit and follows the mean length of finished outputs. It doubles after each
    retraction, because it was too small then.

    Args:
        limit: maximum tokens to reserve for one sequence (``--reserved-decode-tokens``).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.expected = float(limit)

    def note_finished(self, output_tokens: int) -> None:
        """Note the number of output tokens of a finished sequence."""
        self.expected += _ADAPTATION * (min(output_tokens, self._limit) - self.expected)

    def note_retracted(self) -> None:
        """Note a retraction, which means memory ran out."""
        self.expected = min(self._limit, max(1.0, 2 * self.expected))

    def count_growth(
        self, sequences: Iterable[Sequence], page_size: int, windows: Several[int] = ()
    ) -> int:
        """Count the pages we expect the sequences to take in addition.

        Args:
            windows: sliding windows with pages of their own. A sequence gives up as many of them as
                it takes, once they hold a window.
        """
        pages = 0
        for sequence in sequences:
            goal = min(sequence.request.params.max_tokens, self.expected)
            growth = -(-int(max(goal - sequence.num_output_tokens, 1)) // page_size)
            pages += growth
            for window in windows:
                pages += min(growth, 2 + window // page_size)
        return pages
