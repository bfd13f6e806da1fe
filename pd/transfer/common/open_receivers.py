"""The receivers of a node that blocks may arrive for."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pd.core.errors import TransferError
from pd.transfer.common.receiver import CountedReceiver

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pd.util.starvation import Patience

logger = logging.getLogger(__name__)

ReceiverT = TypeVar("ReceiverT", bound=CountedReceiver)

_LOG_INTERVAL = 1.0


class OpenReceivers(Generic[ReceiverT]):
    """Receivers that have not ended, by room and epoch. Any thread may call the methods.

    Args:
        lock: guards the receivers. The thread that reads the connections uses it for its own state,
            too, so hold it only for a moment.
    """

    def __init__(self, lock: AbstractContextManager[Any], patience: Patience) -> None:
        self.patience = patience
        self._lock = lock
        self._receivers: dict[tuple[bytes, int], ReceiverT] = {}
        self._closed = False
        self._next_log = 0.0

    def add_receiver(self, receiver: ReceiverT) -> None:
        """Let blocks arrive for a receiver. Raises TransferError if they cannot."""
        with self._lock:
            key = (receiver.room, receiver.epoch)
            if self._closed or key in self._receivers:
                reason = "closed" if self._closed else "a receiver of this room and epoch exists"
                raise TransferError(f"cannot receive from {receiver.peer}: {reason}")
            self._receivers[key] = receiver

    def remove_receiver(self, receiver: ReceiverT) -> None:
        with self._lock:
            self._receivers.pop((receiver.room, receiver.epoch), None)

    def find_receiver(self, room: bytes, epoch: int, peer: str) -> ReceiverT | None:
        """Return the receiver of a room and epoch, if ``peer`` may send to it."""
        with self._lock:
            receiver = self._receivers.get((room, epoch))
        return receiver if receiver is not None and receiver.peer == peer else None

    def list_receivers(self, peer: str | None = None) -> list[ReceiverT]:
        """List the receivers of one peer, or of all."""
        with self._lock:
            return [r for r in self._receivers.values() if peer in (None, r.peer)]

    def fail_receivers(self, error: TransferError, peer: str | None = None) -> None:
        for receiver in self.list_receivers(peer):
            receiver.fail(error)

    def close(self) -> None:
        """Admit no more receivers."""
        with self._lock:
            self._closed = True

    def log_discarded(self, origin: object, room: bytes, epoch: int, count: int) -> None:
        """Log a discarded block, but at most one a second. For the thread that discards them."""
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_INTERVAL
            logger.info(
                "discarded a block from %s: room %s, epoch %d is unknown, over or has it already "
                "(%d discarded so far)",
                origin,
                room.hex(),
                epoch,
                count,
            )
