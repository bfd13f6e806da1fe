"""P's side of the tcp backend: for each peer a queue of ranges and the threads that send them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Sender, TransferState
from pd.transfer.pool_memory import InPlace
from pd.transfer.ranges import Block, check_pages, checked_block
from pd.transfer.tcp.frames import HEADER, MAX_PAYLOAD, encode_header
from pd.transfer.tcp.host_buffers import Tables
from pd.transfer.tcp.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.starvation import Patience
    from pd.transfer.base import IntArray
    from pd.transfer.computed import Computed
    from pd.transfer.pool_memory import PoolMemory, Stretches
    from pd.transfer.wire.greeting import RefusedError

# Large enough that headers and lookups vanish, small enough that rooms take turns on the link.
FRAME_BYTES = MAX_PAYLOAD


class TcpSender(Sender):
    """A queue of blocks. A block is read from the pool when its turn comes, and the pages are free
    once that is over: the call that copies it into the kernel has returned or, of a staged pool,
    the copy to the host was observed complete.

    Args:
        computed: delays blocks until they are there.

    Attributes:
        in_hand: blocks that lanes have taken and not yet sent; ``reading``: those of them whose
            pages are still read.
    """

    def __init__(
        self,
        link: Link,
        memory: PoolMemory,
        computed: Computed,
        room: bytes,
        epoch: int,
        pages: IntArray,
        tokens: range,
    ) -> None:
        check_pages(pages, memory.page_size, memory.num_slots, tokens.start, tokens.stop)
        self.room, self.epoch = room, epoch
        self.error: PDError | None = None
        self.lanes: set[int] = set()
        self.in_hand = self.reading = 0
        pages = pages.copy()
        self.tables = Tables(pages, tokens.stop)
        self._in_place = InPlace(memory, pages, HEADER.size)
        self._link, self._memory, self._computed = link, memory, computed
        self._tokens = tokens
        self._computing = 0
        self._blocks: deque[Iterator[Block]] = deque()
        self._state = TransferState.ACTIVE
        self._finished = False
        self._bytes = 0
        self.waiting_since = 0.0

    @property
    def bytes_sent(self) -> int:
        return self._bytes

    @property
    def state(self) -> TransferState:
        return self._state

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        block = checked_block(
            self._tokens, self._memory.num_layers, token_start, token_stop, layer_start, layer_stop
        )
        if not block.cells:
            return
        with self._link.changed:
            if self._state is not TransferState.ACTIVE:
                return
            assert not self._finished, "send after finish"
            self._bytes += block.cells * self._memory.cell_bytes
            self._computing += 1
        self._computed.then(lambda reason: self._is_there(block, reason))

    def _is_there(self, block: Block, reason: str) -> None:
        with self._link.changed:
            self._computing -= 1
            if reason:
                self.fail(TransferError(f"the KV to be sent was not computed: {reason}"))
            elif self._state is TransferState.ACTIVE:
                self._blocks.append(block.split(max(1, FRAME_BYTES // self._memory.cell_bytes)))
                self._link.enqueue(self)

    def finish(self) -> None:
        with self._link.changed:
            self._finished = True
            self.settle()

    def poll(self) -> TransferState:
        if self._state is TransferState.ACTIVE:
            self._link.check_progress(self)
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def drained(self) -> bool:
        with self._link.changed:
            return self._state is not TransferState.ACTIVE and not self.reading

    def fail(self, error: PDError) -> None:
        """Record the first error and drop what is queued."""
        with self._link.changed:
            if self._state is TransferState.ACTIVE:
                self._state, self.error = TransferState.FAILED, error
                self._blocks.clear()
                self._link.forget(self)

    # ---- called by the link, which holds its lock

    def next_block(self) -> Block | None:
        while self._blocks:
            block = next(self._blocks[0], None)
            if block is not None:
                return block
            self._blocks.popleft()
        return None

    def settle(self) -> None:
        """DONE when nothing is left to send."""
        idle = not self._blocks and not self._computing and not self.in_hand
        if self._state is TransferState.ACTIVE and self._finished and idle:
            self._state = TransferState.DONE
            self._link.forget(self)

    # ---- called by a lane, without the lock

    def header(self, block: Block) -> bytes:
        payload = block.cells * self._memory.cell_bytes
        return encode_header(self.room, self.epoch, block, payload)

    def in_place(self, block: Block) -> Stretches:
        return self._in_place.stretches(block, self.header(block))


class Link:
    """Everything on its way to one peer. Rooms take turns, a frame each."""

    def __init__(
        self,
        own: str,
        peer: str,
        address: tuple[str, int],
        key: bytes | None,
        memory: PoolMemory,
        num_lanes: int,
        patience: Patience,
    ) -> None:
        self.own, self.peer, self.address, self.key = own, peer, address, key
        self.patience = patience
        # Guards the link and all its senders. Reentrant: a sender that ends takes itself out.
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self.refusal: RefusedError | None = None
        self.progress = time.monotonic()
        self._senders: set[TcpSender] = set()
        self._queue: deque[TcpSender] = deque()
        self._memory, self._num_lanes = memory, num_lanes
        self._in_hand = 0
        self._lanes: list[Lane] = []

    def start(self) -> None:
        """Open the connections. Not before somebody sends: a node that only receives needs none."""
        with self.changed:
            if not self._lanes and not self.closed:
                self._lanes = [
                    Lane(self, number, self._memory) for number in range(self._num_lanes)
                ]

    def open(self, sender: TcpSender) -> None:
        self.start()
        with self.changed:
            if self.closed:
                raise TransferError(f"{self.peer} is not connected")
            if self.refusal is not None:
                raise self.refusal
            self._senders.add(sender)

    def enqueue(self, sender: TcpSender) -> None:
        if sender not in self._queue:
            self._queue.append(sender)
            sender.waiting_since = time.monotonic()
            self.changed.notify()

    def forget(self, sender: TcpSender) -> None:
        self._senders.discard(sender)
        with contextlib.suppress(ValueError):
            self._queue.remove(sender)

    def wait_for_work(self) -> bool:
        """Block until something is queued; False when the link is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._queue)
            return not self.closed

    def take(self, lane: int) -> tuple[TcpSender, Block] | None:
        """The next block, now in the lane's hand until :meth:`put_down`."""
        with self.changed:
            while self._queue:
                sender = self._queue.popleft()
                block = sender.next_block()
                if block is None:
                    sender.settle()
                    continue
                self._queue.append(sender)
                sender.in_hand += 1
                sender.reading += 1
                self._in_hand += 1
                sender.lanes.add(lane)
                return sender, block
            return None

    def copied(self, sender: TcpSender) -> None:
        """The pages of a taken block are not read any more."""
        with self.changed:
            sender.reading -= 1

    def put_down(self, sender: TcpSender) -> None:
        """A taken block has left or is given up."""
        with self.changed:
            sender.in_hand -= 1
            self._in_hand -= 1
            if self.closed:
                self.changed.notify_all()
            self.progress = sender.waiting_since = time.monotonic()
            sender.settle()

    def lane_lost(self, lane: int, reason: str) -> None:
        """What this lane carried may not have arrived: its rooms end."""
        error = TransferError(f"the data connection to node {self.peer} was lost: {reason}")
        with self.changed:
            for sender in [s for s in self._senders if lane in s.lanes]:
                sender.fail(error)

    def refused(self, error: RefusedError) -> None:
        """The peer will not have us: whoever waits for it ends now."""
        with self.changed:
            self.refusal = error
            for sender in list(self._senders):
                sender.fail(error)

    def nobody_listens(self) -> None:
        """An instance listens as long as it lives: rooms with data for it need not wait longer."""
        with self.changed:
            for sender in list(self._queue):
                sender.fail(TransferError(f"{self.peer} is gone: nobody listens at its address"))

    def check_progress(self, sender: TcpSender) -> None:
        with self.changed:
            if sender not in self._queue:
                return
            since = max(self.progress, sender.waiting_since)
            if self.patience.is_over(since, LEASE_SECONDS, self.peer):
                idle = time.monotonic() - since
                sender.fail(
                    TransferError(f"no KV data could be sent to node {self.peer} for {idle:.1f} s")
                )

    def end(self, reason: str) -> None:
        """Fail everything and hang up. Returns at once: a block that a lane still reads holds up
        :meth:`TcpSender.drained`."""
        with self.changed:
            self.closed = True
            for sender in list(self._senders):
                sender.fail(TransferError(reason))
            self.changed.notify_all()
        for lane in self._lanes:
            lane.hang_up()

    @property
    def over(self) -> bool:
        """Whether the link was ended and no lane has anything in hand."""
        with self.changed:
            return self.closed and not self._in_hand

    def close(self, reason: str) -> None:
        """End the link; returns when nothing reads the pool for it any more."""
        self.end(reason)
        with self.changed:
            self.changed.wait_for(lambda: not self._in_hand)
