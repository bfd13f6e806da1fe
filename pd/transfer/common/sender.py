"""Sending side of one room, whose blocks wait for the GPU and then for their link."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Sender, TransferState

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from pd.core.messages import Reservation
    from pd.transfer.pool_shape import MissingTokens, PoolShape
    from pd.transfer.ranges import Block
    from pd.util.starvation import Patience


class SenderLink(Protocol):
    """The link as its senders see it.

    Attributes:
        changed: guards the link and all its senders. Reentrant, because a sender that ends removes
            itself from the link.
        patience: extends the limit on waiting for the peer.
    """

    @property
    def peer(self) -> str: ...
    @property
    def changed(self) -> threading.Condition: ...
    @property
    def patience(self) -> Patience: ...

    def enqueue_sender(self, sender: Any) -> object:
        """Note that one more block of a sender is queued. Called with the lock."""

    def remove_sender(self, sender: Any) -> None:
        """Remove a sender that has just become DONE or FAILED. Called with the lock."""


LinkT = TypeVar("LinkT", bound=SenderLink)


class BlockQueue:
    """Blocks in the order of their arrival. The link takes them in parts.

    Args:
        split: divides a block when its first part is taken.

    Attributes:
        cells: tokens times layers of all queued blocks.
    """

    def __init__(self, split: Callable[[Block], Iterator[Block]]) -> None:
        self._split = split
        self._blocks: deque[Block] = deque()
        self._parts: Iterator[Block] = iter(())
        self.cells = 0

    def put_block(self, block: Block) -> None:
        self._blocks.append(block)
        self.cells += block.cells

    def take_part(self) -> Block | None:
        """Return the next part, or None if nothing is queued."""
        while self.cells:
            part = next(self._parts, None)
            if part is not None:
                self.cells -= part.cells
                return part
            self._parts = self._split(self._blocks.popleft())
        return None

    def clear(self) -> None:
        self._blocks.clear()
        self._parts, self.cells = iter(()), 0


class QueuedSender(Sender, Generic[LinkT]):
    """A queue of blocks for a link.

    A block enters the queue once its KV is computed. The link takes one block at a time
    (:meth:`take_block`), reports when it has read the block's pages (:meth:`mark_read`) and when
    the block has left (:meth:`mark_sent`). The room is DONE when it is finished and every block has
    left.

    Subclasses decide how to divide blocks (:meth:`_split_block`) and since when the peer has kept
    the room waiting (:meth:`_stalled_since`).

    Args:
        when_computed: see :meth:`pd.transfer.computed.Computed.call_when_done`.
        tokens: tokens to send, for each plane.

    Attributes:
        reading: number of taken blocks whose pages the link still reads.
        sending: number of taken blocks that have not left yet.
        waiting_since: when the empty queue was last filled or a block last left, by
            ``time.monotonic``.
    """

    def __init__(
        self,
        link: LinkT,
        shape: PoolShape,
        when_computed: Callable[[Callable[[str], None]], None],
        reservation: Reservation,
        tokens: MissingTokens,
    ) -> None:
        self.room, self.epoch = reservation.room, reservation.epoch
        self.error: PDError | None = None
        self.reading = self.sending = 0
        self.waiting_since = time.monotonic()
        self._link, self._changed = link, link.changed
        self._shape, self._tokens, self._when_computed = shape, tokens, when_computed
        self._state = TransferState.ACTIVE
        self._finished = False
        self._bytes = self._computing = 0
        self._queue = BlockQueue(self._split_block)

    # ---- Sender: any thread

    @property
    def bytes_sent(self) -> int:
        return self._bytes

    @property
    def is_active(self) -> bool:
        return self._state is TransferState.ACTIVE

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        blocks = self._shape.make_blocks(
            self._tokens, token_start, token_stop, layer_start, layer_stop
        )
        if not blocks:
            return
        with self._changed:
            if not self.is_active:
                return
            assert not self._finished, "send after finish"
            self._bytes += sum(self._shape.num_bytes(block) for block in blocks)
            self._computing += 1
        self._when_computed(lambda reason: self._on_computed(blocks, reason))

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._check_done()

    def poll(self) -> TransferState:
        if self.is_active:
            with self._changed:
                self._check_done()
                if self.is_active:
                    self._check_stall()
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def drained(self) -> bool:
        with self._changed:
            return not self.is_active and self._is_quiet()

    def fail(self, error: PDError) -> None:
        """Record the first error and drop what is queued."""
        with self._changed:
            if self.is_active:
                self._state, self.error = TransferState.FAILED, error
                self._queue.clear()
                self._link.remove_sender(self)

    # ---- for the link, with the lock

    @property
    def has_queued(self) -> bool:
        """Whether :meth:`take_block` would return a block."""
        return self._queue.cells > 0

    def take_block(self) -> Block | None:
        """Take the next block, which then counts as being read and sent. Return None if none is
        queued."""
        block = self._queue.take_part()
        if block is not None:
            self.reading += 1
            self.sending += 1
        return block

    def mark_read(self) -> None:
        """Note that nothing reads the pages of a taken block any more."""
        self.reading -= 1

    def mark_sent(self) -> None:
        """Note that a taken block has left or was dropped."""
        self.sending -= 1
        self.waiting_since = time.monotonic()
        self._check_done()

    # ---- for subclasses, with the lock

    def _split_block(self, block: Block) -> Iterator[Block]:
        """Yield the parts of a block. The link takes the first one now."""
        return iter((block,))

    def _is_quiet(self) -> bool:
        """Whether no taken block reads the pages, and nothing is under way that would have to end
        before :meth:`drained`."""
        return not self.reading

    def _stalled_since(self) -> float | None:
        """Return since when the peer has taken nothing of a waiting block, or None if no block
        waits."""
        return None

    def _stall_limit(self) -> float:
        """Return how many seconds the room may wait for a peer, if both ends get their CPU time."""
        return LEASE_SECONDS

    def _stall_error(self, seconds: float) -> str:
        return f"no KV data could be sent to node {self._link.peer} for {seconds:.1f} s"

    def _check_stall(self) -> None:
        """Fail if the room has waited too long for the peer."""
        since = self._stalled_since()
        if since is not None and self._link.patience.is_over(
            since, self._stall_limit(), self._link.peer
        ):
            self.fail(TransferError(self._stall_error(time.monotonic() - since)))

    def _check_done(self) -> None:
        """Become DONE when nothing is left to send."""
        left = self._computing or self.has_queued or self.sending
        if self.is_active and self._finished and not left and self._is_quiet():
            self._state = TransferState.DONE
            self._link.remove_sender(self)

    def _on_computed(self, blocks: list[Block], reason: str) -> None:
        """Queue blocks whose KV is complete, or fail if ``reason`` says why it cannot be.

        Called without the lock.
        """
        with self._changed:
            self._computing -= 1
            if reason:
                self.fail(TransferError(f"the KV to send was not computed: {reason}"))
            elif self.is_active:
                if not self.has_queued:
                    self.waiting_since = time.monotonic()
                for block in blocks:
                    self._queue.put_block(block)
                    self._link.enqueue_sender(self)
