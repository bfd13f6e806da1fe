"""Metrics changed by every token.

Only the event loop changes them, so they need no locks. The locks of the client library cost
several microseconds per token.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry


class TokenCounter:
    """A counter without labels."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name, self._documentation = name, documentation
        self._created = time.time()
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the same samples as the library's counter."""
        metric = Metric(self._name, self._documentation, "counter")
        metric.add_sample(f"{self._name}_total", {}, self.value)
        metric.add_sample(f"{self._name}_created", {}, self._created)
        yield metric


class TokenHistogram:
    """A histogram without labels."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = [*bounds, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """Return the same samples as the library's histogram."""
        metric = Metric(self._name, self._documentation, "histogram")
        counts = list(accumulate(self._counts))
        for bound, count in zip(self._bounds, counts, strict=True):
            metric.add_sample(f"{self._name}_bucket", {"le": _format_bound(bound)}, count)
        metric.add_sample(f"{self._name}_count", {}, counts[-1])
        metric.add_sample(f"{self._name}_sum", {}, self._sum)
        metric.add_sample(f"{self._name}_created", {}, self._created)
        yield metric


def _format_bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))
