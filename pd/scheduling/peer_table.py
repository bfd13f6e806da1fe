"""The nodes at the other ends of hand-offs, and messages waiting for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.leases import Leases
from pd.core.messages import LEASE_SECONDS, AbortRoom, PeerHeartbeat
from pd.util.starvation import RUN_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.messages import Message
    from pd.core.node_info import NodeInfo
    from pd.util.starvation import Patience


class PeerTable:
    """Tracks the nodes we know by handshake. The caller holds the node's lock.

    A decode node connects its message socket to ours after the handshake. It is *reached* with its
    first message: before, we can send it nothing, so aborts wait.

    Args:
        own: instance id of this node.
        post: sends a message to the process with an identity. Any thread may call it.
        patience: extends the time that aborts wait.
    """

    def __init__(
        self, own: str, post: Callable[[bytes, Message], None], patience: Patience
    ) -> None:
        self._own, self._patience = own, patience
        self._post = post
        self._leases: Leases[str] = Leases()
        self._infos: dict[str, NodeInfo] = {}
        self._reached: set[str] = set()
        self._waiting: dict[str, list[tuple[float, AbortRoom]]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __contains__(self, instance: object) -> bool:
        return instance in self._leases

    def add_peer(self, peer: NodeInfo) -> None:
        """Add a node after its handshake."""
        self._leases.renew_lease(peer.instance_id)
        self._infos[peer.instance_id] = peer

    def list_infos(self) -> list[NodeInfo]:
        """List the nodes known by handshake."""
        return list(self._infos.values())

    def drop_peer(self, instance: str) -> bool:
        """Forget a node. Return whether it was known."""
        self._reached.discard(instance)
        self._waiting.pop(instance, None)
        self._infos.pop(instance, None)
        return self._leases.drop_lease(instance)

    def renew_lease(self, instance: str) -> bool:
        """Renew a node's lease after a message of it. Return False if it did not shake hands."""
        if instance not in self._leases:
            return False
        self._leases.renew_lease(instance)
        self._reached.add(instance)
        for _, message in self._waiting.pop(instance, ()):
            self.send_message(message)
        return True

    def send_message(self, message: Message) -> None:
        """Send to the process named by the message."""
        self._post(message.to.encode(), message)

    def send_when_reached(self, message: AbortRoom) -> None:
        """Send now or, if the node is not reached yet, after its first message."""
        if message.to in self._reached:
            self.send_message(message)
        else:
            self._waiting.setdefault(message.to, []).append((time.monotonic(), message))

    def send_heartbeats(self) -> None:
        """Send a heartbeat to every node."""
        for instance in self._leases:
            self.send_heartbeat(instance)

    def send_heartbeat(self, instance: str) -> None:
        self.send_message(PeerHeartbeat(to=instance, sender=self._own, run_delay=RUN_DELAY.total))

    def find_silent(self, now: float) -> list[str]:
        """List nodes silent for a lease. Also drops aborts that waited as long."""
        for instance, aborts in list(self._waiting.items()):
            left = [x for x in aborts if not self._patience.is_over(x[0], LEASE_SECONDS, instance)]
            self._waiting[instance] = left
            if not self._waiting[instance]:
                del self._waiting[instance]
        return self._leases.find_expired(now)
