"""Registry of a prefill node: decode nodes that may send reservations after a handshake."""

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
        connect: we call this for each accepted node before we answer the handshake, also if the
            node is known already. If it raises an error, we refuse the node.
        on_replaced: we call this with the instance id of a node whose message endpoint a new
            instance has taken, before ``connect`` for the new one.
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
        """Refuse handshakes, because this node is about to stop."""
        self._unavailable = "draining"

    def handshake(self, peer: NodeInfo) -> NodeInfo:
        """Accept a decode node and return the description of this one.

        Raises:
            UnavailableError: this node is starting or draining.
            HandshakeError: the two cannot work together; the message names both values.
            PDError: an error raised by ``connect``.
        """
        if self._unavailable:
            raise UnavailableError(f"{self.own.instance_id} is {self._unavailable}")
        if peer.role == "prefill":
            raise HandshakeError(
                f"role differs: {self.own.instance_id} shakes hands with decode nodes, "
                f"{peer.instance_id} is a {peer.role} node"
            )
        check_compatible(self.own, peer)
        # One at a time, because callbacks of two instances at one endpoint must not interleave.
        with self._handshakes:
            for old in self._list_replaced(peer):
                logger.info("%s took the place of %s", peer.instance_id, old)
                self.forget_peer(old)
                self._on_replaced(old)
            self._connect(peer)
            with self._lock:
                self._peers[peer.instance_id] = peer
        logger.info("handshake with %s at %s", peer.instance_id, peer.endpoint)
        return self.own

    def all_peers(self) -> list[NodeInfo]:
        with self._lock:
            return list(self._peers.values())

    def get_peer(self, instance_id: str) -> NodeInfo | None:
        with self._lock:
            return self._peers.get(instance_id)

    def forget_peer(self, instance_id: str) -> None:
        """Forget a node that is gone. It may shake hands again."""
        with self._lock:
            self._peers.pop(instance_id, None)

    def _list_replaced(self, peer: NodeInfo) -> list[str]:
        """List other instances with the endpoint of ``peer``."""
        with self._lock:
            return [
                known.instance_id
                for known in self._peers.values()
                if known.endpoint == peer.endpoint and known.instance_id != peer.instance_id
            ]
