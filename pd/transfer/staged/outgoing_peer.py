"""A decode node as the rooms for it see it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.common.send_queue import SendQueue
from pd.transfer.staged.sender import OPENING_SECONDS, StagedSender

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from pd.transfer.ranges import Block
    from pd.util.starvation import Patience


class OutgoingPeer:
    """The rooms for one decode node at one address. They outlive a link of which nothing was sent.

    Any thread may call it. ``changed`` guards every attribute and the senders.

    Args:
        wake: tells the links' thread of a queued block.

    Attributes:
        peer: instance id of D.
        refusal: why we will open no link to it.
        progress: when a block or a step of a link's opening last succeeded.
        buffer_bytes: size of a staging buffer of the current link.
        opening: whether both ends' libraries are opening a link.
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

    def add_sender(self, sender: StagedSender) -> None:
        """Admit a room. Raises TransferError if the peer is not connected or refuses links."""
        with self.changed:
            error = self._end or self.refusal
            if error is not None:
                raise error
            self._queue.add_sender(sender)

    def enqueue_sender(self, sender: StagedSender) -> None:
        if self._queue.enqueue_sender(sender):
            self._wake()

    def remove_sender(self, sender: StagedSender) -> None:
        self._queue.remove_sender(sender)

    def opening_failure(self, waiting_since: float) -> str:
        """Return why a room should stop waiting for a link; empty if it should not.

        Args:
            waiting_since: since when the room has waited.
        """
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
        """Whether a block is queued. Needs no lock, because ``wake`` announces a block queued
        meanwhile."""
        return bool(self._queue)

    def take_block(self) -> tuple[StagedSender, Block] | None:
        """Take the next block of the room whose turn it is."""
        with self.changed:
            return self._queue.take_block()

    def note_progress(self) -> None:
        with self.changed:
            self.progress = time.monotonic()

    def on_link_opening(self) -> None:
        """Note that we asked the peer for buffers."""
        with self.changed:
            self.opening, self.progress = True, time.monotonic()

    def on_link_opened(self, buffer_bytes: int) -> None:
        with self.changed:
            self.opening = False
            self._failing_since, self._failure = float("inf"), ""
            self.buffer_bytes, self.progress = buffer_bytes, time.monotonic()

    def on_link_not_opened(self, reason: str) -> None:
        """Note a failure. We will try another link."""
        with self.changed:
            self.opening = False
            self._failing_since = min(self._failing_since, time.monotonic())
            self._failure = reason

    def on_link_lost(self, reason: str, *, keep_waiting: bool) -> None:
        """Fail the rooms. With ``keep_waiting``, fail only those of which a block was taken."""
        with self.changed:
            self.opening = False
            for sender in list(self._queue.senders):
                if sender.begun or not keep_waiting:
                    sender.fail(TransferError(reason))

    def on_unreachable(self, error: TransferError, *, final: bool) -> None:
        """Fail rooms, because nobody listens there and an instance listens as long as it lives.
        With ``final``, we try no link again."""
        with self.changed:
            if final:
                self.refusal = error
                self._queue.fail_all(error)
            else:
                self._queue.fail_queued(error)
