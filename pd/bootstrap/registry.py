"""Registry of a prefill node: the decode nodes that may send reservations, after a handshake."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from pd.core.errors import HandshakeError, UnavailableError
from pd.core.node_info import NodeInfo, check_compatible

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Registry:
    """Decode nodes that shook hands with this process. Thread-safe.

    Args:
        own: description of this node.
        connect: called for each accepted node, before the handshake is answered; an error that it
            raises refuses the node. Called again when a known node shakes hands again.
        on_replaced: called with the instance id of a node whose place (message endpoint) a new
            instance took, before ``connect`` is called for the new one.
    """

    def __init__(
        self,
        own: NodeInfo,
        *,
        connect: Callable[[NodeInfo], None],
        on_replaced: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.own = own
        self._connect, self._on_replaced = connect, on_replaced
        self._lock = threading.Lock()
        self._handshakes = threading.Lock()
        self._peers: dict[str, NodeInfo] = {}
        self._unavailable = "starting"

    def set_ready(self) -> None:
        """Accept handshakes from now on."""
        self._unavailable = ""

    def set_draining(self) -> None:
        """Accept no more handshakes: this node is about to stop."""
        self._unavailable = "draining"

    def handshake(self, peer: NodeInfo) -> NodeInfo:
        """Accept a decode node and return what it needs to know of this one.

        Raises:
            UnavailableError: starting or draining.
            HandshakeError: the two cannot work together; the message names both values.
            PDError: whatever ``connect`` raised.
        """
        if self._unavailable:
            raise UnavailableError(f"{self.own.instance_id} is {self._unavailable}")
        if peer.role == "prefill":
            raise HandshakeError(
                f"role differs: {self.own.instance_id} shakes hands with decode nodes, "
                f"{peer.instance_id} is a {peer.role} node"
            )
        check_compatible(self.own, peer)
        # One at a time, so that callbacks of two instances at one endpoint cannot interleave.
        with self._handshakes:
            for old in self._at(peer):
                logger.info("%s took the place of %s", peer.instance_id, old)
                self.forget(old)
                self._on_replaced(old)
            self._connect(peer)
            with self._lock:
                self._peers[peer.instance_id] = peer
        logger.info("handshake with %s at %s", peer.instance_id, peer.endpoint)
        return self.own

    def peers(self) -> list[NodeInfo]:
        """Nodes that shook hands and were not forgotten since."""
        with self._lock:
            return list(self._peers.values())

    def get(self, instance_id: str) -> NodeInfo | None:
        """A node that shook hands, if it is known."""
        with self._lock:
            return self._peers.get(instance_id)

    def forget(self, instance_id: str) -> None:
        """The node is gone; it may shake hands again."""
        with self._lock:
            self._peers.pop(instance_id, None)

    def _at(self, peer: NodeInfo) -> list[str]:
        """Other instances that claimed the endpoint of ``peer``."""
        with self._lock:
            return [
                known.instance_id
                for known in self._peers.values()
                if known.endpoint == peer.endpoint and known.instance_id != peer.instance_id
            ]
