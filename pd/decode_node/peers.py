"""The prefill nodes that a receiving end works with: handshakes, heartbeats, leases."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from pd.bootstrap.peers import PeerDirectory
from pd.core.errors import HandshakeError, PDError, PeerFailedError
from pd.core.leases import Leases
from pd.core.messages import LEASE_SECONDS, MAX_MEETINGS, PeerHeartbeat
from pd.core.starvation import RUN_DELAY
from pd.transfer import contained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd.core.messages import Message
    from pd.core.node_info import NodeInfo
    from pd.scheduling.core import NodeCore
    from pd.transfer.base import TransferManager

logger = logging.getLogger(__name__)

# Seconds between tries to meet a prefill node that no request names. A request tries at once.
_MEETING_INTERVAL = 5.0


class PeerSockets(Protocol):
    """Message sockets to prefill nodes: :class:`pd.node.control.ControlThread`."""

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the control thread; any thread."""

    def post_to_prefill(self, identity: bytes, message: Message) -> None:
        """Send to a node that this one is connected to; any thread. Lost when it is gone."""

    def connect(self, identity: bytes, endpoint: str) -> None:
        """Connect to a node (control thread only). Raises HandshakeError."""

    def disconnect(self, identity: bytes) -> None:
        """Close the connection to a node, if there is one (control thread only)."""


class PrefillPeers:
    """Shakes hands on demand and drops peers that are silent for a lease. The caller holds the
    node's lock; sockets are used by the control thread only.

    Args:
        own: introduces this node in handshakes.
        dropped: called in an event with each peer that is dropped, and the error of requests that
            depend on it.
    """

    def __init__(
        self,
        core: NodeCore,
        own: NodeInfo,
        transfer: TransferManager,
        sockets: PeerSockets,
        dropped: Callable[[str, PDError], None],
    ) -> None:
        self._core, self._transfer, self._sockets = core, transfer, sockets
        self._dropped = dropped
        self._leases: Leases[str] = Leases()
        self._urls: dict[str, str] = {}
        self._infos: dict[str, NodeInfo] = {}
        self._next_meetings: dict[str, float] = {}
        self._directory = PeerDirectory(
            own,
            cluster_key=core.config.cluster_key,
            connect=transfer.connect,
            timeout=LEASE_SECONDS,
            patience=transfer.patience,
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
                # The directory logs a failure, and a request that needs the peer would fail.
                self.want(url, instance, lambda error: None, ahead=True)
        self._next_meetings = waiting

    def linked(self) -> list[str]:
        """Peers whose first request would find the link made."""
        return [instance for instance in self._leases if self._transfer.is_linked(instance)]

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
            self._sockets.call(lambda: self._answered(url, instance, result, then))

        self._directory.request(url, instance, answered, ahead=ahead)

    def _answered(
        self,
        url: str,
        instance: str,
        result: NodeInfo | PDError,
        then: Callable[[PDError | None], None],
    ) -> None:
        with self._core.events.event():
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
            self.drop(old, f"restarted as {instance}")
        self._sockets.connect(instance.encode(), peer.endpoint)
        self._leases.renew(instance)
        self._urls[instance] = url
        self._infos[instance] = peer
        backend = self._transfer.backend_of(instance)
        logger.info("KV of prefill node %s travels by %s", instance, backend)
        self._beat(instance)  # the peer can send nothing before a message has come

    def renew(self, instance: str) -> None:
        """Renew the lease of a process of which a message came, if it is a peer."""
        if instance in self._leases:
            self._leases.renew(instance)

    def connected(self, instance: str) -> bool:
        """Whether messages can be sent to it."""
        return instance in self._leases

    def infos(self) -> list[NodeInfo]:
        """The prefill nodes that shook hands and were not dropped since."""
        return list(self._infos.values())

    def heartbeat(self) -> None:
        """Tell every prefill node that this node lives."""
        for instance in self._leases:
            self._beat(instance)

    def _beat(self, instance: str) -> None:
        own = self._core.instance_id
        self.send(PeerHeartbeat(to=instance, sender=own, run_delay=RUN_DELAY.total))

    def send(self, message: Message) -> None:
        """Send to the peer that the message names."""
        self._sockets.post_to_prefill(message.to.encode(), message)

    def sweep(self, now: float) -> None:
        """Drop peers that were silent for a lease (control thread)."""
        for instance in self._leases.expired(now):
            self.drop(instance, f"no heartbeat for {LEASE_SECONDS} s")

    def drop(self, instance: str, why: str) -> bool:
        """Forget a peer, if it is known: its uncommitted hand-offs fail, everything else goes on
        (control thread). Returns whether it was known."""
        if not self._leases.drop(instance):
            return False
        logger.warning("prefill node %s lost: %s", instance, why)
        del self._urls[instance], self._infos[instance]
        self._directory.forget(instance)
        self._sockets.disconnect(instance.encode())
        contained.disconnect(self._transfer, instance)
        self._dropped(instance, PeerFailedError(f"prefill node {instance} failed: {why}"))
        return True

    def close(self) -> None:
        """Start no more handshakes."""
        self._directory.close()
