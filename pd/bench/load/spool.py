"""Keeps answers in a file until the run is over, because parsing them would delay others."""

from __future__ import annotations

import os
import tempfile
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.reception import Piece


class Spooled(NamedTuple):
    """Place of one answer in the file, with times and sizes of its pieces."""

    offset: int
    times: array[float]
    sizes: array[int]


class Spool:
    """An unnamed file, which disappears with the process. Not thread-safe."""

    def __init__(self) -> None:
        # The process closes it when it ends.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._end = 0

    def add_pieces(self, pieces: Sequence[Piece]) -> Spooled:
        """Write an answer, which takes as long as one copy in memory.

        Raises OSError if there is no room; earlier and later answers are kept all the same.
        """
        content = b"".join(data for _, data in pieces)
        place = Spooled(
            self._end,
            array("d", [at for at, _ in pieces]),
            array("q", [len(data) for _, data in pieces]),
        )
        self._file.seek(self._end)
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) or 0 :]
        self._end += len(content)
        return place

    def read_pieces(self, place: Spooled) -> list[Piece]:
        """Read an answer back. Raises SetupError if the file has become shorter."""
        content = os.pread(self._file.fileno(), sum(place.sizes), place.offset)
        if len(content) != sum(place.sizes):
            raise SetupError(f"answers cannot be read back from {tempfile.gettempdir()}")
        begins = accumulate(place.sizes, initial=0)
        return [
            (at, content[begin : begin + size])
            for at, size, begin in zip(place.times, place.sizes, begins, strict=False)
        ]
