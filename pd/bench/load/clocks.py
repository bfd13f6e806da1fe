"""Relation between Unix time and ``time.perf_counter``, which measures everything here."""

from __future__ import annotations

import time

_ENOUGH_SECONDS = 5e-6
_TRIES = 10


def unix_minus_counter() -> float:
    """Seconds by which Unix time is ahead of ``time.perf_counter``.

    The clocks are read one after the other, and a process that loses its processor in between would
    get a wrong answer. So one of them is read twice, and of several readings the one counts whose
    reading of the other clock is enclosed most narrowly.
    """
    best, offset = float("inf"), 0.0
    for _ in range(_TRIES):
        before = time.perf_counter()
        unix = time.time()
        after = time.perf_counter()
        if after - before < best:
            best, offset = after - before, unix - (before + after) / 2
        if best < _ENOUGH_SECONDS:
            break
    return offset
