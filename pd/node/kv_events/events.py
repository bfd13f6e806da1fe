"""The published events of a node: from its prefix cache to the publisher."""

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
    """Gives the publisher the changes of the node's prefix cache. The node is not started yet. The
    caller of :meth:`flush` holds the node's lock."""

    def __init__(self, core: NodeCore, publisher: KVEventPublisher) -> None:
        self._log = BlockLog(core.memory.radix, core.memory.num_pages)
        self._publisher = publisher
        core.metrics.registry.register(self)
        publisher.start()
        logger.info("KV events are published at %s", publisher.endpoint)

    def flush(self, now: float) -> None:
        """Publish what changed, or all that is cached if a subscriber missed too much. ``now``: on
        the monotonic clock."""
        if self._publisher.take_snapshot_wish(now):
            self._log.start_over()
        # NOTE: while there is no room the log collects, and it is bounded.
        changes = self._log.take() if self._publisher.has_room else None
        if changes is not None:
            self._publisher.publish(changes)

    def info(self) -> dict[str, str | None]:
        """Endpoints and topic for subscribers."""
        publisher = self._publisher
        return {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": publisher.topic,
        }

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Metrics that are read when the registry asks for them."""
        publisher = self._publisher
        text = "Batches of KV events that were published"
        yield CounterMetricFamily("pd_kv_event_batches", text, value=publisher.num_batches)
        text = "How often all cached blocks were published"
        yield CounterMetricFamily("pd_kv_event_snapshots", text, value=publisher.num_snapshots)

    def describe(self) -> list[CounterMetricFamily]:
        """Nothing: the counters exist only once the node does."""
        return []
