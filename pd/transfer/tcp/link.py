"""Sending side of the tcp backend: a link to each peer, with its queue of rooms and its lanes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.pool_memory import InPlace
from pd.transfer.rooms.send_queue import SendQueue
from pd.transfer.rooms.sender import QueuedSender
from pd.transfer.tcp.frames import HEADER, MAX_PAYLOAD, encode_header
from pd.transfer.tcp.host_buffers import Tables
from pd.transfer.tcp.lane import TcpLane

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.core.messages import Reservation
    from pd.core.starvation import Patience
    from pd.transfer.base import IntArray
    from pd.transfer.computed import Computed
    from pd.transfer.pool_memory import PoolMemory, Stretches
    from pd.transfer.pool_shape import MissingTokens
    from pd.transfer.ranges import Block
    from pd.transfer.wire.dialler import PeerGoneError
    from pd.transfer.wire.greeting import PeerRefusedError

# Large enough that headers and lookups vanish, small enough that rooms take turns on the link.
FRAME_BYTES = MAX_PAYLOAD


class TcpSender(QueuedSender):
    """A block is read from the pool when its turn comes. Its pages are free when the call that
    copies it into the kernel has returned or, if the pool is staged, when the copy to the host was
    observed complete.

    Attributes:
        lanes: numbers of the lanes that took something of this room.
        tables: page table for copies to the host.
    """

    def __init__(
        self,
        link: TcpLink,
        memory: PoolMemory,
        computed: Computed,
        reservation: Reservation,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(link, memory.shape, computed.then, reservation, pages, tokens)
        self.lanes: set[int] = set()
        pages = pages.copy()
        self.tables = Tables(pages, tokens.stop)
        self._in_place = InPlace(memory, pages, HEADER.size)
        self._link = link

    # ---- called by a lane, without the lock

    def header(self, block: Block) -> bytes:
        return encode_header(self.room, self.epoch, block, self._shape.num_bytes(block))

    def in_place(self, block: Block) -> Stretches:
        return self._in_place.stretches(block, self.header(block))

    # ---- with the lock

    def _enqueue(self) -> None:
        self._link.enqueue(self)

    def _leave_link(self) -> None:
        self._link.remove(self)

    def _split(self, block: Block) -> Iterator[Block]:
        return block.split(max(1, FRAME_BYTES // self._shape.plane_of(block).cell_bytes))

    def _stalled_since(self) -> float | None:
        if not self.queued and not self.sending:
            return None
        return max(self._link.progress, self.waiting_since)


class TcpLink:
    """Connections to one peer and the rooms that use them, which take turns, a frame each."""

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
        self.refusal: PeerRefusedError | None = None
        self.progress = time.monotonic()
        self._queue: SendQueue[TcpSender] = SendQueue()
        self._memory, self._num_lanes = memory, num_lanes
        self._in_hand = 0
        self._lanes: list[TcpLane] = []

    def start(self) -> None:
        """Open the connections, if they are not open. A node that only receives needs none.

        Those for which the system has no thread are opened by a later call. Raises TransferError if
        it has none at all.
        """
        with self.changed:
            while not self.closed and len(self._lanes) < self._num_lanes:
                try:
                    self._lanes.append(TcpLane(self, len(self._lanes), self._memory))
                except RuntimeError as error:
                    if self._lanes:
                        return
                    what = f"no data connection to {self.peer} could be opened"
                    raise TransferError(f"{what}: {error}") from error

    def open(self, sender: TcpSender) -> None:
        self.start()
        with self.changed:
            if self.closed:
                raise TransferError(f"{self.peer} is not connected")
            if self.refusal is not None:
                raise self.refusal
            self._queue.add(sender)

    def enqueue(self, sender: TcpSender) -> None:
        if self._queue.enqueue(sender):
            self.changed.notify()

    def remove(self, sender: TcpSender) -> None:
        self._queue.remove(sender)

    def wait_for_work(self) -> bool:
        """Block until something is queued; False when the link is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._queue)
            return not self.closed

    def take(self, lane: int) -> tuple[TcpSender, Block] | None:
        """The next block, which the lane holds until :meth:`release`."""
        with self.changed:
            taken = self._queue.take()
            if taken is not None:
                self._in_hand += 1
                taken[0].lanes.add(lane)
            return taken

    def copied(self, sender: TcpSender) -> None:
        """The pages of a taken block are not read any more."""
        with self.changed:
            sender.was_read()

    def release(self, sender: TcpSender) -> None:
        """A taken block has left or was dropped."""
        with self.changed:
            self._in_hand -= 1
            if self.closed:
                self.changed.notify_all()
            self.progress = time.monotonic()
            sender.was_sent()

    def lane_lost(self, lane: int, reason: str) -> None:
        """Fail the rooms of a lane that lost its connection: their blocks may not have arrived."""
        error = TransferError(f"the data connection to node {self.peer} was lost: {reason}")
        with self.changed:
            for sender in [s for s in self._queue.senders if lane in s.lanes]:
                sender.fail(error)

    def refused(self, error: PeerRefusedError) -> None:
        """Fail the rooms of a peer that refuses the connection."""
        with self.changed:
            self.refusal = error
            self._queue.fail_all(error)

    def nobody_listens(self, error: PeerGoneError) -> None:
        """Fail the rooms with data for the peer, which is gone."""
        with self.changed:
            self._queue.fail_queued(error)

    def cannot_stage(self, error: TransferError) -> bool:
        """Leave the work of a lane without buffers to those that have some. If there are none, fail
        the rooms with data. Returns whether there are some."""
        with self.changed:
            others = any(lane.can_read for lane in self._lanes)
            if others:
                self.changed.notify()  # the lane may have been woken in the place of another one
            else:
                self._queue.fail_queued(error)
            return others

    def end(self, reason: str) -> None:
        """Fail all rooms and close the connections. Returns at once: while a lane still reads a
        block, :meth:`TcpSender.drained` is False."""
        with self.changed:
            self.closed = True
            self._queue.fail_all(TransferError(reason))
            self.changed.notify_all()
        for lane in self._lanes:
            lane.shut_down()

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
