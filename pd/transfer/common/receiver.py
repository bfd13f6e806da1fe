"""Receiving side of one room, for backends where D's own threads write the pages."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Receiver, TransferState
from pd.transfer.wire.errors import PeerDataError

if TYPE_CHECKING:
    from pd.transfer.pool_shape import MissingTokens, PoolShape
    from pd.transfer.ranges import Block
    from pd.util.starvation import Patience


class ReceiverOwner(Protocol):
    """The rooms that connections may write for; see
    :class:`pd.transfer.common.open_receivers.OpenReceivers`."""

    @property
    def patience(self) -> Patience: ...

    def remove_receiver(self, receiver: Any) -> None:
        """Take in no more blocks for a room that has ended."""


class CountedReceiver(Receiver):
    """Counts every (layer, token) once, with layers numbered through all planes.

    Pages are written only between :meth:`enter_pages` and :meth:`leave_pages`, so D knows by itself
    whether the room is :meth:`drained`.

    Attributes:
        sources: connections or links that a block was claimed from.
    """

    def __init__(
        self,
        owner: ReceiverOwner,
        shape: PoolShape,
        peer: str,
        room: bytes,
        epoch: int,
        tokens: MissingTokens,
    ) -> None:
        self.peer, self.room, self.epoch = peer, room, epoch
        self.error: PDError | None = None
        self.sources: set[object] = set()
        self._owner, self._shape, self._tokens = owner, shape, tokens
        self._claimed = np.zeros((shape.num_layers, tokens.stop - tokens.start), dtype=np.bool_)
        self._expected = shape.missing_bytes(tokens)
        self._received = 0
        self._committed = False
        self._state = TransferState.ACTIVE
        self._touching = 0
        self._progress = time.monotonic()
        self._lock = threading.RLock()

    @property
    def destination(self) -> bytes:
        return b""

    @property
    def bytes_received(self) -> int:
        return self._received

    @property
    def is_active(self) -> bool:
        return self._state is TransferState.ACTIVE

    def commit(self, num_bytes: int) -> None:
        with self._lock:
            if self._committed:
                return
            self._committed, self._progress = True, time.monotonic()
        if num_bytes != self._expected:
            self.fail(
                TransferError(
                    f"{self.peer} committed {num_bytes} KV bytes; {self._expected} were reserved"
                )
            )
        self._check_complete()

    def poll(self) -> TransferState:
        since = self._progress
        if self._committed and self._owner.patience.is_over(since, LEASE_SECONDS, self.peer):
            self.fail(
                TransferError(
                    f"{self.peer} committed, but {self._expected - self._received} of "
                    f"{self._expected} KV bytes did not arrive within "
                    f"{time.monotonic() - since:.1f} s"
                )
            )
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def fail(self, error: PDError) -> None:
        """Record the first error. From now on only copies under way write the pages."""
        with self._lock:
            if not self.is_active:
                return
            self._state, self.error = TransferState.FAILED, error
        self._owner.remove_receiver(self)

    def drained(self) -> bool:
        with self._lock:
            return not self.is_active and not self._touching

    def on_peer_drained(self) -> None:
        """Do nothing, because D itself writes the pages and does not depend on P."""

    # ---- called by the thread that reads the connections

    def claim_block(self, block: Block, source: object) -> bool:
        """Claim a block of one plane. Return False if it repeats a part of another block.

        Raises:
            PeerDataError: the block is outside the reservation.
        """
        wanted = self._tokens.of_group(self._shape.plane_of(block).group)
        if block.token_start < wanted.start or block.token_stop > wanted.stop:
            raise PeerDataError(
                f"tokens [{block.token_start}, {block.token_stop}) are outside the reserved "
                f"[{wanted.start}, {wanted.stop})"
            )
        start = self._tokens.start
        cells = self._claimed[
            block.layer_start : block.layer_stop,
            block.token_start - start : block.token_stop - start,
        ]
        if np.count_nonzero(cells):
            return False
        cells[:] = True
        self.sources.add(source)
        return True

    def enter_pages(self) -> bool:
        """Ask to write the pages. If this returns True, you must call :meth:`leave_pages`."""
        with self._lock:
            if not self.is_active:
                return False
            self._touching += 1
            return True

    def leave_pages(self, written: int) -> None:
        """End a copy, from any thread. ``written`` bytes of a complete block count as received."""
        with self._lock:
            self._touching -= 1
            self._received += written
            self._progress = time.monotonic()
        if written:
            self._check_complete()

    def _check_complete(self) -> None:
        with self._lock:
            if not self.is_active or not self._committed or self._received != self._expected:
                return
            self._state = TransferState.DONE
        self._owner.remove_receiver(self)
