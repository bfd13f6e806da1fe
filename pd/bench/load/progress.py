"""A live line about a run on standard error."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from pd.util.output import unwrap_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """Shows one changing line on a terminal, and elsewhere a line every ten seconds."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        """``total``: number of requests, if every session has all its turns."""
        self._total = total
        self._stream = unwrap_stream(sys.stderr if stream is None else stream)
        self._is_terminal = self._stream.isatty()
        self._begin = self._last = time.monotonic()
        self._shown = False

    def show_progress(self, sums: Mapping[str, float]) -> None:
        now = time.monotonic()
        if not self._is_terminal and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last, self._shown = now, True
        seconds = max(now - self._begin, 1e-9)
        text = (
            f"{seconds:.0f} s: {sums['done']:.0f} of {self._total} answered, "
            f"{sums['sent'] - sums['done']:.0f} running, {sums['failed']:.0f} failed, "
            f"{sums['done'] / seconds:.1f} requests/s, {sums['events'] / seconds:.0f} events/s"
        )
        before, after = ("\r\x1b[K", "") if self._is_terminal else ("", "\n")
        self._stream.write(f"{before}{text}{after}")
        self._stream.flush()

    def close(self) -> None:
        if self._is_terminal and self._shown:
            self._stream.write("\n")
