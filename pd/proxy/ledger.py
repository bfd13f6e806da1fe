"""Counts that all processes of one proxy share, so that its limits are those of all together."""

from __future__ import annotations

import time
from array import array

_PROMPTS, _TOKENS, _LOGPROBS, _TAKEN, _CLOSED, _TURNED = range(6)
_COLUMNS = 6
_COUNT_BYTES = 8


class Ledger:
    """A table with a row of counts for each process. Every process reads all rows and changes its
    own, so nothing is locked: a count is one aligned word of memory.

    Args:
        memory: shared by the processes, :meth:`size` bytes that were zero at first; None for a
            proxy of one process.
        row: of this process.
    """

    def __init__(self, memory: memoryview | None = None, row: int = 0) -> None:
        own = memoryview(array("b", bytes(self.size(1)))) if memory is None else memory
        self._table = own.cast("q")
        self._start = row * _COLUMNS
        self.is_shared = len(self._table) > _COLUMNS

    @staticmethod
    def size(rows: int) -> int:
        """Bytes of a table."""
        return rows * _COLUMNS * _COUNT_BYTES

    @property
    def prompts(self) -> int:
        """Prompts times their ``n`` in the system."""
        return sum(self._table[_PROMPTS::_COLUMNS])

    @property
    def tokens(self) -> int:
        """Tokens of the prompts in the system."""
        return sum(self._table[_TOKENS::_COLUMNS])

    @property
    def logprobs(self) -> int:
        """Log probabilities that the answers in the system may hold."""
        return sum(self._table[_LOGPROBS::_COLUMNS])

    def add(self, prompts: int, tokens: int, logprobs: int) -> None:
        """Count what came to this process, or (negative) what ended there."""
        self._table[self._start + _PROMPTS] += prompts
        self._table[self._start + _TOKENS] += tokens
        self._table[self._start + _LOGPROBS] += logprobs

    def take(self, taken: int) -> None:
        """Note how many of the connections that this process was given it has taken."""
        self._table[self._start + _TAKEN] = taken

    def turn(self, closed: int) -> None:
        """Note that the event loop of this process turns, and how many of the connections that it
        was given are closed."""
        self._table[self._start + _CLOSED] = closed
        self._table[self._start + _TURNED] = time.monotonic_ns()

    def taken(self, row: int) -> int:
        """Return how many of the connections that a process was given it has taken."""
        return self._table[row * _COLUMNS + _TAKEN]

    def closed(self, row: int) -> int:
        """Return how many of the connections that a process was given are closed."""
        return self._table[row * _COLUMNS + _CLOSED]

    def turned(self, row: int) -> int:
        """Return when a process's event loop turned last, in nanoseconds of the monotonic clock; 0
        if it never did."""
        return self._table[row * _COLUMNS + _TURNED]

    def stood_still(self, row: int) -> float:
        """Seconds since a process's event loop turned last; 0 if it never did."""
        turned = self.turned(row)
        return (time.monotonic_ns() - turned) / 1e9 if turned else 0.0

    def clear(self, row: int) -> None:
        """Forget what a process counted that has ended."""
        for column in range(_COLUMNS):
            self._table[row * _COLUMNS + column] = 0
