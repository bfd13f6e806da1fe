"""P's side of one room over a staged link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pd.core.errors import TransferError
from pd.transfer.common.sender import QueuedSender, SenderLink
from pd.transfer.ranges import Block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.messages import Reservation
    from pd.transfer.computed import Computed
    from pd.transfer.copier import Copier
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_shape import MissingTokens

# How long a room waits for a link that cannot be opened, unless its deadline is sooner, and for the
# next step of one whose libraries are at work. On a busy machine these take seconds of CPU time. If
# the peer is dead, its heartbeats and the channel tell us earlier.
OPENING_SECONDS = 30.0


def split_at_pages(block: Block, max_cells: int, page_size: int) -> Iterator[Block]:
    """Yield parts of at most ``max_cells`` cells, of several layers if all tokens fit.

    Parts end between pages where possible, because whole pages are faster to copy.
    """
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


class StagedPeer(SenderLink, Protocol):
    """The decode node of a room; see :class:`pd.transfer.staged.outgoing_peer.OutgoingPeer`."""

    @property
    def buffer_bytes(self) -> int: ...
    @property
    def progress(self) -> float: ...
    @property
    def opening(self) -> bool: ...

    def opening_failure(self, waiting_since: float) -> str:
        """Return why the room should stop waiting for a link; empty if it should not."""


class StagedSender(QueuedSender[StagedPeer]):
    """Reads a block from the pool by its copy into a staging buffer. The block has left when D was
    notified of its filled buffer.

    Attributes:
        table: the pages as converted for the copier.
        begun: whether a block was taken, so the room ends with the link that took it.
    """

    def __init__(
        self,
        peer: StagedPeer,
        copier: Copier,
        computed: Computed,
        reservation: Reservation,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(peer, copier.shape, computed.call_when_done, reservation, tokens)
        self.table: Any = copier.make_table(pages, tokens.stop)
        self.begun = False

    # ---- with the lock

    def _split_block(self, block: Block) -> Iterator[Block]:
        self.begun = True
        cells = self._link.buffer_bytes // self._shape.plane_of(block).cell_bytes
        return split_at_pages(block, max(1, cells), self._shape.page_size)

    def _stalled_since(self) -> float | None:
        if not self.has_queued and not self.sending:
            return None
        return max(self._link.progress, self.waiting_since)

    def _stall_limit(self) -> float:
        return OPENING_SECONDS if self._link.opening else super()._stall_limit()

    def _check_stall(self) -> None:
        waits = self._stalled_since() is not None
        failure = self._link.opening_failure(self.waiting_since) if waits else ""
        if failure:
            self.fail(TransferError(failure))
        else:
            super()._check_stall()
