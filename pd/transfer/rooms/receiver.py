"""Receiving side of one room, for backends with which D's own threads write into the pages."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Receiver, TransferState
from pd.transfer.ranges import check_pages
from pd.transfer.wire.errors import PeerDataError

if TYPE_CHECKING:
    from pd.core.starvation import Patience
    from pd.transfer.base import IntArray
    from pd.transfer.pool_shape import MissingTokens, PoolShape
    from pd.transfer.ranges import Block


class CountedReceiver(Receiver):
    """Counts every (layer, token) once, with layers numbered through all planes. Pages are written
    only between :meth:`enter` and :meth:`leave`, which is what makes :meth:`drained` a local fact.

    Attributes:
        sources: connections or links from which a block was claimed.
    """

    def __init__(
        self,
        shape: PoolShape,
        patience: Patience,
        peer: str,
        room: bytes,
        epoch: int,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        check_pages(pages, shape.page_size, shape.num_slots, tokens.start, tokens.stop)
        self.peer, self.room, self.epoch = peer, room, epoch
        self.error: PDError | None = None
        self.sources: set[object] = set()
        self._shape, self._tokens, self._patience = shape, tokens, patience
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
    def active(self) -> bool:
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
        self._settle()

    def poll(self) -> TransferState:
        since = self._progress
        if self._committed and self._patience.is_over(since, LEASE_SECONDS, self.peer):
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
        """Record the first error. From now on only copies under way write to the pages."""
        with self._lock:
            if not self.active:
                return
            self._state, self.error = TransferState.FAILED, error
        self._remove()

    def drained(self) -> bool:
        with self._lock:
            return not self.active and not self._touching

    def peer_drained(self) -> None:
        """Does nothing: D itself writes the pages, so it does not depend on P."""

    # ---- called by the thread that reads the connections

    def claim(self, block: Block, source: object) -> bool:
        """Whether a block, which is in one plane, is wanted; False if it repeats a part of another
        one.

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

    def enter(self) -> bool:
        """Whether the pages may be written now. If so, :meth:`leave` must follow."""
        with self._lock:
            if not self.active:
                return False
            self._touching += 1
            return True

    def leave(self, written: int) -> None:
        """A copy is over. ``written`` bytes of a complete block count as received. Any thread."""
        with self._lock:
            self._touching -= 1
            self._received += written
            self._progress = time.monotonic()
        if written:
            self._settle()

    def _settle(self) -> None:
        with self._lock:
            if not self.active or not self._committed or self._received != self._expected:
                return
            self._state = TransferState.DONE
        self._remove()

    @abstractmethod
    def _remove(self) -> None:
        """Have the node take in no more blocks for this room, which has ended."""
