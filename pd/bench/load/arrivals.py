"""Schedules of arrivals: seconds after the start, drawn before anything is sent.

Every function is pure: the same seed and settings give the same times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Strategy = Literal["linear", "exponential"]


@dataclass(frozen=True)
class Arrivals:
    """The process by which requests arrive.

    Attributes:
        rate: requests a second; infinite for all at once, or with a ``ramp``.
        burstiness: shape of the gamma distribution of the intervals. 1 is a Poisson process, less
            is burstier, more is more regular, infinity is a constant interval.
        ramp: how the rate goes from ``ramp_start`` to ``ramp_end`` over the requests; None for a
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


def schedule(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    """Times of ``count`` arrivals, in order. The first one arrives after its interval, too."""
    rates = _rates(arrivals, count)
    means = np.where(np.isinf(rates), 0.0, 1.0 / rates)
    shape = arrivals.burstiness
    if np.isinf(shape):
        relative = np.ones(count)
    else:
        relative = np.random.default_rng([seed, 1]).gamma(shape, 1.0 / shape, count)
    times: list[float] = np.cumsum(relative * means).tolist()
    return times


def _rates(arrivals: Arrivals, count: int) -> NDArray[np.float64]:
    """Rate at each request. A ramp goes over the requests, as in ``vllm bench serve``."""
    if arrivals.ramp is None:
        return np.full(count, arrivals.rate)
    progress = np.arange(count) / max(count - 1, 1)
    start, end = arrivals.ramp_start, arrivals.ramp_end
    if arrivals.ramp == "linear":
        return np.asarray(start + (end - start) * progress)
    return np.asarray(start * (end / start) ** progress)
