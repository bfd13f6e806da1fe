"""Lists of token sequences of different lengths, handled as a whole with numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Ints = npt.NDArray[np.integer]

TOKEN, WEIGHT = np.int16, np.uint8


@dataclass
class Ragged:
    """``n`` sequences, one after the other.

    Attributes:
        tokens: int16 ``[total]``.
        weights: uint8 ``[total]``, of each token in the loss.
        lengths: int64 ``[n]``.
    """

    tokens: Ints
    weights: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Ints:
        return np.cumsum(self.lengths) - self.lengths

    def take(self, indices: Ints) -> Ragged:
        """The sequences at ``indices``, which may repeat."""
        lengths = self.lengths[indices]
        flat = ranges(self.starts[indices], lengths)
        return Ragged(self.tokens[flat], self.weights[flat], lengths)

    def weighted(self, weight: int) -> Ragged:
        """Give all tokens one weight."""
        return Ragged(self.tokens, np.full_like(self.weights, weight), self.lengths)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate all sequences of all parts."""
        return cls(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.weights for p in parts]),
            np.concatenate([p.lengths for p in parts]),
        )

    @classmethod
    def zip(cls, parts: Sequence[Ragged]) -> Ragged:
        """Join sequence ``i`` of every part to sequence ``i`` of the result."""
        count = len(parts[0])
        order = np.arange(len(parts) * count).reshape(len(parts), count).T.ravel()
        joined = cls.concatenate(parts).take(order)
        return cls(
            joined.tokens, joined.weights, joined.lengths.reshape(count, len(parts)).sum(axis=1)
        )

    @classmethod
    def merge(cls, parts: Sequence[tuple[Ints, Ragged]]) -> Ragged:
        """Order sequences by the numbers that each part gives its own."""
        order = np.concatenate([numbers for numbers, _ in parts])
        return cls.concatenate([part for _, part in parts]).take(np.argsort(order, kind="stable"))


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Count ``start, start + 1, …`` for each length, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def rank_within(groups: Ints) -> Ints:
    """Return the place of every element in its group, from 0, for ascending ``groups``."""
    first = np.searchsorted(groups, groups)
    return np.arange(len(groups)) - first


def to_rows(parts: Ragged, rows: Ints, count: int, length: int, pad: int) -> tuple[Ints, Ints]:
    """Join the sequences of each row and cut or pad it to ``length``.

    Args:
        rows: row of each sequence, ascending.
        count: of rows.

    Returns:
        tokens int16 and weights uint8, both ``[count, length]``.
    """
    row_of_token = np.repeat(rows, parts.lengths)
    column = rank_within(row_of_token)
    kept = column < length
    tokens = np.full((count, length), pad, TOKEN)
    weights = np.zeros((count, length), WEIGHT)
    tokens[row_of_token[kept], column[kept]] = parts.tokens[kept]
    weights[row_of_token[kept], column[kept]] = parts.weights[kept]
    return tokens, weights
