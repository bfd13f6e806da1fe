"""Schedules of arrivals: seconds after the start, drawn before we send anything.

The same seed and settings always give the same times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pd.core.errors import UsageError

Strategy = Literal["linear", "exponential"]


@dataclass(frozen=True)
class Arrivals:
    """The process by which requests arrive.

    Attributes:
        rate: requests per second; infinite for all at once, or with a ``ramp``.
        burstiness: shape of the gamma distribution of the intervals. 1 is a Poisson process, less
            is burstier, more is more regular, and infinity is a constant interval.
        ramp: how the rate changes from ``ramp_start`` to ``ramp_end`` over the requests; None for a
            constant rate.
    """

    rate: float = float("inf")
    burstiness: float = 1.0
    ramp: Strategy | None = None
    ramp_start: float = 0.0
    ramp_end: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise UsageError(f"--request-rate must be above 0 (or inf), not {self.rate:g}")
        if not self.burstiness > 0:
            raise UsageError(f"--burstiness must be above 0, not {self.burstiness:g}")
        if self.ramp is None:
            return
        for flag, value in (("start", self.ramp_start), ("end", self.ramp_end)):
            if not 0 < value < float("inf"):
                raise UsageError(f"--ramp-up-{flag}-rps must be above 0 and finite, not {value:g}")


def draw_arrivals(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    """Draw the times of ``count`` arrivals, in order. The first also waits for its interval.

    A ramp goes over the requests, as in ``vllm bench serve``.
    """
    start, end = arrivals.ramp_start, arrivals.ramp_end
    progress = np.arange(count) / max(count - 1, 1)
    if arrivals.ramp is None:
        rates = np.full(count, arrivals.rate)
    elif arrivals.ramp == "linear":
        rates = np.asarray(start + (end - start) * progress)
    else:
        rates = np.asarray(start * (end / start) ** progress)
    means = np.where(np.isinf(rates), 0.0, 1.0 / rates)
    shape = arrivals.burstiness
    if np.isinf(shape):
        relative = np.ones(count)
    else:
        relative = np.random.default_rng([seed, 1]).gamma(shape, 1.0 / shape, count)
    times: list[float] = np.cumsum(relative * means).tolist()
    return times
