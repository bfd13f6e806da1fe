"""Measures how busy a load process is."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

_INTERVAL = 0.01


class ClientLoad:
    """Load of one process while it measures: its processor time and how late its loop is.

    Attributes:
        failure: see :class:`ProcessLoad`.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._lags: array[float] = array("d")
        self._begin = (0.0, 0.0, 0.0)
        self._end = (0.0, 0.0, 0.0)

    async def sample(self) -> None:
        """Note again and again by how much a sleep was too long. Ends only when cancelled."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_INTERVAL)
            self._lags.append(time.perf_counter() - before - _INTERVAL)

    def begin(self) -> None:
        self._lags = array("d")
        self._begin = _now()

    def end(self) -> None:
        self._end = _now()

    def facts(self, process: str) -> ProcessLoad:
        wall, cpu, waited = (max(0.0, b - a) for a, b in zip(self._begin, self._end, strict=True))
        lags = sorted(self._lags)
        return ProcessLoad(
            process=process,
            cpu_share=cpu / max(wall, 1e-9),
            waiting_share=waited / max(wall, 1e-9),
            loop_lag_p99=lags[min(len(lags) - 1, int(len(lags) * 0.99))] if lags else 0.0,
            loop_lag_max=lags[-1] if lags else 0.0,
            failure=self.failure,
        )


@dataclass(frozen=True)
class ProcessLoad:
    """Facts that a load process measured about itself.

    Attributes:
        cpu_share: processor time of its one loop, as a share of the run.
        waiting_share: share of the run in which it was ready and had no processor (Linux only).
        loop_lag_p99, loop_lag_max: seconds by which its loop was late.
        failure: why it ended its run before its time; None if it did not.
    """

    process: str
    cpu_share: float
    waiting_share: float
    loop_lag_p99: float
    loop_lag_max: float
    failure: str | None = None


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), _run_delay()


def _run_delay() -> float:
    """Seconds for which the main thread was runnable and did not run; 0 if nobody counts."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
