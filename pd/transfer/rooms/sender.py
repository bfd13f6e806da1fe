"""Sending side of one room: blocks wait until they are computed, and then for their link."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Protocol

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Sender, TransferState
from pd.transfer.ranges import check_pages, checked_blocks

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from pd.core.messages import Reservation
    from pd.core.starvation import Patience
    from pd.transfer.base import IntArray
    from pd.transfer.pool_shape import MissingTokens, PoolShape
    from pd.transfer.ranges import Block


class SenderLink(Protocol):
    """The link as its senders see it.

    Attributes:
        changed: guards the link and all its senders. Reentrant: a sender that ends removes itself
            from the link.
        patience: extends the limit on waiting for the peer.
    """

    @property
    def peer(self) -> str: ...
    @property
    def changed(self) -> threading.Condition: ...
    @property
    def patience(self) -> Patience: ...


class BlockQueue:
    """Blocks in the order in which they were queued, to be taken in parts.

    Args:
        split: divides a block when its first part is taken.

    Attributes:
        cells: tokens times layers of all that is queued.
    """

    def __init__(self, split: Callable[[Block], Iterator[Block]]) -> None:
        self._split = split
        self._blocks: deque[Block] = deque()
        self._parts: Iterator[Block] = iter(())
        self.cells = 0

    def put(self, block: Block) -> None:
        self._blocks.append(block)
        self.cells += block.cells

    def take(self) -> Block | None:
        """The next part; None if nothing is queued."""
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


class QueuedSender(Sender):
    """A queue of blocks, which a link empties.

    A block is queued once its KV is computed. The link takes blocks one at a time (:meth:`take`),
    reports when a block's pages are not read any more (:meth:`was_read`) and when the block has
    left (:meth:`was_sent`). The room is DONE when it is finished and every block has left.

    Subclasses say how the link learns of a queued block (:meth:`_enqueue`) and of the room's end
    (:meth:`_leave_link`), how blocks are divided (:meth:`_split`), and since when the peer has kept
    the room waiting (:meth:`_stalled_since`).

    Args:
        when_computed: calls back when what was queued on the calling thread's current CUDA stream
            is complete; see :meth:`pd.transfer.computed.Computed.then`.
        pages: int32 page table of the source. It is checked here and not kept.
        tokens: those to send, of each plane.

    Attributes:
        reading: blocks taken by the link whose pages are still read.
        sending: blocks taken by the link that have not left yet.
        waiting_since: when the queue was last empty before it was filled, or a block last left;
            by ``time.monotonic``.

    Raises:
        ValueError: the page table does not cover the tokens or leaves the pool.
    """

    def __init__(
        self,
        link: SenderLink,
        shape: PoolShape,
        when_computed: Callable[[Callable[[str], None]], None],
        reservation: Reservation,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        check_pages(pages, shape.page_size, shape.num_slots, tokens.start, tokens.stop)
        self.room, self.epoch = reservation.room, reservation.epoch
        self.error: PDError | None = None
        self.reading = self.sending = 0
        self.waiting_since = time.monotonic()
        self._changed, self._peer, self._patience = link.changed, link.peer, link.patience
        self._shape, self._tokens, self._when_computed = shape, tokens, when_computed
        self._state = TransferState.ACTIVE
        self._finished = False
        self._bytes = self._computing = 0
        self._queue = BlockQueue(self._split)

    # ---- Sender: any thread

    @property
    def bytes_sent(self) -> int:
        return self._bytes

    @property
    def active(self) -> bool:
        return self._state is TransferState.ACTIVE

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        blocks = checked_blocks(
            self._shape, self._tokens, token_start, token_stop, layer_start, layer_stop
        )
        if not blocks:
            return
        with self._changed:
            if not self.active:
                return
            assert not self._finished, "send after finish"
            self._bytes += sum(self._shape.num_bytes(block) for block in blocks)
            self._computing += 1
        self._when_computed(lambda reason: self._on_computed(blocks, reason))

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._settle()

    def poll(self) -> TransferState:
        if self.active:
            with self._changed:
                self._settle()
                if self.active:
                    self._check_stall()
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def drained(self) -> bool:
        with self._changed:
            return not self.active and self._is_quiet()

    def fail(self, error: PDError) -> None:
        """Record the first error and drop what is queued."""
        with self._changed:
            if self.active:
                self._state, self.error = TransferState.FAILED, error
                self._queue.clear()
                self._leave_link()

    # ---- for the link, with the lock

    @property
    def queued(self) -> bool:
        """Whether :meth:`take` would return a block."""
        return self._queue.cells > 0

    def take(self) -> Block | None:
        """The next block, which counts as being read and sent; None if none is queued."""
        block = self._queue.take()
        if block is not None:
            self.reading += 1
            self.sending += 1
        return block

    def was_read(self) -> None:
        """The pages of a taken block are not read any more."""
        self.reading -= 1

    def was_sent(self) -> None:
        """A taken block has left or was dropped."""
        self.sending -= 1
        self.waiting_since = time.monotonic()
        self._settle()

    # ---- for subclasses, with the lock

    @abstractmethod
    def _enqueue(self) -> None:
        """Tell the link that a block was queued."""

    @abstractmethod
    def _leave_link(self) -> None:
        """Remove the room from the link; it has just become DONE or FAILED."""

    def _split(self, block: Block) -> Iterator[Block]:
        """The parts of a block that the link takes one at a time; the first one is wanted now."""
        return iter((block,))

    def _is_quiet(self) -> bool:
        """Whether nothing that was taken reads the pages, and nothing that must not outlive
        :meth:`drained` is under way."""
        return not self.reading

    def _stalled_since(self) -> float | None:
        """Time since which the peer has taken nothing although a block waits for it; None if none
        does."""
        return None

    def _stall_limit(self) -> float:
        """Seconds that the peer may make the room wait where both ends have a CPU."""
        return LEASE_SECONDS

    def _stall_error(self, seconds: float) -> str:
        return f"no KV data could be sent to node {self._peer} for {seconds:.1f} s"

    def _check_stall(self) -> None:
        """Fail if the peer has made the room wait too long."""
        since = self._stalled_since()
        if since is not None and self._patience.is_over(since, self._stall_limit(), self._peer):
            self.fail(TransferError(self._stall_error(time.monotonic() - since)))

    def _settle(self) -> None:
        """DONE when nothing is left to send."""
        left = self._computing or self.queued or self.sending
        if self.active and self._finished and not left and self._is_quiet():
            self._state = TransferState.DONE
            self._leave_link()

    def _on_computed(self, blocks: list[Block], reason: str) -> None:
        """The KV of some blocks is complete, or cannot be if there is a reason. Without the
        lock."""
        with self._changed:
            self._computing -= 1
            if reason:
                self.fail(TransferError(f"the KV to be sent was not computed: {reason}"))
            elif self.active:
                if not self.queued:
                    self.waiting_since = time.monotonic()
                for block in blocks:
                    self._queue.put(block)
                    self._enqueue()
