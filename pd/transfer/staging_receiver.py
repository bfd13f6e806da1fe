"""D's side of one room over a staged link."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Receiver, TransferState
from pd.transfer.frames import FrameError
from pd.transfer.ranges import Block, check_pages

if TYPE_CHECKING:
    from pd.transfer.base import IntArray
    from pd.transfer.staging_in import InLink
    from pd.transfer.staging_scatter import Incoming


class StagedReceiver(Receiver):
    """Counts every (layer, token) once. Only the hub's thread writes to the pages, and only
    between :meth:`enter` and :meth:`leave`, which is what makes :meth:`drained` a local fact."""

    def __init__(
        self, incoming: Incoming, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: range
    ) -> None:
        copier = incoming.copier
        check_pages(pages, copier.page_size, copier.num_slots, tokens.start, tokens.stop)
        self.peer, self.room, self.epoch = peer, room, epoch
        self.error: PDError | None = None
        self.links: set[InLink] = set()
        self.table = copier.table(pages, tokens.stop)
        self._incoming, self._tokens = incoming, tokens
        self._claimed = np.zeros((copier.num_layers, len(tokens)), dtype=np.bool_)
        self._expected = self._claimed.size * copier.cell_bytes
        self._received = 0
        self._committed = False
        self._state = TransferState.ACTIVE
        self._touching = 0
        self._progress = time.monotonic()
        self._lock = threading.Lock()

    @property
    def destination(self) -> bytes:
        return b""

    @property
    def bytes_received(self) -> int:
        return self._received

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
        """Record the first error; nothing is written from now on but by copies under way."""
        with self._lock:
            if self._state is not TransferState.ACTIVE:
                return
            self._state, self.error = TransferState.FAILED, error
        self._incoming.remove(self)

    def drained(self) -> bool:
        with self._lock:
            return self._state is not TransferState.ACTIVE and not self._touching

    def peer_drained(self) -> None:
        """Of no use here: D's own thread does the writing."""

    # ---- called by the hub's thread

    def claim(self, block: Block, link: InLink) -> bool:
        """Whether a block is to be written; not if it repeats what another one brought.

        Raises FrameError when it is not of this reservation.
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
        self.links.add(link)
        return True

    def enter(self) -> bool:
        """Whether the pages may be written now; if so, :meth:`leave` must follow."""
        with self._lock:
            if self._state is not TransferState.ACTIVE:
                return False
            self._touching += 1
            return True

    def leave(self, arrived: int) -> None:
        """A copy is over; ``arrived`` bytes now count."""
        with self._lock:
            self._touching -= 1
            self._received += arrived
            self._progress = time.monotonic()
        self._settle()

    def lost(self, reason: str) -> None:
        """The link is over; what is not here is not coming."""
        if self._received < self._expected:
            self.fail(TransferError(f"the link from {self.peer} was lost: {reason}"))

    def _settle(self) -> None:
        with self._lock:
            complete = self._committed and self._received == self._expected
            if not complete or self._state is not TransferState.ACTIVE:
                return
            self._state = TransferState.DONE
        self._incoming.remove(self)
