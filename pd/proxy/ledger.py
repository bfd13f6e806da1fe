"""Counts that all processes of one proxy share, so that its limits are those of all together."""

from __future__ import annotations

from array import array

_PROMPTS, _TOKENS, _CLOSED = range(3)
_COLUMNS = 3
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

    def add(self, prompts: int, tokens: int) -> None:
        """Count prompts that came to this process, or (negative) that ended there."""
        self._table[self._start + _PROMPTS] += prompts
        self._table[self._start + _TOKENS] += tokens

    def set_closed(self, connections: int) -> None:
        """Note how many of the connections that this process was given are closed."""
        self._table[self._start + _CLOSED] = connections

    def closed(self, row: int) -> int:
        """How many of the connections that a process was given are closed."""
        return self._table[row * _COLUMNS + _CLOSED]

    def clear(self, row: int) -> None:
        """Forget what a process counted that has ended."""
        for column in range(_COLUMNS):
            self._table[row * _COLUMNS + column] = 0
