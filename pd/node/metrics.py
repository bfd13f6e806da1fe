"""Gauges of a node, computed when its metrics are scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from pd.util.output import lost_lines
from pd.util.starvation import RUN_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.scheduling.core import NodeCore
    from pd.transfer.base import TransferManager


class NodeGauges(Collector):
    """Pages, queues and prefix cache of a node at the time of a scrape.

    Args:
        queues: returns the number of requests by queue; called with the node's lock held.
        transfers: the transfer manager of each end of the node.
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
        """Yield metrics read from the node at the time of a scrape."""
        memory = self._core.memory
        with self._core.events.lock:
            pages, queues = memory.count_pages(), self._queues()
            leased = memory.radix.leased_pages
            del pages["total"]  # their sum
            buffers = sum(transfer.quarantined_buffers for transfer in self._transfers)
            lookups = {"looked_up": memory.radix.lookup_tokens, "hit": memory.radix.hit_tokens}
        yield GaugeMetricFamily(
            "pd_leased_pages", "Cached pages that prefix leases keep", value=leased
        )
        yield _make_gauge("pd_pages", "Pages by owner", "state", pages)
        yield GaugeMetricFamily(
            "pd_transfer_quarantined_slots",
            "Staging buffers that a transfer over a lost link may still access",
            value=buffers,
        )
        yield CounterMetricFamily(
            "pd_graph_steps",
            "Forward passes replayed from a CUDA graph",
            value=self._core.engine.runner.num_replays,
        )
        yield CounterMetricFamily(
            "pd_run_delay_seconds",
            "Time in which the most delayed thread was ready to run but had no CPU",
            value=RUN_DELAY.total,
        )
        yield CounterMetricFamily(
            "pd_log_lines_dropped",
            "Lines of output dropped because nobody read them",
            value=lost_lines(),
        )
        yield _make_gauge("pd_queue_length", "Requests by queue", "queue", queues)
        yield _make_gauge("pd_radix_tokens", "Tokens looked up and found cached", "kind", lookups)
        yield from self._collect_grammars()

    def _collect_grammars(self) -> Iterator[Metric]:
        grammars = self._core.grammars
        waiting, kept = grammars.waiting, grammars.cache_bytes
        text = "Grammars being compiled or waiting for it"
        yield GaugeMetricFamily("pd_grammars_waiting", text, value=waiting)
        yield GaugeMetricFamily("pd_grammar_cache_bytes", "Compiled grammars kept", value=kept)
        yield SummaryMetricFamily(
            "pd_grammar_compile_seconds",
            "Time from a grammar's turn to compile until it could be used",
            count_value=grammars.num_compiled,
            sum_value=grammars.compile_seconds,
        )
        outcomes = CounterMetricFamily("pd_grammars", "Grammars wanted", labels=["outcome"])
        for outcome in ("cached", "compiled", "refused", "unavailable"):
            outcomes.add_metric([outcome], grammars.outcomes[outcome])
        yield outcomes

    def describe(self) -> list[GaugeMetricFamily]:
        """Declare nothing, because the gauges exist only once the node does."""
        return []


def _make_gauge(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
