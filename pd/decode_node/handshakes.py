"""Handshakes of a receiving end with prefill nodes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from pd.bootstrap.peers import PeerDirectory
from pd.core.errors import HandshakeError, PDError, PeerFailedError
from pd.core.messages import LEASE_SECONDS, MAX_MEETINGS
from pd.transfer import contained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd.core.messages import Message
    from pd.core.node_info import NodeInfo
    from pd.scheduling.core import NodeCore
    from pd.scheduling.peer_table import PeerTable
    from pd.transfer.base import TransferManager

logger = logging.getLogger(__name__)

# Seconds between tries to connect ahead of requests. A request connects at once.
_MEETING_INTERVAL = 5.0


class PeerSockets(Protocol):
    """Message sockets to prefill nodes: :class:`pd.node.control.ControlThread`."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run a function on the control thread; any thread."""

    def post_to_prefill(self, identity: bytes, message: Message) -> None:
        """Send to a node we connected to; any thread. Lost if the node is gone."""

    def connect_node(self, identity: bytes, endpoint: str) -> None:
        """Connect to a node (control thread only). Raises HandshakeError."""

    def disconnect_node(self, identity: bytes) -> None:
        """Close the connection to a node, if there is one (control thread only)."""


class Handshakes:
    """Shakes hands with prefill nodes on demand, and drops peers silent for a lease.

    The caller holds the node's lock. Only the control thread uses the sockets.

    Args:
        own: introduces this node in handshakes.
        peers: has the nodes whose handshakes succeeded.
        dropped: called in an event with each dropped peer and the error for requests that need it.
    """

    def __init__(
        self,
        core: NodeCore,
        own: NodeInfo,
        transfer: TransferManager,
        sockets: PeerSockets,
        peers: PeerTable,
        dropped: Callable[[str, PDError], None],
    ) -> None:
        self._core, self._transfer, self._sockets = core, transfer, sockets
        self._peers, self._dropped = peers, dropped
        self._urls: dict[str, str] = {}
        self._next_meetings: dict[str, float] = {}
        self._directory = PeerDirectory(
            own,
            cluster_key=core.config.cluster_key,
            connect=transfer.connect,
            timeout=LEASE_SECONDS,
            patience=transfer.patience,
        )

    def meet_peers(self, prefill: Mapping[str, str], now: float) -> None:
        """Shake hands ahead with nodes future requests may name, by instance id and registry.

        The first request then finds the connection made. We try at most MAX_MEETINGS nodes at a
        time, because proxies may name any number.
        """
        waiting = {i: due for i, due in self._next_meetings.items() if due > now}
        for instance, url in prefill.items():
            if len(waiting) >= MAX_MEETINGS:
                break
            if instance not in self._peers and instance not in waiting:
                waiting[instance] = now + _MEETING_INTERVAL
                # The directory logs a failure. A request needing the peer would fail.
                self.connect_peer(url, instance, lambda error: None, ahead=True)
        self._next_meetings = waiting

    def list_linked(self) -> list[str]:
        """List the peers whose link is ready for a first request."""
        return [instance for instance in self._peers if self._transfer.is_linked(instance)]

    def connect_peer(
        self,
        url: str,
        instance: str,
        then: Callable[[PDError | None], None],
        *,
        ahead: bool = False,
    ) -> None:
        """Call ``then`` in an event once the peer is connected, or with the error.

        If it is connected already, we call ``then`` at once, in the caller's event, and otherwise
        later on the control thread. ``ahead``: no request needs the peer yet.
        """
        if instance in self._peers and self._urls.get(instance) == url:
            then(None)
            return

        def on_answer(result: NodeInfo | PDError) -> None:
            self._sockets.call_soon(lambda: self._on_handshake(url, instance, result, then))

        self._directory.request_peer(url, instance, on_answer, ahead=ahead)

    def _on_handshake(
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
            if instance not in self._peers:
                try:
                    self._connect_socket(url, result)
                except HandshakeError as error:
                    self._directory.forget_peer(instance)
                    then(error)
                    return
            then(None)

    def _connect_socket(self, url: str, peer: NodeInfo) -> None:
        instance = peer.instance_id
        for old in [i for i, known in self._urls.items() if known == url]:
            self.drop_peer(old, f"restarted as {instance}")
        self._sockets.connect_node(instance.encode(), peer.endpoint)
        self._peers.add_peer(peer)
        self._urls[instance] = url
        backend = self._transfer.backend_of(instance)
        logger.info("KV of prefill node %s travels by %s", instance, backend)
        # The peer can send us nothing before our first message.
        self._peers.send_heartbeat(instance)

    def drop_silent_peers(self, now: float) -> None:
        """Drop peers silent for a lease (control thread)."""
        for instance in self._peers.find_silent(now):
            self.drop_peer(instance, f"no heartbeat for {LEASE_SECONDS} s")

    def drop_peer(self, instance: str, why: str) -> bool:
        """Forget a peer and fail its uncommitted hand-offs. Nothing else is affected (control
        thread).

        Return whether it was known.
        """
        if not self._peers.drop_peer(instance):
            return False
        logger.warning("prefill node %s lost: %s", instance, why)
        del self._urls[instance]
        self._directory.forget_peer(instance)
        self._sockets.disconnect_node(instance.encode())
        contained.disconnect_peer(self._transfer, instance)
        self._dropped(instance, PeerFailedError(f"prefill node {instance} failed: {why}"))
        return True

    def close(self) -> None:
        """Start no more handshakes."""
        self._directory.close()
