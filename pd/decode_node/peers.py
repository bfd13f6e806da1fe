"""The prefill nodes that a decode node works with: handshakes, heartbeats, leases."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd.bootstrap.peers import PeerDirectory
from pd.core.errors import HandshakeError, NodeFailedError, PDError
from pd.core.leases import Leases
from pd.core.messages import LEASE_SECONDS, MAX_MEETINGS, PeerHeartbeat
from pd.core.starvation import RUN_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd.core.node_info import NodeInfo
    from pd.decode_node.node import DecodeNode

logger = logging.getLogger(__name__)

# Seconds between tries to meet a prefill node that no request names. A request tries at once.
_MEETING_INTERVAL = 5.0


class PrefillPeers:
    """Shakes hands on demand and notices who is gone. Under the node's lock; sockets are touched on
    the control thread only."""

    def __init__(self, node: DecodeNode, own: NodeInfo) -> None:
        self._node = node
        self._leases: Leases[str] = Leases()
        self._urls: dict[str, str] = {}
        self._infos: dict[str, NodeInfo] = {}
        self._next_meetings: dict[str, float] = {}
        self._directory = PeerDirectory(
            own,
            cluster_key=node.config.cluster_key,
            connect=node.transfer.connect,
            timeout=LEASE_SECONDS,
            patience=node.transfer.patience,
        )

    def meet(self, prefill: Mapping[str, str], now: float) -> None:
        """Shake hands with nodes that requests may name, by instance id and registry, so that the
        first request finds the link made; with MAX_MEETINGS at a time, whatever proxies name."""
        waiting = {i: due for i, due in self._next_meetings.items() if due > now}
        for instance, url in prefill.items():
            if len(waiting) >= MAX_MEETINGS:
                break
            if instance not in self._leases and instance not in waiting:
                waiting[instance] = now + _MEETING_INTERVAL
                # The directory logs a failure, and a request would hear of it.
                self.want(url, instance, lambda error: None, ahead=True)
        self._next_meetings = waiting

    def linked(self) -> list[str]:
        """Peers whose first request would find the link made."""
        return [instance for instance in self._leases if self._node.transfer.is_linked(instance)]

    def want(
        self,
        url: str,
        instance: str,
        then: Callable[[PDError | None], None],
        *,
        ahead: bool = False,
    ) -> None:
        """Call ``then`` on the control thread, in an event, once the peer is connected.
        ``ahead``: no request needs it yet."""

        def answered(result: NodeInfo | PDError) -> None:
            self._node.control.call(lambda: self._answered(url, instance, result, then))

        self._directory.request(url, instance, answered, ahead=ahead)

    def _answered(
        self,
        url: str,
        instance: str,
        result: NodeInfo | PDError,
        then: Callable[[PDError | None], None],
    ) -> None:
        with self._node.event():
            if isinstance(result, PDError):
                then(result)
                return
            if instance not in self._leases:
                try:
                    self._connect(url, result)
                except HandshakeError as error:
                    self._directory.forget(instance)
                    then(error)
                    return
            then(None)

    def _connect(self, url: str, peer: NodeInfo) -> None:
        instance = peer.instance_id
        for old in [i for i, known in self._urls.items() if known == url]:
            self.lose(old, f"restarted as {instance}")
        self._node.control.connect(instance.encode(), peer.endpoint)
        self._leases.renew(instance)
        self._urls[instance] = url
        self._infos[instance] = peer
        backend = self._node.transfer.backend_of(instance)
        logger.info("KV of prefill node %s travels by %s", instance, backend)
        self._beat(instance)  # P can send nothing before it has heard from us

    def heard_from(self, instance: str) -> None:
        """Note a sign of life."""
        if instance in self._leases:
            self._leases.renew(instance)

    def connected(self, instance: str) -> bool:
        """Whether messages can be sent to it."""
        return instance in self._leases

    def infos(self) -> list[NodeInfo]:
        """Who shook hands and was not lost since."""
        return list(self._infos.values())

    def heartbeat(self) -> None:
        """Tell every prefill node that D lives."""
        for instance in self._leases:
            self._beat(instance)

    def _beat(self, instance: str) -> None:
        own = self._node.instance_id
        message = PeerHeartbeat(to=instance, sender=own, run_delay=RUN_DELAY.total)
        self._node.control.post(instance.encode(), message)

    def sweep(self, now: float) -> None:
        """Lose peers that were silent for a lease (control thread)."""
        for instance in self._leases.expired(now):
            self.lose(instance, f"no heartbeat for {LEASE_SECONDS} s")

    def lose(self, instance: str, why: str) -> None:
        """Give a peer up: what it had not committed fails, everything else goes on."""
        if not self._leases.drop(instance):
            return
        logger.warning("prefill node %s lost: %s", instance, why)
        del self._urls[instance], self._infos[instance]
        self._directory.forget(instance)
        self._node.control.disconnect(instance.encode())
        self._node.transfer.disconnect(instance)
        self._node.peer_lost(instance, NodeFailedError(f"prefill node {instance} failed: {why}"))

    def close(self) -> None:
        """Start no more handshakes."""
        self._directory.close()
