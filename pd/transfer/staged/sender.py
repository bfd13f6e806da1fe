"""P's side of one room over a staged link."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from pd.core.errors import PDError, TransferError
from pd.transfer.base import Sender, TransferState
from pd.transfer.ranges import Block, check_pages, checked_block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.messages import Reservation
    from pd.transfer.base import IntArray
    from pd.transfer.computed import Computed
    from pd.transfer.copier import Copier
    from pd.transfer.staged.outgoing_link import OutgoingLink


def pieces(block: Block, max_cells: int, page_size: int) -> Iterator[Block]:
    """Parts of at most ``max_cells`` cells, of several layers if all tokens fit, that end between
    pages where that is possible: whole pages are faster to copy."""
    tokens = block.token_stop - block.token_start
    if tokens <= max_cells:
        layers = max_cells // tokens
        for layer in range(block.layer_start, block.layer_stop, layers):
            stop = min(layer + layers, block.layer_stop)
            yield Block(block.token_start, block.token_stop, layer, stop)
        return
    for layer in range(block.layer_start, block.layer_stop):
        start = block.token_start
        while start < block.token_stop:
            stop = start + max_cells
            if stop >= block.token_stop:
                stop = block.token_stop
            elif stop // page_size * page_size > start:
                stop = stop // page_size * page_size
            yield Block(start, stop, layer, layer + 1)
            start = stop


class StagedSender(Sender):
    """A queue of blocks that take turns with those of other rooms.

    Args:
        computed: delays blocks until they are there.

    Attributes:
        reading: blocks whose copy from the pool into a slot is under way.
        unsaid: blocks that were taken from the queue and of which D was not told yet.
        table: the pages, as the copier wants them.
    """

    def __init__(
        self,
        link: OutgoingLink,
        copier: Copier,
        computed: Computed,
        reservation: Reservation,
        pages: IntArray,
        tokens: range,
    ) -> None:
        check_pages(pages, copier.page_size, copier.num_slots, tokens.start, tokens.stop)
        self.room, self.epoch = reservation.room, reservation.epoch
        self.error: PDError | None = None
        self.reading = self.unsaid = 0
        self.waiting_since = 0.0
        self._link, self._copier, self._computed = link, copier, computed
        self._changed = link.changed
        self._tokens = tokens
        self.table = copier.table(pages, tokens.stop)
        self._computing = 0
        self._ranges: deque[Block] = deque()
        self._blocks: Iterator[Block] = iter(())
        self._state = TransferState.ACTIVE
        self._finished = self._begun = False
        self._bytes = 0

    @property
    def bytes_sent(self) -> int:
        return self._bytes

    @property
    def active(self) -> bool:
        return self._state is TransferState.ACTIVE

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        block = checked_block(
            self._tokens, self._copier.num_layers, token_start, token_stop, layer_start, layer_stop
        )
        if not block.cells or not self.active:
            return
        with self._changed:
            if not self.active:
                return
            assert not self._finished, "send after finish"
            self._bytes += block.cells * self._copier.cell_bytes
            self._computing += 1
        self._computed.then(lambda reason: self._is_there(block, reason))

    def _is_there(self, block: Block, reason: str) -> None:
        with self._changed:
            self._computing -= 1
            if reason:
                self.fail(TransferError(f"the KV to be sent was not computed: {reason}"))
            elif self.active:
                self._ranges.append(block)
                self._link.enqueue(self)

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self.settle()

    def poll(self) -> TransferState:
        if self.active:
            self._link.check_progress(self)
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def drained(self) -> bool:
        with self._changed:
            return not self.active and not self.reading

    def fail(self, error: PDError) -> None:
        """Record the first error and drop what is queued."""
        with self._changed:
            if self.active:
                self._state, self.error = TransferState.FAILED, error
                self._ranges.clear()
                self._blocks = iter(())
                self._link.forget(self)

    # ---- called by the link and the gatherer, with the lock

    @property
    def begun(self) -> bool:
        """Something of it was taken by its link."""
        return self._begun

    def move(self, link: OutgoingLink) -> None:
        """Wait for another link; nothing was begun on the last."""
        self._link = link
        link.adopt(self, queued=bool(self._ranges))

    def next_block(self, max_cells: int) -> Block | None:
        while True:
            block = next(self._blocks, None)
            if block is not None:
                self._begun = True
                return block
            if not self._ranges:
                return None
            self._blocks = pieces(self._ranges.popleft(), max_cells, self._copier.page_size)

    def said(self) -> None:
        """D was told of a block, or it was dropped."""
        self.unsaid -= 1
        self.waiting_since = time.monotonic()
        self.settle()

    def settle(self) -> None:
        """DONE when nothing is left to send."""
        under_way = self._computing or self.unsaid or self._link.queued(self)
        if self.active and self._finished and not under_way:
            self._state = TransferState.DONE
            self._link.forget(self)
