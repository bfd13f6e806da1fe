"""Sending side of the tcp backend: the link to one peer, with its queue of rooms and its lanes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from pd.core.errors import TransferError
from pd.transfer.common.send_queue import SendQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.transfer.ranges import Block
    from pd.transfer.tcp.sender import TcpSender
    from pd.transfer.wire.dialler import PeerGoneError
    from pd.transfer.wire.greeting import PeerRefusedError
    from pd.util.starvation import Patience


class Lane(Protocol):
    """One connection of a link; see :class:`pd.transfer.tcp.lane.TcpLane`."""

    @property
    def can_read(self) -> bool:
        """Whether the lane can read the pool."""

    def shut_down(self) -> None:
        """Wake the lane from a blocked send."""


class TcpLink:
    """Connections to one peer and the rooms that use them. Rooms take turns, a frame each.

    Args:
        start_lane: opens a connection for the link, given the lane's number, and raises
            RuntimeError if the system has no thread for it.
        num_lanes: connections to open.
    """

    def __init__(
        self,
        own: str,
        peer: str,
        address: tuple[str, int],
        key: bytes | None,
        start_lane: Callable[[TcpLink, int], Lane],
        num_lanes: int,
        patience: Patience,
    ) -> None:
        self.own, self.peer, self.address, self.key = own, peer, address, key
        self.patience = patience
        # Guards the link and all its senders. Reentrant: a sender that ends removes itself.
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self.refusal: PeerRefusedError | None = None
        self.progress = time.monotonic()
        self._queue: SendQueue[TcpSender] = SendQueue()
        self._start_lane, self._num_lanes = start_lane, num_lanes
        self._in_hand = 0
        self._lanes: list[Lane] = []

    def start(self) -> None:
        """Open the missing connections. A node that only receives needs none.

        If the system has no thread for some of them, a later call opens them. Raises TransferError
        if it has none at all.
        """
        with self.changed:
            while not self.closed and len(self._lanes) < self._num_lanes:
                try:
                    self._lanes.append(self._start_lane(self, len(self._lanes)))
                except RuntimeError as error:
                    if self._lanes:
                        return
                    failure = f"no data connection to {self.peer} could be opened"
                    raise TransferError(f"{failure}: {error}") from error

    def add_sender(self, sender: TcpSender) -> None:
        self.start()
        with self.changed:
            if self.closed:
                raise TransferError(f"{self.peer} is not connected")
            if self.refusal is not None:
                raise self.refusal
            self._queue.add_sender(sender)

    def enqueue_sender(self, sender: TcpSender) -> None:
        if self._queue.enqueue_sender(sender):
            self.changed.notify()

    def remove_sender(self, sender: TcpSender) -> None:
        self._queue.remove_sender(sender)

    def wait_for_work(self) -> bool:
        """Wait until a block is queued. Return False when the link is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._queue)
            return not self.closed

    def take_block(self, lane: int) -> tuple[TcpSender, Block] | None:
        """Take the next block. The lane holds it until :meth:`release_block`."""
        with self.changed:
            taken = self._queue.take_block()
            if taken is not None:
                self._in_hand += 1
                taken[0].lanes.add(lane)
            return taken

    def mark_read(self, sender: TcpSender) -> None:
        """Note that nothing reads the pages of a taken block any more."""
        with self.changed:
            sender.mark_read()

    def release_block(self, sender: TcpSender) -> None:
        """Note that a taken block has left or was dropped."""
        with self.changed:
            self._in_hand -= 1
            if self.closed:
                self.changed.notify_all()
            self.progress = time.monotonic()
            sender.mark_sent()

    def on_lane_lost(self, lane: int, reason: str) -> None:
        """Fail the rooms of a lane that lost its connection, because their blocks may not have
        arrived."""
        error = TransferError(f"the data connection to node {self.peer} was lost: {reason}")
        with self.changed:
            for sender in [s for s in self._queue.senders if lane in s.lanes]:
                sender.fail(error)

    def on_refused(self, error: PeerRefusedError) -> None:
        """Fail the rooms of a peer that refuses the connection."""
        with self.changed:
            self.refusal = error
            self._queue.fail_all(error)

    def on_peer_gone(self, error: PeerGoneError) -> None:
        """Fail the rooms with data for the peer, which is gone."""
        with self.changed:
            self._queue.fail_queued(error)

    def on_staging_failed(self, error: TransferError) -> bool:
        """Leave the work of a lane without buffers to the other lanes. Fail the rooms with data if
        no lane has buffers. Return whether one has."""
        with self.changed:
            others = any(lane.can_read for lane in self._lanes)
            if others:
                # We may have woken this lane instead of one that can read.
                self.changed.notify()
            else:
                self._queue.fail_queued(error)
            return others

    def end_link(self, reason: str) -> None:
        """Fail all rooms and close the connections. Returns at once; :meth:`TcpSender.drained`
        stays False while a lane still reads a block."""
        with self.changed:
            self.closed = True
            self._queue.fail_all(TransferError(reason))
            self.changed.notify_all()
        for lane in self._lanes:
            lane.shut_down()

    @property
    def is_over(self) -> bool:
        """Whether the link has ended and no lane holds a block."""
        with self.changed:
            return self.closed and not self._in_hand

    def close(self, reason: str) -> None:
        """End the link, and wait until nothing reads the pool for it."""
        self.end_link(reason)
        with self.changed:
            self.changed.wait_for(lambda: not self._in_hand)
