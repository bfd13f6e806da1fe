"""D's side of one room over tcp."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Receiver, TransferState
from pd.transfer.frames import FrameError
from pd.transfer.memory import InPlace
from pd.transfer.ranges import check_pages
from pd.transfer.tcp_staging import Tables

if TYPE_CHECKING:
    from pd.transfer.base import IntArray
    from pd.transfer.ranges import Block
    from pd.transfer.tcp_inbox import Inbox

_DRAIN_SECONDS = 1.0


class TcpReceiver(Receiver):
    """Counts every (layer, token) once. Pages are written, by the inbox's thread or by copies that
    it began, only between :meth:`enter` and :meth:`leave`, which is what makes :meth:`drained` a
    local fact."""

    def __init__(
        self, inbox: Inbox, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: range
    ) -> None:
        memory = inbox.memory
        check_pages(pages, memory.page_size, memory.num_slots, tokens.start, tokens.stop)
        self.peer, self.room, self.epoch = peer, room, epoch
        self.error: PDError | None = None
        self._inbox = inbox
        pages = pages.copy()
        self.tables, self.in_place = Tables(pages, tokens.stop), InPlace(memory, pages)
        self._tokens = tokens
        self._claimed = np.zeros((memory.num_layers, len(tokens)), dtype=np.bool_)
        self._expected = self._claimed.size * memory.cell_bytes
        # At this node, and of those the bytes that lie in the pages.
        self._arrived = self._received = 0
        self._committed = False
        self._state = TransferState.ACTIVE
        self._touching = 0
        self._progress = time.monotonic()
        self._changed = threading.Condition()
        self._connections: set[int] = set()

    @property
    def destination(self) -> bytes:
        return b""

    @property
    def bytes_received(self) -> int:
        return self._received

    def commit(self, num_bytes: int) -> None:
        with self._changed:
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
        if self._committed and time.monotonic() - self._progress > LEASE_SECONDS:
            self.fail(
                TransferError(
                    f"{self.peer} committed, but {self._expected - self._received} of "
                    f"{self._expected} KV bytes did not arrive within {LEASE_SECONDS} s"
                )
            )
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def fail(self, error: PDError) -> None:
        """Record the first error; nothing is written from now on but by a call under way."""
        with self._changed:
            if self._state is not TransferState.ACTIVE:
                return
            self._state, self.error = TransferState.FAILED, error
        self._inbox.remove(self)

    def drained(self) -> bool:
        with self._changed:
            return self._state is not TransferState.ACTIVE and not self._touching

    def wait_drained(self) -> None:
        """After an end: writes wait for nothing but the pool, so this takes a moment."""
        with self._changed:
            self._changed.wait_for(lambda: not self._touching, timeout=_DRAIN_SECONDS)

    def peer_drained(self) -> None:
        """Of no use here: D's own thread does the writing."""

    # ---- called by the inbox's thread

    def claim(self, block: Block, connection: int) -> bool:
        """Whether a frame is wanted; False for one that repeats what another frame claimed.

        Raises FrameError when the block is not of this reservation.
        """
        start, stop = self._tokens.start, self._tokens.stop
        if block.token_start < start or block.token_stop > stop:
            raise FrameError(
                f"tokens [{block.token_start}, {block.token_stop}) are outside the reserved "
                f"[{start}, {stop})"
            )
        cells = self._claimed[
            block.layer_start : block.layer_stop,
            block.token_start - start : block.token_stop - start,
        ]
        if cells.any():
            return False
        cells[:] = True
        self._connections.add(connection)
        return True

    @property
    def active(self) -> bool:
        return self._state is TransferState.ACTIVE

    def arrived(self, num_bytes: int) -> None:
        """A frame is complete at this node; its connection is not needed for it any more."""
        with self._changed:
            self._arrived += num_bytes
            self._progress = time.monotonic()

    def enter(self) -> bool:
        """Whether the pages may be written now; if so, :meth:`leave` must follow."""
        with self._changed:
            if self._state is not TransferState.ACTIVE:
                return False
            self._touching += 1
            return True

    def leave(self, written: int) -> None:
        """A write is over, by any thread; ``written`` bytes of a completed frame now count."""
        with self._changed:
            self._touching -= 1
            self._received += written
            self._progress = time.monotonic()
            if self._state is not TransferState.ACTIVE:
                self._changed.notify_all()
        if written:
            self._settle()

    def lost(self, connection: int, reason: str) -> None:
        """A connection ended; if this room lacks bytes, they may have been lost with it."""
        if connection in self._connections and self._arrived < self._expected:
            self.fail(TransferError(f"a data connection from node {self.peer} was lost: {reason}"))

    def _settle(self) -> None:
        with self._changed:
            complete = self._committed and self._received == self._expected
            if not complete or self._state is not TransferState.ACTIVE:
                return
            self._state = TransferState.DONE
        self._inbox.remove(self)
