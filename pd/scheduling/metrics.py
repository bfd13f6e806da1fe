"""Prometheus metrics of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pd.core.starvation import RUN_DELAY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.node.node import Node

_BUCKETS = tuple(0.001 * 2**power for power in range(18))
_TRANSFER_BUCKETS = tuple(0.0001 * 2**power for power in range(20))
_RATE_BUCKETS = tuple(0.0625 * 2**power for power in range(14))


class TransferTimes(NamedTuple):
    """Of one transfer, in seconds.

    Attributes:
        wait: until the decode node had reserved, from the request's arrival.
        wire: from the first push to the last byte's end, as the prefill node sees it.
        exposed: what of it a request waits for: from the computed prompt to the commit.
    """

    wait: float
    wire: float
    exposed: float


class TransferMetrics:
    """Committed transfers by backend. Both ends count the same ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["backend"], buckets=buckets, registry=registry)

        self._bytes = Counter(
            "pd_transfer_bytes", "KV bytes of committed transfers", ["backend"], registry=registry
        )
        self._rate = histogram(
            "pd_transfer_gigabytes_per_second", "Bytes by time on the wire", _RATE_BUCKETS
        )
        self._times = {
            "wait": histogram(
                "pd_transfer_reservation_wait_seconds",
                "From a request's arrival to its reservation",
                _TRANSFER_BUCKETS,
            ),
            "wire": histogram(
                "pd_transfer_wire_seconds",
                "From the first push to the end of the last byte",
                _TRANSFER_BUCKETS,
            ),
            "exposed": histogram(
                "pd_transfer_exposed_seconds",
                "From the computed prompt to the commit",
                _TRANSFER_BUCKETS,
            ),
        }

    def observe(self, backend: str, num_bytes: int, times: TransferTimes) -> None:
        """A transfer was committed. One without bytes (D had all) counts as a wait alone."""
        self._times["wait"].labels(backend).observe(times.wait)
        if num_bytes == 0:
            return
        self._bytes.labels(backend).inc(num_bytes)
        self._times["wire"].labels(backend).observe(times.wire)
        self._times["exposed"].labels(backend).observe(times.exposed)
        if times.wire > 0:
            self._rate.labels(backend).observe(num_bytes / times.wire / 1e9)


class NodeMetrics:
    """Counters and histograms of one node, and gauges read from it when scraped."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.registry = CollectorRegistry()
        self.requests = Counter("pd_requests", "Requests accepted", registry=self.registry)
        self.failed = Counter(
            "pd_requests_failed", "Requests ended by an error", ["kind"], registry=self.registry
        )
        self.tokens = Counter("pd_output_tokens", "Tokens delivered", registry=self.registry)
        self.retractions = Counter(
            "pd_retractions", "Sequences taken out of the pool", registry=self.registry
        )
        self.transferred_bytes = Counter(
            "pd_transferred_bytes", "KV bytes of committed transfers", registry=self.registry
        )
        self.transfers = TransferMetrics(self.registry)
        self._stages = Histogram(
            "pd_stage_seconds",
            "Time of requests in each stage",
            ["stage"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)

    def observe(self, stage: str, seconds: float) -> None:
        """A request spent so long in a stage."""
        self._stages.labels(stage).observe(seconds)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Metrics that are read when the registry asks for them."""
        with self._node.lock:
            pages, queues = self._node.memory.counts(), self._node.queues()
            del pages["total"]  # their sum
            radix = self._node.memory.radix
            transfer = self._node.transfer
            slots = transfer.quarantined_slots if transfer else 0
            lookups = {"looked_up": radix.lookup_tokens, "hit": radix.hit_tokens}
        yield _gauge("pd_pages", "Pages by owner", "state", pages)
        yield GaugeMetricFamily(
            "pd_transfer_quarantined_slots",
            "Staging slots that a transfer of a lost link may still touch",
            value=slots,
        )
        yield CounterMetricFamily(
            "pd_run_delay_seconds",
            "Time in which the most delayed thread was ready to run and got no CPU",
            value=RUN_DELAY.total,
        )
        yield _gauge("pd_queue_length", "Requests by queue", "queue", queues)
        yield _gauge("pd_radix_tokens", "Tokens looked up and found cached", "kind", lookups)

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the gauges exist only once the node does."""
        return []

    def expose(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
