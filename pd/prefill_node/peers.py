"""The decode nodes that a prefill node works with, and what they have yet to be told."""

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
    """Who shook hands and lives. Under the node's lock.

    A decode node connects its message socket after the handshake; until it has spoken, nothing can
    be sent to it. Aborts wait for that.

    Args:
        own: instance id of the prefill node.
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
        self._untold: dict[str, list[tuple[float, AbortRoom]]] = {}

    def __contains__(self, instance: object) -> bool:
        return instance in self._leases

    def add(self, peer: NodeInfo) -> None:
        """A decode node shook hands."""
        self._leases.renew(peer.instance_id)
        self._infos[peer.instance_id] = peer

    def infos(self) -> list[NodeInfo]:
        """Who shook hands and was not dropped since."""
        return list(self._infos.values())

    def drop(self, instance: str) -> bool:
        """Forget a decode node; False if it was not known."""
        self._reached.discard(instance)
        self._untold.pop(instance, None)
        self._infos.pop(instance, None)
        return self._leases.drop(instance)

    def heard_from(self, instance: str) -> bool:
        """Note a sign of life; False if this instance did not shake hands."""
        if instance not in self._leases:
            return False
        self._leases.renew(instance)
        self._reached.add(instance)
        for _, message in self._untold.pop(instance, ()):
            self.send(message)
        return True

    def send(self, message: Message) -> None:
        """Send to whom the message names."""
        self._post(message.to.encode(), message)

    def tell(self, message: AbortRoom) -> None:
        """Send as soon as the decode node can hear it."""
        if message.to in self._reached:
            self.send(message)
        else:
            self._untold.setdefault(message.to, []).append((time.monotonic(), message))

    def heartbeat(self) -> None:
        """Tell every decode node that P lives."""
        for instance in self._leases:
            self.send(PeerHeartbeat(to=instance, sender=self._own, run_delay=RUN_DELAY.total))

    def expired(self, now: float) -> list[str]:
        """Who was silent for a lease. Also forgets what waited that long to be told."""
        for instance, aborts in list(self._untold.items()):
            left = [x for x in aborts if not self._patience.is_over(x[0], LEASE_SECONDS, instance)]
            self._untold[instance] = left
            if not self._untold[instance]:
                del self._untold[instance]
        return self._leases.expired(now)
