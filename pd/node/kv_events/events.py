"""Publishes a node's KV events, from its prefix cache to the publisher."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from pd.radix.block_log import BlockLog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.node.kv_events.publisher import KVEventPublisher
    from pd.scheduling.core import NodeCore

logger = logging.getLogger(__name__)


class KVEvents(Collector):
    """Passes changes of the node's prefix cache to the publisher. Created before the node starts.

    The caller of :meth:`publish_changes` holds the node's lock.
    """

    def __init__(self, core: NodeCore, publisher: KVEventPublisher) -> None:
        self._log = BlockLog(core.memory.radix, core.memory.num_pages)
        self._publisher = publisher
        core.metrics.registry.register(self)
        publisher.start()
        logger.info("KV events are published at %s", publisher.endpoint)

    def publish_changes(self, now: float) -> None:
        """Publish recent changes, or the whole cache if a subscriber missed too much.

        ``now`` is on the monotonic clock.
        """
        if self._publisher.take_snapshot_wish(now):
            self._log.restart()
        # NOTE: while the publisher is full, the log collects. Its size is bounded.
        changes = self._log.take_changes() if self._publisher.has_room else None
        if changes is not None:
            self._publisher.publish_soon(changes)

    def describe_endpoints(self) -> dict[str, str | None]:
        """Return the endpoints and the topic for subscribers."""
        publisher = self._publisher
        return {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": publisher.topic,
        }

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield metrics read from the publisher at the time of a scrape."""
        publisher = self._publisher
        text = "Batches of published KV events"
        yield CounterMetricFamily("pd_kv_event_batches", text, value=publisher.num_batches)
        text = "Publications of the whole cache"
        yield CounterMetricFamily("pd_kv_event_snapshots", text, value=publisher.num_snapshots)

    def describe(self) -> list[CounterMetricFamily]:
        """Declare nothing, because the counters exist only once the node does."""
        return []
