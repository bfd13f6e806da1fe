"""The decode nodes that a sending end works with, and messages that wait for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.leases import Leases
from pd.core.messages import LEASE_SECONDS, AbortRoom, PeerHeartbeat
from pd.core.starvation import RUN_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.messages import Message
    from pd.core.node_info import NodeInfo
    from pd.core.starvation import Patience


class DecodePeers:
    """Decode nodes that shook hands and live. The caller holds the node's lock.

    A decode node connects its message socket after the handshake. Until a message of it has come,
    it is not *reached*: nothing can be sent to it. Aborts wait for that.

    Args:
        own: instance id of this node.
        post: sends a message to the process with an identity.
        patience: extends the time for which aborts wait.
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

    def __contains__(self, instance: object) -> bool:
        return instance in self._leases

    def add(self, peer: NodeInfo) -> None:
        """Add a decode node that shook hands."""
        self._leases.renew(peer.instance_id)
        self._infos[peer.instance_id] = peer

    def infos(self) -> list[NodeInfo]:
        """The decode nodes that shook hands and were not dropped since."""
        return list(self._infos.values())

    def drop(self, instance: str) -> bool:
        """Forget a decode node; False if it was not known."""
        self._reached.discard(instance)
        self._waiting.pop(instance, None)
        self._infos.pop(instance, None)
        return self._leases.drop(instance)

    def renew(self, instance: str) -> bool:
        """Renew the lease of a decode node of which a message came; False if it did not shake
        hands."""
        if instance not in self._leases:
            return False
        self._leases.renew(instance)
        self._reached.add(instance)
        for _, message in self._waiting.pop(instance, ()):
            self.send(message)
        return True

    def send(self, message: Message) -> None:
        """Send to the process that the message names."""
        self._post(message.to.encode(), message)

    def send_when_reached(self, message: AbortRoom) -> None:
        """Send now, or as soon as a message of the decode node has come."""
        if message.to in self._reached:
            self.send(message)
        else:
            self._waiting.setdefault(message.to, []).append((time.monotonic(), message))

    def heartbeat(self) -> None:
        """Tell every decode node that this node lives."""
        for instance in self._leases:
            self.send(PeerHeartbeat(to=instance, sender=self._own, run_delay=RUN_DELAY.total))

    def expired(self, now: float) -> list[str]:
        """Decode nodes that were silent for a lease. Also drops aborts that waited that long."""
        for instance, aborts in list(self._waiting.items()):
            left = [x for x in aborts if not self._patience.is_over(x[0], LEASE_SECONDS, instance)]
            self._waiting[instance] = left
            if not self._waiting[instance]:
                del self._waiting[instance]
        return self._leases.expired(now)
