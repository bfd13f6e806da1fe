"""Measures how busy a load process is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

_INTERVAL = 0.01


class ClientLoad:
    """Measures a process during its run: its processor time and the lag of its event loop.

    Attributes:
        failure: see :class:`ProcessLoad`.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._lags: array[float] = array("d")
        self._begin = (0.0, 0.0, 0.0)
        self._end = (0.0, 0.0, 0.0)

    async def sample_lag(self) -> None:
        """Measure again and again by how much a sleep was too long, until cancelled."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_INTERVAL)
            self._lags.append(time.perf_counter() - before - _INTERVAL)

    def start(self) -> None:
        self._lags = array("d")
        self._begin = _read_clocks()

    def stop(self) -> None:
        self._end = _read_clocks()

    def describe_process(self, process: str) -> ProcessLoad:
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
    """Facts of a load process about itself.

    Attributes:
        cpu_share: processor time of its one loop, as a share of the run.
        waiting_share: share of the run in which it was ready but had no processor (Linux only).
        loop_lag_p99, loop_lag_max: seconds by which its loop was late.
        failure: why it ended its run early; None if it did not.
    """

    process: str
    cpu_share: float
    waiting_share: float
    loop_lag_p99: float
    loop_lag_max: float
    failure: str | None = None


def _read_clocks() -> tuple[float, float, float]:
    """Read the time, the processor time, and the seconds for which the main thread waited for a
    processor; these are 0 if the kernel does not count them."""
    waited = 0.0
    with contextlib.suppress(OSError, IndexError, ValueError):
        waited = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return time.perf_counter(), time.process_time(), waited
