"""P's side of one room over a staged link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.core.errors import TransferError
from pd.transfer.ranges import Block
from pd.transfer.rooms.sender import QueuedSender
from pd.transfer.staged.outgoing_peer import OPENING_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.messages import Reservation
    from pd.transfer.base import IntArray
    from pd.transfer.computed import Computed
    from pd.transfer.copier import Copier
    from pd.transfer.pool_shape import MissingTokens
    from pd.transfer.staged.outgoing_peer import OutgoingPeer


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


class StagedSender(QueuedSender):
    """A block is read from the pool by its copy into a staging buffer. It has left when D was
    notified that its buffer of the pair is filled.

    Attributes:
        to: the decode node.
        table: the pages in the form that the copier wants.
        begun: something was taken, so the room ends with the link that took it.
    """

    def __init__(
        self,
        to: OutgoingPeer,
        copier: Copier,
        computed: Computed,
        reservation: Reservation,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(to, copier.shape, computed.then, reservation, pages, tokens)
        self.table: Any = copier.table(pages, tokens.stop)
        self.begun = False
        self.to = to

    # ---- with the lock

    def _enqueue(self) -> None:
        self.to.enqueue(self)

    def _leave_link(self) -> None:
        self.to.remove(self)

    def _split(self, block: Block) -> Iterator[Block]:
        self.begun = True
        cells = self.to.buffer_bytes // self._shape.plane_of(block).cell_bytes
        return pieces(block, max(1, cells), self._shape.page_size)

    def _stalled_since(self) -> float | None:
        if not self.queued and not self.sending:
            return None
        return max(self.to.progress, self.waiting_since)

    def _stall_limit(self) -> float:
        return OPENING_SECONDS if self.to.opening else super()._stall_limit()

    def _check_stall(self) -> None:
        waits = self._stalled_since() is not None
        failure = self.to.opening_failure(self.waiting_since) if waits else ""
        if failure:
            self.fail(TransferError(failure))
        else:
            super()._check_stall()
