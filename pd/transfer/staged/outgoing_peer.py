"""A decode node as the rooms that are sent to it see it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.rooms.send_queue import SendQueue

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from pd.core.starvation import Patience
    from pd.transfer.ranges import Block
    from pd.transfer.staged.sender import StagedSender

# How long a room waits for a link that cannot be opened, unless its deadline is sooner, and for the
# next step of one whose libraries are at work. On a busy machine these take seconds of processor
# time. That the peer is dead, its heartbeats and the channel tell earlier.
OPENING_SECONDS = 30.0


class OutgoingPeer:
    """The rooms for one decode node at one address. They outlive a link of which nothing was sent.

    Called by any thread; ``changed`` guards every attribute, and the senders.

    Args:
        wake: tells the thread that drives the links that a block is queued.

    Attributes:
        peer: instance id of D.
        refusal: why no link to it will be opened.
        progress: when a block or a step of a link's opening was last seen to succeed.
        buffer_bytes: size of a staging buffer of the current link.
        opening: both ends' libraries are opening a link.
    """

    def __init__(
        self,
        peer: str,
        address: tuple[str, int],
        changed: threading.Condition,
        patience: Patience,
        wake: Callable[[], None],
    ) -> None:
        self.peer, self.address = peer, address
        self.changed, self.patience = changed, patience
        self.refusal: TransferError | None = None
        self.progress = time.monotonic()
        self.buffer_bytes = 0
        self.opening = False
        self._queue: SendQueue[StagedSender] = SendQueue()
        self._wake = wake
        self._end: TransferError | None = None
        # Since when links cannot be opened, and why.
        self._failing_since = float("inf")
        self._failure = ""

    # ---- rooms

    def open(self, sender: StagedSender) -> None:
        """Raises TransferError if the peer is not connected or refuses links."""
        with self.changed:
            error = self._end or self.refusal
            if error is not None:
                raise error
            self._queue.add(sender)

    def enqueue(self, sender: StagedSender) -> None:
        if self._queue.enqueue(sender):
            self._wake()

    def remove(self, sender: StagedSender) -> None:
        self._queue.remove(sender)

    def opening_failure(self, waiting_since: float) -> str:
        """Return why a room that has waited since then should wait no longer for a link; empty if
        it should wait."""
        waited = time.monotonic() - max(self._failing_since, waiting_since)
        return f"{self._failure} (tried for {waited:.0f} s)" if waited > OPENING_SECONDS else ""

    def close(self, reason: str) -> None:
        """Fail the rooms and admit no other."""
        with self.changed:
            self._end = TransferError(f"{self.peer} is not connected")
            self._queue.fail_all(TransferError(reason))

    # ---- links

    @property
    def has_rooms(self) -> bool:
        with self.changed:
            return bool(self._queue.senders)

    @property
    def has_blocks(self) -> bool:
        """Without the lock: a block that is queued meanwhile is announced by ``wake``."""
        return bool(self._queue)

    def take(self) -> tuple[StagedSender, Block] | None:
        """The next block of the room whose turn it is."""
        with self.changed:
            return self._queue.take()

    def progressed(self) -> None:
        with self.changed:
            self.progress = time.monotonic()

    def link_opens(self) -> None:
        """The peer was asked for buffers."""
        with self.changed:
            self.opening, self.progress = True, time.monotonic()

    def link_opened(self, buffer_bytes: int) -> None:
        with self.changed:
            self.opening = False
            self._failing_since, self._failure = float("inf"), ""
            self.buffer_bytes, self.progress = buffer_bytes, time.monotonic()

    def link_not_opened(self, reason: str) -> None:
        """Another one will be tried."""
        with self.changed:
            self.opening = False
            self._failing_since = min(self._failing_since, time.monotonic())
            self._failure = reason

    def link_lost(self, reason: str, *, keep_waiting: bool) -> None:
        """Fail the rooms, but if ``keep_waiting`` only those of which something was taken."""
        with self.changed:
            self.opening = False
            for sender in list(self._queue.senders):
                if sender.begun or not keep_waiting:
                    sender.fail(TransferError(reason))

    def unreachable(self, error: TransferError, *, final: bool) -> None:
        """Nobody listens there, and an instance listens as long as it lives. ``final``: no link
        will be tried again."""
        with self.changed:
            if final:
                self.refusal = error
                self._queue.fail_all(error)
            else:
                self._queue.fail_queued(error)
