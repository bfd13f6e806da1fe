"""Gauges of a node, read when its metrics are scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from pd.core.starvation import RUN_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.scheduling.core import NodeCore
    from pd.transfer.base import TransferManager


class NodeGauges(Collector):
    """Pages, queues and the prefix cache of a node at the moment of a scrape.

    Args:
        queues: requests by queue; called with the node's lock held.
        transfers: what moves the KV of each end of the node.
    """

    def __init__(
        self,
        core: NodeCore,
        queues: Callable[[], dict[str, int]],
        transfers: Sequence[TransferManager],
    ) -> None:
        self._core, self._queues, self._transfers = core, queues, transfers
        core.metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Metrics that are read when the registry asks for them."""
        memory = self._core.memory
        with self._core.events.lock:
            pages, queues = memory.counts(), self._queues()
            del pages["total"]  # their sum
            buffers = sum(transfer.quarantined_buffers for transfer in self._transfers)
            lookups = {"looked_up": memory.radix.lookup_tokens, "hit": memory.radix.hit_tokens}
        yield _gauge("pd_pages", "Pages by owner", "state", pages)
        yield GaugeMetricFamily(
            "pd_transfer_quarantined_slots",
            "Staging buffers that a transfer of a lost link may still touch",
            value=buffers,
        )
        yield CounterMetricFamily(
            "pd_run_delay_seconds",
            "Time in which the most delayed thread was ready to run and got no CPU",
            value=RUN_DELAY.total,
        )
        yield _gauge("pd_queue_length", "Requests by queue", "queue", queues)
        yield _gauge("pd_radix_tokens", "Tokens looked up and found cached", "kind", lookups)
        yield from self._grammars()

    def _grammars(self) -> Iterator[Metric]:
        grammars = self._core.grammars
        waiting, kept = grammars.waiting, grammars.cache_bytes
        text = "Grammars that are compiled or wait for it"
        yield GaugeMetricFamily("pd_grammars_waiting", text, value=waiting)
        yield GaugeMetricFamily("pd_grammar_cache_bytes", "Compiled grammars kept", value=kept)
        yield SummaryMetricFamily(
            "pd_grammar_compile_seconds",
            "Time until a new grammar could be used, from its turn on",
            count_value=grammars.num_compiled,
            sum_value=grammars.compile_seconds,
        )
        found = CounterMetricFamily("pd_grammars", "Grammars wanted", labels=["outcome"])
        for outcome in ("cached", "compiled", "refused", "unavailable"):
            found.add_metric([outcome], grammars.outcomes[outcome])
        yield found

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the gauges exist only once the node does."""
        return []


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
