"""Several backends in one manager. Each pair of nodes uses the first one that works for it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from pd.core.errors import HandshakeError, TransferError
from pd.core.transfer_choice import choose_backend
from pd.transfer.base import Receiver, Sender, TransferManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.core.messages import Reservation
    from pd.core.node_info import NodeInfo
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_shape import MissingTokens

logger = logging.getLogger(__name__)


class ChoosingManager(TransferManager):
    """Delegates each peer to one of its managers (``--transfer-backend auto``).

    It guarantees as much as the backend of the pair, because senders and receivers are that
    backend's own and we do not wrap them. Both ends apply
    :func:`pd.core.transfer_choice.choose_backend` to the same two lists of addresses, which never
    change while a process lives. So they cannot disagree.

    Args:
        managers: in order of preference, sharing one patience. This manager owns and closes them.
    """

    name = "auto"

    def __init__(self, managers: Sequence[TransferManager]) -> None:
        self._managers = {manager.name: manager for manager in managers}
        super().__init__(managers[0].shape, managers[0].patience)
        self._addresses = {name: manager.address() for name, manager in self._managers.items()}
        self._lock = threading.Lock()
        self._chosen: dict[str, TransferManager] = {}

    def address(self) -> dict[str, str]:
        """Return the address of the most preferred backend. Peers learn :meth:`addresses`."""
        return next(iter(self._addresses.values()))

    def addresses(self) -> dict[str, dict[str, str]]:
        return self._addresses

    def backend_of(self, peer: str) -> str:
        manager = self._chosen.get(peer)
        return manager.name if manager else ""

    def connect(self, peer: NodeInfo) -> None:
        both = (self._addresses, peer.transfers)
        name, obstacles = choose_backend(*reversed(both) if peer.role == "prefill" else both)
        if not name:
            raise HandshakeError(
                f"no transfer backend works with {peer.instance_id}, which offers "
                f"{', '.join(peer.transfers) or 'none'}; this node offers "
                f"{', '.join(self._addresses)} {'; '.join(obstacles)}".rstrip()
            )
        manager = self._managers[name]
        old = self._chosen.get(peer.instance_id)
        if old is not manager:
            if old is not None:
                self.disconnect(peer.instance_id)
            for obstacle in obstacles:
                logger.info(
                    "a transfer backend does not work with %s: %s", peer.instance_id, obstacle
                )
        manager.connect(peer)
        with self._lock:
            self._chosen[peer.instance_id] = manager

    def disconnect(self, instance_id: str) -> None:
        with self._lock:
            manager = self._chosen.pop(instance_id, None)
        if manager is not None:
            manager.disconnect(instance_id)

    def open_sender(
        self, peer: str, reservation: Reservation, pages: IntArray, tokens: MissingTokens
    ) -> Sender:
        return self._get_manager(peer).open_sender(peer, reservation, pages, tokens)

    def open_receiver(
        self, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: MissingTokens
    ) -> Receiver:
        return self._get_manager(peer).open_receiver(peer, room, epoch, pages, tokens)

    def is_linked(self, peer: str) -> bool:
        manager = self._chosen.get(peer)
        return manager is not None and manager.is_linked(peer)

    @property
    def quarantined_buffers(self) -> int:
        return sum(manager.quarantined_buffers for manager in self._managers.values())

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()

    def _get_manager(self, peer: str) -> TransferManager:
        manager = self._chosen.get(peer)
        if manager is None:
            raise TransferError(f"{peer} is not connected")
        return manager
