"""Counts shared by all processes of a proxy, because their limits are common."""

from __future__ import annotations

import time
from array import array

_PROMPTS, _TOKENS, _LOGPROBS, _TAKEN, _CLOSED, _TURNED = range(6)
_COLUMNS = 6
_COUNT_BYTES = 8


class Ledger:
    """A table with a row of counts per process.

    Every process reads all rows and changes only its own. We need no locks, because a count is one
    aligned word of memory.

    Args:
        memory: shared memory of :meth:`get_size` bytes, initially zero; None for a single process.
        row: row of this process.
    """

    def __init__(self, memory: memoryview | None = None, row: int = 0) -> None:
        own = memoryview(array("b", bytes(self.get_size(1)))) if memory is None else memory
        self._table = own.cast("q")
        self._start = row * _COLUMNS
        self.is_shared = len(self._table) > _COLUMNS

    @staticmethod
    def get_size(rows: int) -> int:
        """Return the bytes of a table."""
        return rows * _COLUMNS * _COUNT_BYTES

    @property
    def prompts(self) -> int:
        """Number of admitted prompts times their ``n``."""
        return sum(self._table[_PROMPTS::_COLUMNS])

    @property
    def tokens(self) -> int:
        """Number of tokens of the admitted prompts."""
        return sum(self._table[_TOKENS::_COLUMNS])

    @property
    def logprobs(self) -> int:
        """Maximum number of log probabilities in the answers to admitted requests."""
        return sum(self._table[_LOGPROBS::_COLUMNS])

    def add_counts(self, prompts: int, tokens: int, logprobs: int) -> None:
        """Add admitted requests of this process, or (negative) remove finished ones."""
        self._table[self._start + _PROMPTS] += prompts
        self._table[self._start + _TOKENS] += tokens
        self._table[self._start + _LOGPROBS] += logprobs

    def note_taken(self, taken: int) -> None:
        """Record how many of its connections this process has taken."""
        self._table[self._start + _TAKEN] = taken

    def note_turn(self, closed: int) -> None:
        """Record that the event loop turns, and how many of our connections are closed."""
        self._table[self._start + _CLOSED] = closed
        self._table[self._start + _TURNED] = time.monotonic_ns()

    def get_taken(self, row: int) -> int:
        """Return how many of its connections a process has taken."""
        return self._table[row * _COLUMNS + _TAKEN]

    def get_closed(self, row: int) -> int:
        """Return how many connections of a process are closed."""
        return self._table[row * _COLUMNS + _CLOSED]

    def get_last_turn(self, row: int) -> int:
        """Return when a process's event loop last turned, in nanoseconds of the monotonic clock; 0
        if never."""
        return self._table[row * _COLUMNS + _TURNED]

    def get_stall_seconds(self, row: int) -> float:
        """Return the seconds since a process's event loop last turned; 0 if it never did."""
        turned = self.get_last_turn(row)
        return (time.monotonic_ns() - turned) / 1e9 if turned else 0.0

    def clear_row(self, row: int) -> None:
        """Clear the counts of an ended process."""
        for column in range(_COLUMNS):
            self._table[row * _COLUMNS + column] = 0
